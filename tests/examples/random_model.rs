//! Writes a random model for benches that need one larger than what can be fetched.
//!
//! `cargo run --release -p tests --example random_model -- PATH`: a mixture of experts (qwen3moe) with 24 blocks and 2 GB of weights,
//! of which each token uses an eighth.

use anyhow::{Context, Result};
use llama::testing::{RandomModel, WeightType};

const BLOCKS: u32 = 24;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("give the path of the model to write")?;
    let model = RandomModel::new("qwen3moe")
        .set_arch("vocab_size", 32_000_u32)
        .set_arch("context_length", 8192_u32)
        .set_arch("embedding_length", 1024_u32)
        .set_arch("block_count", BLOCKS)
        .set_arch("feed_forward_length", 3072_u32)
        .set_arch("expert_feed_forward_length", 768_u32)
        .set_arch("expert_count", 64_u32)
        .set_arch("expert_used_count", 8_u32)
        .set_arch("attention.head_count", 16_u32)
        .set_arch("attention.head_count_kv", 4_u32)
        .set_arch("attention.key_length", 64_u32)
        .set_arch("attention.value_length", 64_u32)
        .set_arch("attention.layer_norm_rms_epsilon", 1e-6_f32)
        .set_arch("rope.freq_base", 1_000_000.0_f32)
        .weights("", WeightType::Q4K)
        .weights("token_embd", WeightType::Q6K)
        .weights("output.weight", WeightType::Q6K);
    model.save(std::path::Path::new(&path)).with_context(|| format!("writing {path}"))?;
    Ok(())
}
