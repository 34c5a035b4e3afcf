//! Loading models, their vocabularies, and embedding files.

#![allow(clippy::unwrap_used, reason = "helpers of tests may, as tests may")]

mod common;

use std::ffi::{CStr, CString, c_void};
use std::ops::ControlFlow;
use std::path::Path;

use common::*;
use llama::testing::{RandomModel, WeightType};
use llama::{
    AddSpecial, Content, DeviceKind, EMBEDDING_ARCHITECTURE, EMBEDDING_SCALE_KEY, EmbeddingTable, Error,
    Model, ModelParams, Output, RowInput, Rows, SliceContext, Special, Token, devices,
};
use llama_sys as sys;

#[test]
fn smollm2_is_described() {
    let model = smollm2();
    assert_eq!((model.n_layer(), model.n_embd(), model.vocab().n_tokens()), (30, 576, 49152));
    assert_eq!(model.metadata("general.architecture").as_deref(), Some("llama"));
    assert_eq!(model.metadata("no.such.key"), None);
    assert!(model.description().contains("Q4_1"), "{}", model.description());
    assert!(!model.is_recurrent() && !model.has_encoder());
}

#[test]
fn files_that_are_no_models_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Model::load(&folder.path().join("missing.gguf"), ModelParams::default()).unwrap_err();
    assert!(missing.to_string().contains("no such file"), "{missing}");
    let garbage = folder.path().join("garbage.gguf");
    std::fs::write(&garbage, b"GGUF\x03\0\0\0 not really").unwrap();
    let error = Model::load(&garbage, ModelParams::default()).unwrap_err();
    let Error::Load { reason, .. } = &error else { panic!("{error}") };
    assert!(!reason.contains("gave no reason"), "{reason}");
}

// llama.cpp itself computes such blocks on the CPU and says nothing.
#[test]
fn blocks_for_a_gpu_that_is_not_there_are_refused() {
    if devices().iter().any(|device| matches!(device.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu)) {
        eprintln!("not tested: there is a GPU");
        return;
    }
    let params = ModelParams { gpu_layers: 3, ..ModelParams::default() };
    let refused = Model::load(&smollm2_path(), params).unwrap_err().to_string();
    assert!(refused.contains("3 blocks are to go to a GPU"), "{refused}");
}

#[test]
fn loading_reports_progress_and_can_be_stopped() {
    let params =
        ModelParams { progress: Some(Box::new(|_| ControlFlow::Break(()))), ..ModelParams::default() };
    assert!(matches!(Model::load(&smollm2_path(), params), Err(Error::LoadCancelled { .. })));
    let last = std::sync::Arc::new(std::sync::Mutex::new(0.0));
    let seen = last.clone();
    let progress = move |fraction| {
        *seen.lock().unwrap() = fraction;
        ControlFlow::Continue(())
    };
    Model::load(
        &smollm2_path(),
        ModelParams { progress: Some(Box::new(progress)), ..ModelParams::default() },
    )
    .unwrap();
    assert_eq!(*last.lock().unwrap(), 1.0);
}

#[test]
fn a_panic_in_the_progress_callback_does_not_cross_c() {
    let params = ModelParams { progress: Some(Box::new(|_| panic!("stop"))), ..ModelParams::default() };
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Model::load(&smollm2_path(), params)));
    assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "stop");
}

#[test]
fn text_comes_back_from_its_tokens() {
    let model = Model::load(&smollm2_path(), ModelParams::vocabulary_only()).unwrap();
    assert_eq!(*model.content(), Content::VocabularyOnly);
    let vocab = model.vocab();
    let text = "Grüße, 世界! \u{1f41f} a\n\n  b";
    let tokens = vocab.tokenize(text, AddSpecial::No, Special::Text).unwrap();
    let mut bytes = Vec::new();
    tokens.iter().for_each(|token| vocab.append_bytes(*token, Special::Text, &mut bytes).unwrap());
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    assert!(vocab.tokenize("", AddSpecial::No, Special::Text).unwrap().is_empty());
    let context = SliceContext::new(&model, &params(Output::Logits, 1)).unwrap_err();
    assert!(context.to_string().contains("vocabulary"), "{context}");
}

