//! What each tensor is for, whether llama.cpp can compute with it, and how many bytes go where.

use super::{Hparams, missing_tensor};
use crate::error::{Error, ModelFault};
use crate::{Gguf, TensorInfo, TensorType, Value};

/// What a tensor is for, as far as cutting is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role<'a> {
    /// Of a block; the rest of its name.
    Block(u32, &'a str),
    /// The token embedding matrix.
    TokenEmbedding,
    /// The LM head's matrix or bias: as many rows as the vocabulary.
    Head,
    /// Output norm, or a scale of the head.
    Output,
    /// Position embeddings, added to the input of the first block only.
    PositionEmbedding,
    /// Anything else; needed by every slice.
    Global,
}

pub(crate) fn role(tensor: &TensorInfo) -> Role<'_> {
    if let Some((block, rest)) = tensor.block() {
        return Role::Block(block, rest);
    }
    match tensor.name.as_str() {
        "token_embd.weight" => Role::TokenEmbedding,
        "output.weight" | "output.bias" => Role::Head,
        "position_embd.weight" => Role::PositionEmbedding,
        name if name.starts_with("output") => Role::Output,
        _ => Role::Global,
    }
}

/// Bytes by purpose.
#[derive(Debug)]
pub(crate) struct Sizes {
    pub(crate) n_vocab: u32,
    pub(crate) blocks: Vec<BlockSize>,
    pub(crate) embedding: u64,
    pub(crate) head: u64,
    pub(crate) tied: bool,
    pub(crate) global: u64,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct BlockSize {
    pub(crate) bytes: u64,
    /// Whether it has a router, so experts.
    pub(crate) routed: bool,
}

pub(crate) fn measure(gguf: &Gguf, hparams: &Hparams) -> Result<Sizes, Error> {
    let (n_vocab, embedding) = vocabulary(gguf, hparams)?;
    let tied = gguf.tensor("output.weight").is_none();
    let mut sizes = Sizes {
        n_vocab,
        blocks: vec![BlockSize::default(); hparams.n_layer_all as usize],
        embedding,
        head: if tied { embedding } else { 0 },
        tied,
        global: 0,
    };
    for tensor in gguf.tensors() {
        check_type(gguf, tensor)?;
        match role(tensor) {
            Role::Block(block, rest) => {
                let blocks = hparams.n_layer_all;
                let size = sizes.blocks.get_mut(block as usize).ok_or_else(|| {
                    gguf.model_fault(tensor_field(tensor), ModelFault::Block { block, blocks })
                })?;
                size.bytes = size.bytes.saturating_add(tensor.bytes);
                size.routed |= rest == "ffn_gate_inp.weight";
            }
            Role::TokenEmbedding => {}
            Role::Head | Role::Output => sizes.head = sizes.head.saturating_add(tensor.bytes),
            Role::PositionEmbedding | Role::Global => {
                sizes.global = sizes.global.saturating_add(tensor.bytes);
            }
        }
    }
    sizes.blocks.truncate(hparams.n_layer as usize);
    match sizes.blocks.iter().position(|block| block.bytes == 0) {
        Some(empty) => Err(missing_tensor(gguf, &format!("blk.{empty}.*"))),
        None => Ok(sizes),
    }
}

/// Size of the vocabulary and bytes of its embedding matrix. llama.cpp wants one row for each token of the tokenizer.
fn vocabulary(gguf: &Gguf, hparams: &Hparams) -> Result<(u32, u64), Error> {
    const NAME: &str = "token_embd.weight";
    let embedding = gguf.tensor(NAME).ok_or_else(|| missing_tensor(gguf, NAME))?;
    let tokens = gguf.get("tokenizer.ggml.tokens").and_then(Value::as_array);
    let rows = embedding.dims.get(1).copied().unwrap_or(1);
    let wanted = vec![hparams.n_embd.into(), tokens.map_or(rows, |tokens| tokens.len() as u64)];
    if embedding.dims != wanted {
        let fault = ModelFault::Shape { found: embedding.dims.clone(), wanted };
        return Err(gguf.model_fault(tensor_field(embedding), fault));
    }
    if let Some(head) = gguf.tensor("output.weight").filter(|head| head.dims != wanted) {
        let fault = ModelFault::Shape { found: head.dims.clone(), wanted };
        return Err(gguf.model_fault(tensor_field(head), fault));
    }
    let n_vocab = i32::try_from(rows).map_err(|_| {
        let fault = ModelFault::OutOfRange { value: rows, least: 1, most: i32::MAX as u64 };
        gguf.model_fault(tensor_field(embedding), fault)
    })?;
    Ok((n_vocab.unsigned_abs(), embedding.bytes))
}

/// Vectors are added and multiplied element by element, for which ggml's CPU kernels take only f32
/// (`ggml-cpu/binary-ops.cpp`); matrices are multiplied, for which they need a `vec_dot`.
fn check_type(gguf: &Gguf, tensor: &TensorInfo) -> Result<(), Error> {
    let name = tensor.name.as_str();
    let router = name.contains("gate_inp");
    let vector = tensor.dims.len() == 1 && !router;
    let elementwise =
        vector || name.ends_with(".bias") || name.contains("norm") || name.contains("ssm_conv1d");
    let kind = tensor.kind;
    if elementwise && kind != TensorType::F32 {
        let fault = ModelFault::NotF32 { kind: kind.name() };
        return Err(gguf.model_fault(tensor_field(tensor), fault));
    }
    if !kind.can_multiply() {
        let fault = ModelFault::NotMultipliable { kind: kind.name() };
        return Err(gguf.model_fault(tensor_field(tensor), fault));
    }
    Ok(())
}

fn tensor_field(tensor: &TensorInfo) -> String {
    format!("tensor {:?}", tensor.name)
}
