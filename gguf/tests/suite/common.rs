//! Models made of patterned bytes, for tests: small, of any architecture, and different in every tensor.

use gguf::write::{Data, Writer};
use gguf::{Array, Gguf, Part, TensorType, Value};

pub(crate) const N_EMBD: u64 = 64;
pub(crate) const N_VOCAB: u64 = 50;

/// A model in the making.
pub(crate) struct Model {
    pub(crate) writer: Writer,
    pub(crate) architecture: String,
    seed: u8,
}

impl Model {
    /// A model without tensors, of `n_layer` blocks.
    pub(crate) fn new(architecture: &str, n_layer: u32) -> Self {
        let mut writer = Writer::new();
        writer.set("general.architecture", architecture);
        writer.set("general.name", "test model");
        let mut model = Self { writer, architecture: architecture.to_owned(), seed: 0 };
        model.set("block_count", n_layer);
        model.set("context_length", 128);
        model.set("embedding_length", N_EMBD as u32);
        model.set("attention.head_count", 4);
        model.set("attention.head_count_kv", 2);
        let tokens = (0..N_VOCAB).map(|token| format!("t{token}").into_bytes()).collect();
        model.writer.set("tokenizer.ggml.model", "gpt2");
        model.writer.set("tokenizer.ggml.tokens", Array::String(tokens));
        model
    }

    /// A model with an embedding matrix, an output norm, a head of its own and `n_layer` blocks.
    pub(crate) fn whole(architecture: &str, n_layer: u32) -> Self {
        let mut model = Self::new(architecture, n_layer);
        model.tensor("token_embd.weight", TensorType::Q4_0, &[N_EMBD, N_VOCAB]);
        model.tensor("output_norm.weight", TensorType::F32, &[N_EMBD]);
        model.tensor("output.weight", TensorType::Q8_0, &[N_EMBD, N_VOCAB]);
        model.tensor("rope_freqs.weight", TensorType::F32, &[8]);
        for block in 0..n_layer {
            model.block(block);
        }
        model
    }

    pub(crate) fn block(&mut self, block: u32) {
        self.tensor(&format!("blk.{block}.attn_norm.weight"), TensorType::F32, &[N_EMBD]);
        self.tensor(&format!("blk.{block}.attn_q.weight"), TensorType::Q4_0, &[N_EMBD, N_EMBD]);
        self.tensor(&format!("blk.{block}.ffn_up.weight"), TensorType::F16, &[N_EMBD, 24]);
    }

    /// Sets a value under the architecture's prefix.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.writer.set(format!("{}.{key}", self.architecture), value);
    }

    pub(crate) fn tensor(&mut self, name: &str, kind: TensorType, dims: &[u64]) {
        self.seed = self.seed.wrapping_mul(31).wrapping_add(17);
        let elements: u64 = dims.iter().product();
        let bytes = elements / kind.block_elements() * kind.block_bytes();
        let seed = self.seed;
        let data = (0..bytes).map(|at| seed.wrapping_add((at % 251) as u8)).collect();
        self.writer.tensor(name, kind, dims, Data::Bytes(data)).unwrap();
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        self.writer.plan().unwrap().to_bytes().unwrap()
    }

    pub(crate) fn gguf(self) -> Gguf {
        read(self.bytes()).unwrap()
    }
}

pub(crate) fn read(bytes: Vec<u8>) -> Result<Gguf, gguf::Error> {
    Gguf::read(vec![Part::new("model.gguf", bytes)])
}

/// A tensor's bytes.
pub(crate) fn data(gguf: &Gguf, name: &str) -> Vec<u8> {
    let tensor = gguf.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
    let mut bytes = vec![0; tensor.bytes as usize];
    gguf.read_tensor(tensor, 0, &mut bytes).unwrap();
    bytes
}