#[test]
fn control_tokens_are_read_only_where_they_may_be() {
    let vocab = Model::load(&smollm2_path(), ModelParams::vocabulary_only()).unwrap().vocab();
    let end = vocab.tokenize("<|im_end|>", AddSpecial::No, Special::Control).unwrap();
    assert_eq!(end.len(), 1);
    assert!(vocab.is_end_of_generation(end[0]) && vocab.is_control(end[0]));
    assert!(vocab.tokenize("<|im_end|>", AddSpecial::No, Special::Text).unwrap().len() > 1);
    assert_eq!(vocab.token_bytes(end[0], Special::Control).unwrap(), b"<|im_end|>");
    assert!(vocab.token_bytes(end[0], Special::Text).unwrap().is_empty());
    assert_eq!(vocab.token_text(end[0]).unwrap(), "<|im_end|>");
    assert_eq!(vocab.eos(), Some(end[0]));
}

#[test]
fn tokens_that_do_not_exist_are_refused() {
    let vocab = Model::load(&smollm2_path(), ModelParams::vocabulary_only()).unwrap().vocab();
    for token in [Token(-1), Token(49152), Token(i32::MAX)] {
        assert!(matches!(vocab.token_bytes(token, Special::Text), Err(Error::Token { n_tokens: 49152, .. })));
        assert!(vocab.token_text(token).is_err());
        assert!(!vocab.is_end_of_generation(token));
    }
    // A slice without a tokenizer has the room for tokens, but none of them.
    let vocab = random_llama().build().unwrap().vocab();
    assert_eq!(vocab.n_tokens(), 128);
    assert!(matches!(vocab.tokenize("a", AddSpecial::No, Special::Text), Err(Error::Tokenize { .. })));
    assert!(vocab.token_text(Token(5)).is_err() && vocab.bos().is_none());
}

#[test]
fn random_models_are_the_same_from_the_same_seed_and_can_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second, other) = (folder.path().join("a"), folder.path().join("b"), folder.path().join("c"));
    let model = random_llama().weights("ffn_", WeightType::Q4_1).weights("attn_", WeightType::F16);
    model.save(&first).unwrap();
    model.save(&second).unwrap();
    model.seed(2).save(&other).unwrap();
    let read = |path: &Path| std::fs::read(path).unwrap();
    assert!(read(&first) == read(&second));
    assert!(read(&first) != read(&other));
    let sequence = Sequence::new(0, 5, 64);
    let built =
        random_llama().weights("ffn_", WeightType::Q4_1).weights("attn_", WeightType::F16).build().unwrap();
    let loaded = Model::load(&first, ModelParams::default()).unwrap();
    let plain = folder.path().join("plain");
    RandomModel::save(&random_llama().weights("", WeightType::F16), &plain).unwrap();
    assert!(read(&first).len() < read(&plain).len());
    let expected = one_by_one(&built, Output::Logits, &sequence);
    for (row, expected) in one_by_one(&loaded, Output::Logits, &sequence).iter().zip(&expected) {
        assert_same_bits(row, expected, "saved and loaded");
    }
}

#[test]
fn a_model_that_lacks_metadata_is_not_built() {
    let error = RandomModel::new("llama").build().unwrap_err();
    assert!(error.to_string().contains("context_length"), "{error}");
}

/// Writes an embedding file of the matrix in `data`.
fn write_embedding(path: &Path, kind: sys::ggml_type, shape: [i64; 2], data: &[u8], scale: f32) {
    let text = |text: &str| CString::new(text).unwrap();
    let params = sys::ggml_init_params { mem_size: 4096, mem_buffer: std::ptr::null_mut(), no_alloc: true };
    // SAFETY: everything lives until it is freed at the end; the tensor's data is as long as its type and shape say.
    unsafe {
        let (gguf, ggml) = (sys::gguf_init_empty(), sys::ggml_init(params));
        let (key, value) = (text("general.architecture"), text(EMBEDDING_ARCHITECTURE));
        sys::gguf_set_val_str(gguf, key.as_ptr(), value.as_ptr());
        sys::gguf_set_val_f32(gguf, text(EMBEDDING_SCALE_KEY).as_ptr(), scale);
        let tensor = sys::ggml_new_tensor(ggml, kind, 2, shape.as_ptr());
        assert_eq!(sys::ggml_nbytes(tensor), data.len());
        (*tensor).data = data.as_ptr().cast_mut().cast::<c_void>();
        sys::ggml_set_name(tensor, text("token_embd.weight").as_ptr());
        sys::gguf_add_tensor(gguf, tensor);
        assert!(sys::gguf_write_to_file(gguf, text(path.to_str().unwrap()).as_ptr(), false));
        sys::gguf_free(gguf);
        sys::ggml_free(ggml);
    }
}

