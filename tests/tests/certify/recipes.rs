//! Random models of every certified architecture, in the variants that are cut differently.
//!
//! Sliding windows are of 16 tokens, so that a conversation reaches far beyond them.

use gguf::Array;
use llama::testing::WeightType;

use crate::recipe::Recipe;

const WINDOW: &str = "attention.sliding_window";

/// The recipes of one architecture; none if it has no certification.
pub(crate) fn recipes(architecture: &'static str) -> Vec<Recipe> {
    let plain = Recipe::new(architecture, "").rms_norm();
    let with_bias = Recipe::new(architecture, "").layer_norm();
    match architecture {
        "llama" => llama(),
        "qwen2" => vec![plain, Recipe::new("qwen2", "tied").rms_norm().without(TIED)],
        "qwen3" => vec![plain],
        "qwen3moe" => vec![plain.experts()],
        "gpt-oss" => vec![plain.experts().set(WINDOW, 16).weights("_exps", WeightType::Mxfp4)],
        "gemma2" => vec![gemma2(plain)],
        "gemma3" => gemma3(),
        "phi3" => phi3(),
        "gpt2" => vec![with_bias.set("attention.head_count_kv", 4)],
        "smollm3" => vec![plain.set("block_count", 12)],
        "granite" => granite(),
        "olmo2" => vec![plain, Recipe::new("olmo2", "OLMo 3").rms_norm().set(WINDOW, 16)],
        "mistral3" => vec![plain.set("attention.temperature_scale", 0.1).set(ORIGINAL_CONTEXT, 16)],
        "deepseek2" => deepseek2(),
        "glm4moe" => glm4moe(),
        "qwen35" => qwen35(),
        "qwen3next" => vec![shared_expert(hybrid(plain))],
        "arcee" | "ernie4_5" | "exaone4" | "gemma" | "hunyuan-dense" | "internlm2" | "seed_oss" => {
            vec![plain]
        }
        "falcon" | "nemotron" | "phi2" | "stablelm" | "starcoder2" => vec![with_bias],
        "cohere2" => vec![with_bias.set("logit_scale", 0.25).set(WINDOW, 16)],
        "command-r" => vec![with_bias.set("logit_scale", 0.25)],
        "granitemoe" => vec![plain.experts().set("logit_scale", 8.0).set("embedding_scale", 12.0)],
        "minicpm" => vec![plain, Recipe::new("minicpm", "stated").rms_norm().set("residual_scale", 0.3)],
        "mpt" => vec![mpt(with_bias)],
        "phimoe" => vec![plain.experts()],
        "qwen2moe" => vec![shared_expert(plain)],
        "qwen2vl" => vec![plain.set(SECTIONS, sections())],
        "qwen35moe" => vec![shared_expert(hybrid(plain).set(SECTIONS, sections()))],
        _ => Vec::new(),
    }
}

/// What a tied model lacks.
const TIED: &[&str] = &["output.weight", "output.bias"];
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

fn llama() -> Vec<Recipe> {
    let llama = |variant| Recipe::new("llama", variant).rms_norm();
    vec![
        llama("frequency factors"),
        llama("tied, f32").without(TIED).without(&["rope_freqs.weight"]).unquantised(),
        llama("experts").experts(),
    ]
}

fn gemma2(plain: Recipe) -> Recipe {
    plain.set(WINDOW, 16).set("attn_logit_softcapping", 50.0).set("final_logit_softcapping", 30.0)
}

fn gemma3() -> Vec<Recipe> {
    let gemma3 = |variant| Recipe::new("gemma3", variant).rms_norm().set("rope.freq_base", 1_000_000.0);
    vec![gemma3("").without(TIED).set(WINDOW, 16), gemma3("no window")]
}

fn phi3() -> Vec<Recipe> {
    let phi3 = |variant| Recipe::new("phi3", variant).rms_norm().set(WINDOW, 16);
    vec![phi3("short factors"), phi3("long factors").set(ORIGINAL_CONTEXT, 64)]
}

fn granite() -> Vec<Recipe> {
    let granite = |variant| Recipe::new("granite", variant).rms_norm().set("logit_scale", 8.0);
    let scaled = granite("scaled").set("embedding_scale", 12.0).set("residual_scale", 0.22);
    vec![scaled.set("attention.scale", 0.015_625), granite("no embedding scale")]
}

/// Multi-head latent attention, with its keys and values compressed to 64 numbers; two dense blocks, then experts.
fn deepseek2() -> Vec<Recipe> {
    let latent = |variant| {
        Recipe::new("deepseek2", variant)
            .rms_norm()
            .experts()
            .set("leading_dense_block_count", 2)
            .set("expert_shared_count", 1)
            .set("attention.kv_lora_rank", 64)
            .set("attention.q_lora_rank", 64)
            .set("rope.dimension_count", 32)
            .set("attention.head_count_kv", 1)
            .set("attention.key_length", 96)
            .set("attention.value_length", 64)
            .set("attention.key_length_mla", 64)
            .set("attention.value_length_mla", 32)
    };
    let gated = latent("V3").set("expert_gating_func", 2).set("expert_weights_norm", true);
    let lite = latent("lite").unset("attention.q_lora_rank").set("leading_dense_block_count", 1);
    let uncompressed = latent("uncompressed cache")
        .set("attention.head_count_kv", 4)
        .set("attention.key_length", 64)
        .set("attention.value_length", 32)
        .unset("attention.key_length_mla")
        .unset("attention.value_length_mla");
    vec![
        gated.set("expert_weights_scale", 2.5).set("nextn_predict_layers", 1).set("block_count", 9),
        lite.set("block_count", 27).set("embedding_length", 64).set("expert_feed_forward_length", 64),
        uncompressed,
    ]
}

fn glm4moe() -> Vec<Recipe> {
    let glm4moe = |variant| {
        let dense = Recipe::new("glm4moe", variant).rms_norm().set("leading_dense_block_count", 2);
        dense.experts().set("expert_shared_count", 1).set("expert_weights_norm", true)
    };
    vec![glm4moe(""), glm4moe("further tokens").set("nextn_predict_layers", 1).set("block_count", 9)]
}

fn qwen35() -> Vec<Recipe> {
    let qwen35 = |variant| hybrid(Recipe::new("qwen35", variant).rms_norm()).set(SECTIONS, sections());
    vec![qwen35(""), qwen35("further tokens").set("nextn_predict_layers", 1).set("block_count", 9)]
}

/// Experts, and one more for all tokens.
fn shared_expert(recipe: Recipe) -> Recipe {
    recipe.experts().set("expert_shared_feed_forward_length", 256)
}

/// Positions by ALiBi alone, as in the published models.
fn mpt(with_bias: Recipe) -> Recipe {
    let norms = ["attn_k_norm.weight", "attn_k_norm.bias", "position_embd.weight"];
    with_bias.set("attention.max_alibi_bias", 8.0).set("attention.clamp_kqv", 8.0).without(&norms)
}

const SECTIONS: &str = "rope.dimension_sections";

fn sections() -> Array {
    Array::I32(vec![11, 11, 10, 0])
}

/// Three recurrent blocks (gated delta net) to each block with attention.
fn hybrid(recipe: Recipe) -> Recipe {
    recipe
        .set("ssm.conv_kernel", 4)
        .set("ssm.inner_size", 256)
        .set("ssm.state_size", 64)
        .set("ssm.time_step_rank", 4)
        .set("ssm.group_count", 2)
}
