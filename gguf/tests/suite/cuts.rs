//! Slices hold their blocks' bytes and state what llama.cpp would otherwise derive from the whole.

use cluster::LayerRange;
use gguf::cut::{CutError, CutOptions, Uncertified, plan_embedding, plan_slice};
use gguf::{Array, Gguf, TensorType, Value};

use crate::common::{Model, N_EMBD, N_VOCAB, data, read};

fn range(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

fn slice(model: &Gguf, start: u32, end: u32) -> Gguf {
    let plan = plan_slice(model, range(start, end), &CutOptions::default()).unwrap();
    let bytes = plan.to_bytes().unwrap();
    assert_eq!(bytes.len() as u64, plan.len());
    assert_eq!(plan.tensors().count() as u64, u64::from_le_bytes(bytes[8..16].try_into().unwrap()));
    read(bytes).unwrap()
}

fn refusal(model: &Gguf, start: u32, end: u32) -> String {
    let error = plan_slice(model, range(start, end), &CutOptions::default()).unwrap_err();
    assert!(matches!(error, CutError::Range { .. }), "{error}");
    error.to_string()
}

fn u32_of(slice: &Gguf, key: &str) -> Option<u32> {
    slice.get(key).map(|value| match value {
        Value::U32(n) => *n,
        other => panic!("{key} is {other:?}"),
    })
}

fn bools(slice: &Gguf, key: &str) -> Vec<bool> {
    match slice.get(key) {
        Some(Value::Array(Array::Bool(items))) => items.clone(),
        other => panic!("{key} is {other:?}"),
    }
}

#[test]
fn blocks_are_renumbered_and_their_bytes_kept() {
    let model = Model::whole("llama", 5).gguf();
    let part = slice(&model, 2, 4);
    assert_eq!(u32_of(&part, "llama.block_count"), Some(2));
    for (old, new) in [(2, 0), (3, 1)] {
        for tensor in ["attn_norm.weight", "attn_q.weight", "ffn_up.weight"] {
            let (old, new) = (format!("blk.{old}.{tensor}"), format!("blk.{new}.{tensor}"));
            assert_eq!(data(&model, &old), data(&part, &new));
        }
    }
    assert!(part.tensor("blk.2.attn_norm.weight").is_none());
    assert_eq!(data(&model, "rope_freqs.weight"), data(&part, "rope_freqs.weight"));
    assert_eq!(data(&model, "output_norm.weight"), data(&part, "output_norm.weight"));
    let place = ["start", "end", "n_layer"].map(|key| u32_of(&part, &format!("shoal.slice.{key}")));
    assert_eq!(place, [Some(2), Some(4), Some(5)]);
}

#[test]
fn a_slice_that_is_not_the_last_has_32_rows_of_vocabulary() {
    let mut model = Model::whole("qwen2", 3);
    model.tensor("output.bias", TensorType::F32, &[N_VOCAB]);
    let model = model.gguf();
    let part = slice(&model, 0, 2);
    assert_eq!(part.tensor("token_embd.weight").unwrap().dims, [N_EMBD, 32]);
    assert_eq!(part.tensor("output.weight").unwrap().dims, [N_EMBD, 32]);
    assert_eq!(part.tensor("output.bias").unwrap().dims, [32]);
    let whole = data(&model, "output.weight");
    assert!(whole.starts_with(&data(&part, "output.weight")));
    assert_eq!(part.get("tokenizer.ggml.model").unwrap().as_str(), Some("none"));
    assert!(part.get("tokenizer.ggml.tokens").is_none());
    assert_eq!(u32_of(&part, "qwen2.vocab_size"), Some(32));
}

#[test]
fn the_last_slice_keeps_head_and_tokenizer_but_no_embedding_it_does_not_read() {
    let model = Model::whole("llama", 3).gguf();
    let part = slice(&model, 1, 3);
    assert_eq!(data(&part, "output.weight"), data(&model, "output.weight"));
    assert_eq!(part.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.tokens"));
    assert_eq!(part.get("tokenizer.ggml.model"), model.get("tokenizer.ggml.model"));
    let placeholder = part.tensor("token_embd.weight").unwrap();
    assert_eq!(placeholder.dims, [N_EMBD, N_VOCAB]);
    assert!(placeholder.bytes < model.tensor("token_embd.weight").unwrap().bytes);
    assert!(data(&part, "token_embd.weight").iter().all(|byte| *byte == 0));
}

#[test]
fn the_last_slice_of_a_tied_model_keeps_the_embedding() {
    let mut model = Model::new("qwen3", 2);
    model.tensor("token_embd.weight", TensorType::Q4_0, &[N_EMBD, N_VOCAB]);
    model.block(0);
    model.block(1);
    let model = model.gguf();
    assert_eq!(data(&slice(&model, 1, 2), "token_embd.weight"), data(&model, "token_embd.weight"));
    assert_eq!(slice(&model, 0, 1).tensor("token_embd.weight").unwrap().dims, [N_EMBD, 32]);
}

#[test]
fn position_embeddings_are_in_the_first_slice_and_zeros_elsewhere() {
    let mut model = Model::whole("gpt2", 3);
    model.tensor("position_embd.weight", TensorType::F16, &[N_EMBD, 128]);
    let model = model.gguf();
    let positions = |start, end| data(&slice(&model, start, end), "position_embd.weight");
    assert_eq!(positions(0, 1), data(&model, "position_embd.weight"));
    assert!(positions(1, 2).iter().chain(&positions(2, 3)).all(|byte| *byte == 0));
}

#[test]
fn arrays_with_one_element_per_block_are_cut_and_others_are_not() {
    let mut model = Model::whole("llama", 4);
    model.set("attention.head_count_kv", Array::U32(vec![1, 2, 4, 2]));
    model.set("feed_forward_length", Array::I32(vec![10, 11, 12, 13]));
    model.set("rope.dimension_sections", Array::I32(vec![4, 3, 2, 1]));
    model.writer.set("general.tags", Array::String(vec![b"x".to_vec(); 4]));
    let model = model.gguf();
    let part = slice(&model, 1, 3);
    assert_eq!(part.get("llama.attention.head_count_kv"), Some(&Array::U32(vec![2, 4]).into()));
    assert_eq!(part.get("llama.feed_forward_length"), Some(&Array::I32(vec![11, 12]).into()));
    let sections = "llama.rope.dimension_sections";
    assert_eq!(part.get(sections), model.get(sections));
    assert_eq!(part.get("general.tags"), model.get("general.tags"));
}

#[test]
fn derived_patterns_are_stated() {
    let mut gemma = Model::whole("gemma3", 8);
    gemma.set("attention.sliding_window", 32);
    let part = slice(&gemma.gguf(), 4, 8);
    let pattern = bools(&part, "gemma3.attention.sliding_window_pattern");
    assert_eq!(pattern, [true, false, true, true]);

    let qwen = Model::whole("qwen35", 8).gguf();
    let part = slice(&qwen, 2, 6);
    assert_eq!(bools(&part, "qwen35.attention.recurrent_layers"), [true, false, true, true]);

    let mut glm = Model::whole("glm4moe", 6);
    glm.set("leading_dense_block_count", 3);
    glm.set("nextn_predict_layers", 1);
    let glm = glm.gguf();
    let dense = |start, end| u32_of(&slice(&glm, start, end), "glm4moe.leading_dense_block_count");
    assert_eq!([dense(0, 2), dense(2, 5), dense(3, 5)], [Some(2), Some(1), Some(0)]);
    let last = slice(&glm, 3, 5);
    assert_eq!(u32_of(&last, "glm4moe.block_count"), Some(2));
    assert!(last.get("glm4moe.nextn_predict_layers").is_none());
    assert!(last.get("tokenizer.ggml.tokens").is_some(), "block 4 is the last that is run");
}

/// llama.cpp asserts that a model with sliding windows has a block that slides (`llama_model::create_memory`).
#[test]
fn a_slice_without_a_sliding_block_is_stated_so_that_llama_cpp_takes_it() {
    let with_window = |architecture: &str| {
        let mut model = Model::whole(architecture, 8);
        model.set("attention.sliding_window", 32);
        model.set("rope.freq_base_swa", 5000.0_f32);
        model.gguf()
    };
    let window =
        |slice: &Gguf, architecture: &str| u32_of(slice, &format!("{architecture}.attention.sliding_window"));
    let gemma = slice(&with_window("gemma3"), 5, 6);
    assert_eq!(window(&gemma, "gemma3"), Some(0));
    assert!(gemma.get("gemma3.attention.sliding_window_pattern").is_none());

    for architecture in ["gpt-oss", "gemma2"] {
        let model = with_window(architecture);
        let full = slice(&model, 1, 2);
        assert_eq!(window(&full, architecture), Some(1 << 22));
        assert_eq!(bools(&full, &format!("{architecture}.attention.sliding_window_pattern")), [true]);
        assert!(full.get(&format!("{architecture}.rope.freq_base_swa")).is_none());
        let both = slice(&model, 1, 3);
        assert_eq!(window(&both, architecture), Some(32));
        assert_eq!(bools(&both, &format!("{architecture}.attention.sliding_window_pattern")), [false, true]);
        assert!(both.get(&format!("{architecture}.rope.freq_base_swa")).is_some());
    }

    let cohere = with_window("cohere2");
    let options = CutOptions { uncertified: Uncertified::Allow };
    let error = plan_slice(&cohere, range(3, 4), &options).unwrap_err();
    assert!(error.to_string().contains("at least one block with a sliding window"), "{error}");
    plan_slice(&cohere, range(3, 5), &options).unwrap();
}

#[test]
fn glm4moe_is_given_sections_that_make_m_rope_plain_rope() {
    let mut glm = Model::whole("glm4moe", 2);
    glm.set("rope.dimension_count", 10);
    let part = slice(&glm.gguf(), 0, 1);
    let sections = Value::Array(Array::I32(vec![2, 3, 0, 0]));
    assert_eq!(part.get("glm4moe.rope.dimension_sections"), Some(&sections));
    let mut multimodal = Model::whole("glm4moe", 2);
    multimodal.set("rope.dimension_sections", Array::I32(vec![8, 12, 12, 0]));
    let multimodal = multimodal.gguf();
    let key = "glm4moe.rope.dimension_sections";
    assert_eq!(slice(&multimodal, 1, 2).get(key), multimodal.get(key));
}

#[test]
fn deepseek2_slices_state_what_is_guessed_from_the_size() {
    let part = slice(&Model::whole("deepseek2", 26).gguf(), 3, 20);
    assert_eq!(u32_of(&part, "deepseek2.attention.q_lora_rank"), Some(0));
    assert_eq!(u32_of(&part, "deepseek2.expert_gating_func"), Some(1));
    let mut large = Model::whole("deepseek2", 30);
    large.set("attention.q_lora_rank", 1536);
    large.set("expert_gating_func", 2);
    let large = large.gguf();
    let part = slice(&large, 3, 20);
    assert_eq!(u32_of(&part, "deepseek2.attention.q_lora_rank"), Some(1536));
    assert_eq!(u32_of(&part, "deepseek2.expert_gating_func"), Some(2));
    assert!(refusal(&large, 0, 27).contains("another size"));
}

#[test]
fn minicpm_slices_state_the_residual_scale_of_the_whole_model() {
    let scale = |model: &Gguf| slice(model, 0, 3).get("minicpm.residual_scale").and_then(Value::as_f32);
    assert_eq!(scale(&Model::whole("minicpm", 16).gguf()), Some(1.4 / 4.0));
    let mut stated = Model::whole("minicpm", 16);
    stated.set("residual_scale", 0.2);
    assert_eq!(scale(&stated.gguf()), Some(0.2));
}

#[test]
fn an_embedding_scale_is_applied_once() {
    let scale = |model: &Gguf| {
        let plan = plan_embedding(model, &CutOptions::default()).unwrap();
        let file = read(plan.to_bytes().unwrap()).unwrap();
        assert_eq!(data(&file, "token_embd.weight"), data(model, "token_embd.weight"));
        assert_eq!(file.get("general.architecture").unwrap().as_str(), Some("shoal-embedding"));
        assert_eq!(u32_of(&file, "shoal.embedding.vocab_size"), Some(N_VOCAB as u32));
        file.get("shoal.embedding.scale").unwrap().as_f32().unwrap()
    };
    let mut granite = Model::whole("granite", 2);
    granite.set("embedding_scale", 12.5_f32);
    let granite = granite.gguf();
    assert_eq!(scale(&granite), 12.5);
    for (start, end) in [(0, 1), (1, 2)] {
        let part = slice(&granite, start, end);
        assert_eq!(part.get("granite.embedding_scale"), Some(&Value::F32(0.0)));
    }
    assert_eq!(scale(&Model::whole("llama", 1).gguf()), 1.0);
    assert_eq!(scale(&Model::whole("gemma3", 1).gguf()), 8.0);
    let gemma2 = Model::whole("gemma2", 2).gguf();
    assert_eq!(scale(&gemma2), 8.0);
    let node = slice(&gemma2, 0, 1).get("shoal.slice.input_node").cloned();
    assert_eq!(node, Some("inp_scaled".into()));
}

#[test]
fn ranges_that_are_none_or_cannot_be_cut_are_refused() {
    let model = Model::whole("llama", 4).gguf();
    assert!(refusal(&model, 2, 5).contains("2..5 is out of range: the model has 4 blocks"));
    let smollm = Model::whole("smollm3", 8).gguf();
    assert!(refusal(&smollm, 3, 8).contains("must start at a multiple of 4"));
    slice(&smollm, 4, 7);
    let hybrid = Model::whole("qwen3next", 8).gguf();
    assert!(refusal(&hybrid, 0, 3).contains("at least one attention block and one recurrent block"));
    let large = Model::whole("gemma3", 62).gguf();
    assert!(refusal(&large, 0, 30).contains("only the whole model"));
    slice(&large, 0, 62);
}

#[test]
fn an_uncertified_architecture_is_cut_only_when_told_to() {
    let model = Model::whole("xverse", 2).gguf();
    let error = plan_slice(&model, range(0, 1), &CutOptions::default()).unwrap_err();
    assert!(error.to_string().contains("--allow-uncertified"), "{error}");
    let options = CutOptions { uncertified: Uncertified::Allow };
    plan_slice(&model, range(0, 1), &options).unwrap();
    plan_embedding(&model, &options).unwrap();
}

#[test]
fn a_slice_is_not_cut_again() {
    let part = slice(&Model::whole("llama", 4).gguf(), 0, 3);
    let error = plan_slice(&part, range(0, 1), &CutOptions::default()).unwrap_err();
    assert!(error.to_string().contains("is itself a slice"), "{error}");
}

#[test]
fn a_full_disk_is_reported_with_how_far_it_came() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let plan = plan_slice(&Model::whole("llama", 2).gguf(), range(0, 1), &CutOptions::default()).unwrap();
    let error = plan.write_to(&mut Full, &mut |_| {}).unwrap_err();
    assert!(error.to_string().starts_with(&format!("writing 0 of {} bytes: ", plan.len())), "{error}");
}
