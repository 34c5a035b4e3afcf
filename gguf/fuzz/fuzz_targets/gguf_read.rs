//! Any bytes: read, describe, cut, write. Nothing may panic, hang, or take memory that the bytes do not justify.
//!
//! An input whose first byte is even is a file as it stands. From an odd one, a small valid model is made and then
//! damaged where the rest of the input says, so that the depths are reached without a corpus.
#![no_main]

use std::io;

use cluster::LayerRange;
use gguf::architectures::TABLE;
use gguf::cut::{CutOptions, Uncertified, plan_embedding, plan_slice};
use gguf::write::{Data, Writer};
use gguf::{Array, Gguf, Part, TensorType, model_shape};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let bytes = match input {
        [first, architecture, damage @ ..] if first % 2 == 1 => damaged_model(*architecture, damage),
        [_, rest @ ..] => rest.to_vec(),
        [] => Vec::new(),
    };
    let Ok(gguf) = Gguf::read(vec![Part::new("fuzz.gguf", bytes)]) else { return };
    let Ok(shape) = model_shape(&gguf) else { return };
    let options = CutOptions { uncertified: Uncertified::Allow };
    let middle = shape.n_layer() / 2;
    for (start, end) in [(0, shape.n_layer()), (0, middle), (middle, shape.n_layer())] {
        let Ok(range) = LayerRange::new(start, end) else { continue };
        let Ok(plan) = plan_slice(&gguf, range, &options) else { continue };
        let mut written = 0;
        plan.write_to(&mut io::sink(), &mut |bytes| written = bytes).expect("the bytes are in memory");
        assert_eq!(written, plan.len());
        let slice = plan.to_bytes().expect("the bytes are in memory");
        Gguf::read(vec![Part::new("slice.gguf", slice)]).expect("a slice is a valid file");
    }
    if let Ok(plan) = plan_embedding(&gguf, &options) {
        plan.write_to(&mut io::sink(), &mut |_| {}).expect("the bytes are in memory");
    }
    let _ = shape.split(3);
});

/// A model of four blocks, with bytes replaced: each three of `damage` are an offset and a byte.
fn damaged_model(architecture: u8, damage: &[u8]) -> Vec<u8> {
    let mut bytes = model(TABLE[usize::from(architecture) % TABLE.len()].name);
    for change in damage.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len();
        bytes[at] = change[2];
    }
    bytes
}

fn model(architecture: &str) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.set("general.architecture", architecture);
    writer.set("tokenizer.ggml.model", "none");
    let numbers = [
        ("block_count", 4),
        ("context_length", 8),
        ("embedding_length", 32),
        ("attention.head_count", 2),
        ("attention.sliding_window", 4),
        ("leading_dense_block_count", 1),
        ("nextn_predict_layers", 0),
        ("expert_gating_func", 0),
    ];
    for (key, number) in numbers {
        writer.set(format!("{architecture}.{key}"), number);
    }
    let per_block = Array::U32(vec![1, 2, 1, 2]);
    writer.set(format!("{architecture}.attention.head_count_kv"), per_block);
    let mut tensor = |name: &str, kind, dims: &[u64]| {
        writer.tensor(name, kind, dims, Data::Zeros).expect("a sound shape");
    };
    tensor("token_embd.weight", TensorType::Q4_0, &[32, 40]);
    tensor("output.weight", TensorType::Q8_0, &[32, 40]);
    tensor("position_embd.weight", TensorType::F16, &[32, 8]);
    for block in 0..4 {
        tensor(&format!("blk.{block}.attn_q.weight"), TensorType::Q4_0, &[32, 2]);
    }
    let plan = writer.plan().expect("a sound model");
    plan.to_bytes().expect("nothing to read")
}