/// The bytes of a tensor of a GGUF file.
fn read_tensor(path: &Path, name: &str) -> (sys::ggml_type, [i64; 2], Vec<u8>) {
    let (c_path, c_name) = (CString::new(path.to_str().unwrap()).unwrap(), CString::new(name).unwrap());
    let params = sys::gguf_init_params { no_alloc: true, ctx: std::ptr::null_mut() };
    // SAFETY: the file and the tensor exist, as asserted.
    unsafe {
        let gguf = sys::gguf_init_from_file(c_path.as_ptr(), params);
        let index = sys::gguf_find_tensor(gguf, c_name.as_ptr());
        assert!(index >= 0);
        let kind = sys::gguf_get_tensor_type(gguf, index);
        let shape = *sys::gguf_get_tensor_ne(gguf, index).cast::<[i64; 2]>();
        let start = sys::gguf_get_data_offset(gguf) + sys::gguf_get_tensor_offset(gguf, index);
        let size = sys::gguf_get_tensor_size(gguf, index);
        sys::gguf_free(gguf);
        (kind, shape, std::fs::read(path).unwrap()[start..start + size].to_vec())
    }
}

/// Logits of the last of `tokens`, computed by llama.cpp from the tokens themselves.
fn logits_from_tokens(path: &Path, tokens: &[Token]) -> Vec<f32> {
    let c_path = CString::new(path.to_str().unwrap()).unwrap();
    let mut ids: Vec<i32> = tokens.iter().map(|token| token.0).collect();
    // SAFETY: everything lives until it is freed at the end.
    unsafe {
        let mut params = sys::llama_model_default_params();
        params.use_extra_bufts = false;
        let model = sys::llama_model_load_from_file(c_path.as_ptr(), params);
        let mut params = sys::llama_context_default_params();
        params.n_ctx = 512;
        (params.n_threads, params.n_threads_batch) = (1, 1);
        params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_ENABLED;
        let context = sys::llama_init_from_model(model, params);
        let batch = sys::llama_batch_get_one(ids.as_mut_ptr(), i32::try_from(ids.len()).unwrap());
        assert_eq!(sys::llama_decode(context, batch), 0);
        let n_vocab = sys::llama_vocab_n_tokens(sys::llama_model_get_vocab(model));
        let logits =
            std::slice::from_raw_parts(sys::llama_get_logits_ith(context, -1), n_vocab as usize).to_vec();
        sys::llama_free(context);
        sys::llama_model_free(model);
        logits
    }
}

fn check_embedding(model_path: &Path, scale: f32, tokens: &[Token]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("embedding.gguf");
    let (kind, shape, data) = read_tensor(model_path, "token_embd.weight");
    write_embedding(&path, kind, shape, &data, scale);
    let mut table = EmbeddingTable::open(&path).unwrap();
    let params = ModelParams { extra_buffers: llama::ExtraBuffers::Plain, ..ModelParams::default() };
    let model = Model::load(model_path, params).unwrap();
    assert_eq!((table.n_embd(), table.n_tokens()), (model.n_embd(), model.vocab().n_tokens()));
    let expected = logits_from_tokens(model_path, tokens);
    let mut hidden = Vec::new();
    table.lookup(tokens, &mut hidden).unwrap();
    let positions: Vec<_> = (0..u32::try_from(tokens.len()).unwrap()).collect();
    // Like `llama_batch_get_one`: ggml's products for some types depend on the number of rows.
    let outputs: Vec<_> = (1..=tokens.len()).map(|number| number == tokens.len()).collect();
    let mut context = SliceContext::new(&model, &common::params(Output::Logits, 1)).unwrap();
    for (input, what) in [
        (RowInput::Hidden(&hidden), "logits of embedding rows"),
        (RowInput::Tokens(tokens), "logits of tokens"),
    ] {
        let slots = vec![0; tokens.len()];
        context.run(&Rows { input, slots: &slots, positions: &positions, outputs: &outputs }).unwrap();
        assert_same_bits(context.logits(tokens.len() - 1).unwrap(), &expected, what);
        context.clear();
    }
}

