//! Models are described as llama.cpp understands them, and refused with the reason where it could not run them.

use cluster::{Attention, Bytes, FeedForward, LayerRange, ModelShape, RangeRule};
use gguf::architectures::{Support, TABLE};
use gguf::{Array, Error, Gguf, ModelFault, TensorType, model_shape};

use crate::common::{Model, N_EMBD, N_VOCAB};

fn windows(shape: &ModelShape) -> String {
    let letter = |attention| match attention {
        Attention::Full => 'f',
        Attention::SlidingWindow { .. } => 's',
        Attention::Recurrent => 'r',
    };
    shape.blocks.iter().map(|block| letter(block.kind.attention)).collect()
}

fn shape(model: Model) -> ModelShape {
    model_shape(&model.gguf()).unwrap()
}

fn fault(gguf: &Gguf, field: &str) -> ModelFault {
    match model_shape(gguf) {
        Err(Error::Model { file, field: found, fault }) => {
            assert_eq!(file, "model.gguf");
            assert!(found.contains(field), "{found} is not {field}");
            fault
        }
        other => panic!("{other:?}"),
    }
}

fn refusal(model: Model) -> String {
    match model_shape(&model.gguf()) {
        Err(error @ Error::Refused { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plain_model_is_described() {
    let shape = shape(Model::whole("llama", 3));
    assert_eq!(shape.architecture, "llama");
    assert_eq!(shape.name.as_deref(), Some("test model"));
    assert_eq!((shape.n_layer(), shape.n_embd, shape.n_vocab, shape.n_ctx_train), (3, 64, 50, 128));
    assert_eq!((shape.n_head, shape.n_head_kv), (vec![4; 3], vec![2; 3]));
    // Norm, q in q4_0, up in f16; keys and values of two heads of 16.
    let block = shape.blocks[1];
    assert_eq!(block.weight_bytes, Bytes(64 * 4 + 64 * 64 / 32 * 18 + 64 * 24 * 2));
    assert_eq!(block.kv_elements_per_token, 2 * (16 + 16));
    assert_eq!(block.kind.feed_forward, FeedForward::Dense);
    assert_eq!(shape.embedding_bytes, Bytes(64 * 50 / 32 * 18));
    assert_eq!(shape.head_bytes, Bytes(64 * 4 + 64 * 50 / 32 * 34));
    assert_eq!(shape.global_bytes, Bytes(32));
    assert!(!shape.tied && shape.experts.is_none() && shape.range_rules.is_empty());
}

#[test]
fn a_tied_head_counts_the_shared_matrix() {
    let mut model = Model::new("llama", 1);
    model.tensor("token_embd.weight", TensorType::F16, &[N_EMBD, N_VOCAB]);
    model.tensor("output_norm.weight", TensorType::F32, &[N_EMBD]);
    model.block(0);
    let shape = shape(model);
    assert!(shape.tied);
    assert_eq!(shape.embedding_bytes, Bytes(64 * 50 * 2));
    assert_eq!(shape.head_bytes, Bytes(64 * 50 * 2 + 64 * 4));
}

#[test]
fn sliding_windows_are_derived_or_read() {
    let with_window = |architecture: &str, n_layer| {
        let mut model = Model::whole(architecture, n_layer);
        model.set("attention.sliding_window", 32);
        model
    };
    assert_eq!(windows(&shape(with_window("gemma3", 8))), "sssssfss");
    assert_eq!(windows(&shape(Model::whole("gemma3", 8))), "ffffffff");
    assert_eq!(windows(&shape(with_window("gpt-oss", 5))), "sfsfs");
    assert_eq!(windows(&shape(Model::whole("gemma2", 4))), "sfsf");
    assert_eq!(shape(Model::whole("gemma2", 4)).smallest_window(), Some(4096));
    assert_eq!(windows(&shape(with_window("olmo2", 5))), "sssfs");
    assert_eq!(windows(&shape(with_window("phi3", 3))), "fff");
    assert_eq!(windows(&shape(with_window("llama", 3))), "fff");

    let mut stated = with_window("gemma3", 4);
    stated.set("attention.sliding_window_pattern", Array::Bool(vec![false, true, false, true]));
    assert_eq!(windows(&shape(stated)), "fsfs");
    let mut period = with_window("gemma3", 4);
    period.set("attention.sliding_window_pattern", 2);
    assert_eq!(windows(&shape(period)), "sfsf");
    assert_eq!(fault(&Model::whole("gpt-oss", 2).gguf(), "sliding_window"), ModelFault::Missing);
}

#[test]
fn sliding_blocks_may_have_heads_of_another_size() {
    let mut model = Model::whole("gemma3", 6);
    model.set("attention.sliding_window", 32);
    model.set("attention.key_length", 32);
    model.set("attention.value_length", 24);
    model.set("attention.key_length_swa", 8);
    let shape = shape(model);
    assert_eq!(shape.blocks[0].kv_elements_per_token, 2 * (8 + 24));
    assert_eq!(shape.blocks[5].kv_elements_per_token, 2 * (32 + 24));
}

#[test]
fn latent_attention_caches_one_vector_for_keys_and_values() {
    let mut model = Model::whole("deepseek2", 2);
    model.set("attention.head_count_kv", 1);
    model.set("attention.key_length", 576);
    model.set("attention.value_length", 512);
    model.set("attention.key_length_mla", 192);
    model.set("attention.value_length_mla", 128);
    assert_eq!(shape(model).blocks[0].kv_elements_per_token, 576);
}

#[test]
fn recurrent_blocks_have_a_state_and_no_cache() {
    let mut model = Model::whole("qwen35", 8);
    model.set("ssm.conv_kernel", 4);
    model.set("ssm.inner_size", 32);
    model.set("ssm.state_size", 8);
    model.set("ssm.group_count", 2);
    let shape = shape(model);
    assert_eq!(windows(&shape), "rrrfrrrf");
    assert_eq!(shape.blocks[0].kv_elements_per_token, 0);
    assert_eq!(shape.blocks[0].state_bytes_per_slot, Bytes((3 * (32 + 2 * 2 * 8) + 8 * 32) * 4));
    assert_eq!(shape.blocks[3].state_bytes_per_slot, Bytes::ZERO);
    assert_eq!(shape.range_rules, [RangeRule::BothMemories]);
    let range = |start, end| LayerRange::new(start, end).unwrap();
    assert!(shape.check_range(range(0, 3)).is_err());
    assert!(shape.check_range(range(3, 4)).is_err());
    assert!(shape.check_range(range(2, 4)).is_ok());
    assert_eq!(shape.split(2).unwrap().len(), 2);
    assert!(shape.split(3).is_err(), "there are only two attention blocks");
}

#[test]
fn experts_and_their_blocks_are_told_by_the_router() {
    let mut model = Model::new("glm4moe", 4);
    model.tensor("token_embd.weight", TensorType::F16, &[N_EMBD, N_VOCAB]);
    model.set("expert_count", 8);
    model.set("expert_used_count", Array::U32(vec![0, 2, 3, 2]));
    model.set("nextn_predict_layers", 1);
    for block in 0..4 {
        model.block(block);
        if block > 0 {
            model.tensor(&format!("blk.{block}.ffn_gate_inp.weight"), TensorType::F32, &[N_EMBD, 8]);
        }
    }
    let shape = shape(model);
    assert_eq!(shape.n_layer(), 3, "the block that predicts further tokens is not run");
    assert_eq!(shape.blocks[0].kind.feed_forward, FeedForward::Dense);
    assert_eq!(shape.blocks[1].kind.feed_forward, FeedForward::MixtureOfExperts);
    let experts = shape.experts.unwrap();
    assert_eq!((experts.count, experts.used), (8, 3));
}

#[test]
fn constants_by_size_limit_the_ranges() {
    let rules = |architecture: &str, n_layer| shape(Model::whole(architecture, n_layer)).range_rules;
    let forbidden = |length| RangeRule::ForbiddenLength { length };
    assert_eq!(rules("gemma3", 62), [RangeRule::WholeOnly]);
    assert_eq!(rules("gemma3", 70), [forbidden(62)]);
    assert_eq!(rules("gemma3", 18), []);
    assert_eq!(rules("gemma2", 46), [RangeRule::WholeOnly]);
    assert_eq!(rules("deepseek2", 27), []);
    assert_eq!(rules("deepseek2", 61), [forbidden(26), forbidden(27)]);
    assert_eq!(rules("smollm3", 8), [RangeRule::StartMultiple { step: 4 }]);
}

#[test]
fn matrices_that_llama_cpp_cannot_multiply_are_refused() {
    for kind in [TensorType::F64, TensorType::I32, TensorType::Q8_K, TensorType::Q8_1] {
        let mut model = Model::whole("llama", 1);
        model.tensor("blk.0.ffn_down.weight", kind, &[256, N_EMBD]);
        let fault = fault(&model.gguf(), "blk.0.ffn_down.weight");
        assert_eq!(fault, ModelFault::NotMultipliable { kind: kind.name() });
    }
    let mut model = Model::whole("llama", 1);
    model.tensor("blk.0.ffn_norm.weight", TensorType::F16, &[N_EMBD]);
    assert_eq!(fault(&model.gguf(), "blk.0.ffn_norm.weight"), ModelFault::NotF32 { kind: "f16" });
}

#[test]
fn metadata_that_do_not_fit_the_tensors_are_refused() {
    let mut model = Model::whole("llama", 2);
    model.set("block_count", 3);
    assert_eq!(fault(&model.gguf(), "blk.2"), ModelFault::Missing);

    let mut model = Model::whole("llama", 2);
    model.set("block_count", 1);
    assert_eq!(fault(&model.gguf(), "blk.1"), ModelFault::Block { block: 1, blocks: 1 });

    let mut model = Model::whole("llama", 2);
    model.writer.set("tokenizer.ggml.tokens", Array::String(vec![Vec::new(); 49]));
    let shapes = ModelFault::Shape { found: vec![64, 50], wanted: vec![64, 49] };
    assert_eq!(fault(&model.gguf(), "token_embd.weight"), shapes);

    let mut model = Model::whole("llama", 2);
    model.set("attention.head_count_kv", Array::U32(vec![2; 3]));
    let lengths = ModelFault::ArrayLength { found: 3, wanted: 2 };
    assert_eq!(fault(&model.gguf(), "head_count_kv"), lengths);

    let mut model = Model::whole("llama", 2);
    model.set("embedding_length", "wide");
    assert!(matches!(fault(&model.gguf(), "embedding_length"), ModelFault::WrongType { .. }));

    for absurd in [0, 513, u32::MAX] {
        let mut model = Model::whole("llama", 2);
        model.set("block_count", absurd);
        assert!(matches!(fault(&model.gguf(), "block_count"), ModelFault::OutOfRange { .. }));
    }
    assert_eq!(fault(&Model::new("llama", 1).gguf(), "token_embd.weight"), ModelFault::Missing);
}

#[test]
fn what_cannot_be_run_in_slices_is_refused_with_the_reason() {
    assert!(
        refusal(Model::whole("bert", 2))
            .contains("architecture bert cannot be run in slices: it is an encoder")
    );
    assert!(refusal(Model::whole("t5", 2)).contains("encoder-decoder"));
    assert!(refusal(Model::whole("baichuan", 2)).contains("by the number of blocks"));
    assert!(refusal(Model::whole("something-new", 2)).contains("does not know it"));
    let mut adapter = Model::whole("llama", 2);
    adapter.writer.set("general.type", "adapter");
    assert!(refusal(adapter).contains("general.type is \"adapter\""));
    let mut vision = Model::whole("granite", 2);
    vision.set("deepstack_mapping", Array::I32(vec![-1, 0]));
    assert!(refusal(vision).contains("deepstack"));
    // As llama.cpp writes a model without it.
    let mut text = Model::whole("granite", 2);
    text.set("deepstack_mapping", Array::I32(vec![-1, -1]));
    text.set("n_deepstack_layers", 0);
    assert_eq!(shape(text).n_layer(), 2);
}

#[test]
fn the_table_names_each_architecture_once_and_the_page_shows_all() {
    let page = gguf::architectures::markdown();
    let mut names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
    for name in &names {
        assert!(page.contains(name), "{name}");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
    let certified = TABLE.iter().filter(|row| row.support == Support::Certified).count();
    assert!(certified >= 16);
}
