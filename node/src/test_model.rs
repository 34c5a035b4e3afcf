//! A small well-formed model, written as a file, for tests of this crate. It is never run.

use std::path::{Path, PathBuf};

use gguf::write::{Data, Writer};
use gguf::{TensorType, Value};

/// Blocks of the model.
pub(crate) const N_LAYER: u32 = 4;

/// Writes the model into `folder`.
pub(crate) fn write(folder: &Path) -> PathBuf {
    let path = folder.join("tiny.gguf");
    let mut writer = Writer::new();
    metadata(&mut writer);
    for layer in 0..N_LAYER {
        tensor(&mut writer, &format!("blk.{layer}.attn_q.weight"), &[8, 8]);
    }
    globals(&mut writer);
    std::fs::write(&path, writer.plan().unwrap().to_bytes().unwrap()).unwrap();
    path
}

/// Writes the model as two parts into `folder`.
pub(crate) fn write_split(folder: &Path) -> [PathBuf; 2] {
    [0, 1].map(|number: u16| {
        let mut writer = Writer::new();
        writer.set("split.no", Value::U16(number));
        writer.set("split.count", Value::U16(2));
        writer.set("split.tensors.count", Value::I32(N_LAYER as i32 + 3));
        if number == 0 {
            metadata(&mut writer);
            globals(&mut writer);
        }
        let half = N_LAYER / 2;
        for layer in (0..half).map(|layer| layer + half * u32::from(number)) {
            tensor(&mut writer, &format!("blk.{layer}.attn_q.weight"), &[8, 8]);
        }
        let path = folder.join(gguf::split::name_of("tiny", u32::from(number) + 1, 2));
        std::fs::write(&path, writer.plan().unwrap().to_bytes().unwrap()).unwrap();
        path
    })
}

fn metadata(writer: &mut Writer) {
    writer.set("general.architecture", "llama");
    for (key, value) in [
        ("block_count", N_LAYER),
        ("embedding_length", 8),
        ("context_length", 64),
        ("attention.head_count", 2),
        ("feed_forward_length", 8),
        ("vocab_size", 64),
    ] {
        writer.set(format!("llama.{key}"), value);
    }
}

fn globals(writer: &mut Writer) {
    tensor(writer, "token_embd.weight", &[8, 64]);
    tensor(writer, "output.weight", &[8, 64]);
    tensor(writer, "output_norm.weight", &[8]);
}

/// A tensor whose bytes depend on its name.
fn tensor(writer: &mut Writer, name: &str, dims: &[u64]) {
    let elements: u64 = dims.iter().product();
    let seed = name.bytes().map(u64::from).sum::<u64>();
    let bytes = (0..elements).flat_map(|i| ((seed + i) as f32).to_le_bytes()).collect();
    writer.tensor(name, TensorType::F32, dims, Data::Bytes(bytes)).unwrap();
}