#[test]
fn embedding_rows_give_the_logits_of_their_tokens() {
    let vocab = Model::load(&smollm2_path(), ModelParams::vocabulary_only()).unwrap().vocab();
    let tokens = vocab.tokenize("The capital of France is", AddSpecial::AsModelSays, Special::Text).unwrap();
    check_embedding(&smollm2_path(), 1.0, &tokens);
}

#[test]
fn embedding_rows_of_every_type_and_scale_give_the_logits_of_their_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let tokens: Vec<_> = (0..20).map(|index| Token(index * 37 % 128)).collect();
    let types = [WeightType::F16, WeightType::Bf16, WeightType::Q4_0, WeightType::Q8_0, WeightType::Q4_1];
    for weight_type in types {
        random_gemma3().weights("token_embd", weight_type).save(&path).unwrap();
        check_embedding(&path, 64.0_f32.sqrt(), &tokens);
    }
    random_llama()
        .set_arch("embedding_length", 256_u32)
        .weights("token_embd", WeightType::Q6K)
        .save(&path)
        .unwrap();
    check_embedding(&path, 1.0, &tokens);
    random_llama().save(&path).unwrap();
    check_embedding(&path, 1.0, &tokens);
}

#[test]
fn damaged_embedding_files_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("embedding.gguf");
    let refused = |path: &Path| EmbeddingTable::open(path).unwrap_err().to_string();
    assert!(refused(&folder.path().join("missing")).contains("embedding file"));
    std::fs::write(&path, b"no GGUF").unwrap();
    assert!(refused(&path).contains("no GGUF file"), "{}", refused(&path));
    assert!(refused(&smollm2_path()).contains("architecture is Some(\"llama\")"));
    write_embedding(&path, sys::GGML_TYPE_F32, [4, 3], &[0; 48], 1.0);
    let mut table = EmbeddingTable::open(&path).unwrap();
    let mut rows = vec![1.0];
    assert!(matches!(
        table.lookup(&[Token(0), Token(3)], &mut rows),
        Err(Error::Token { token: 3, n_tokens: 3 })
    ));
    assert!(rows.is_empty());
    drop(table);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 40]).unwrap();
    assert!(refused(&path).contains("the file ends"), "{}", refused(&path));
}

#[test]
fn the_version_is_llama_cpps() {
    // SAFETY: returns a string literal.
    let version = unsafe { CStr::from_ptr(sys::llama_version()) };
    assert!(llama::version().starts_with(version.to_str().unwrap()));
}

#[test]
fn a_model_without_its_text_computes_the_same_logits_and_knows_what_ends_a_generation() {
    let vocab = Model::load(&smollm2_path(), ModelParams::vocabulary_only()).unwrap().vocab();
    let facts = vocab.facts();
    let end = vocab.eos().unwrap();
    assert!(facts.is_end_of_generation(end) && facts.is_end_of_generation(Token(2)));
    assert!(!facts.is_end_of_generation(Token(100)) && !facts.is_end_of_generation(Token(-1)));
    let content = Content::WithoutText(facts);
    let model = Model::load(&smollm2_path(), ModelParams { content, ..ModelParams::default() }).unwrap();
    assert_eq!(model.vocab().n_tokens(), vocab.n_tokens());
    assert!(!model.vocab().has_tokenizer() && !model.vocab().is_end_of_generation(end));
    assert!(model.vocab().tokenize("a", AddSpecial::No, Special::Text).is_err());

    let whole = Model::load(&smollm2_path(), ModelParams::default()).unwrap();
    let tokens = vocab.tokenize("The capital of France is", AddSpecial::AsModelSays, Special::Text).unwrap();
    let logits = [model, whole].map(|model| {
        let mut context = SliceContext::new(&model, &params(Output::Logits, 1)).unwrap();
        let positions: Vec<_> = (0..u32::try_from(tokens.len()).unwrap()).collect();
        let outputs: Vec<_> = (1..=tokens.len()).map(|number| number == tokens.len()).collect();
        let (input, slots) = (RowInput::Tokens(&tokens), vec![0; tokens.len()]);
        context.run(&Rows { input, slots: &slots, positions: &positions, outputs: &outputs }).unwrap();
        context.logits(tokens.len() - 1).unwrap().to_vec()
    });
    assert_same_bits(&logits[0], &logits[1], "logits without text");
}
