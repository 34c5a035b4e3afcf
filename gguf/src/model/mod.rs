//! Describes a model: from metadata and tensor table to [`ModelShape`].

mod hparams;
mod keys;
mod tensors;

use cluster::{Attention, BlockKind, BlockShape, Bytes, Experts, FeedForward, ModelShape, RangeRule};

pub(crate) use hparams::Hparams;
pub(crate) use keys::Keys;
pub(crate) use tensors::{Role, role};

use crate::architectures::{self, SizeRule, Support, WithoutSliding};
use crate::error::{Error, ModelFault};
use crate::{Array, Gguf, Value};

/// Describes a model, after checking that llama.cpp could run it in slices.
///
/// Refuses, with the reason, architectures that cannot be cut, weight types that llama.cpp cannot multiply, and
/// files whose tensors do not fit their metadata.
pub fn model_shape(gguf: &Gguf) -> Result<ModelShape, Error> {
    let hparams = hparams(gguf)?;
    shape_of(gguf, &hparams)
}

/// The hyper-parameters of a model whose architecture is not refused.
pub(crate) fn hparams(gguf: &Gguf) -> Result<Hparams, Error> {
    let name = gguf.architecture()?;
    let refuse = |reason: &str| Error::Refused {
        file: gguf.name().to_owned(),
        architecture: name.to_owned(),
        reason: reason.to_owned(),
    };
    if let Some(kind) = gguf.get("general.type").and_then(Value::as_str).filter(|kind| *kind != "model") {
        return Err(refuse(&format!("the file is not a model, its general.type is {kind:?}")));
    }
    let architecture = architectures::find(name)
        .ok_or_else(|| refuse("the llama.cpp that Shoal is built with does not know it"))?;
    if let Support::Refused(reason) = architecture.support {
        return Err(refuse(reason));
    }
    if has_deepstack(gguf, name) {
        return Err(refuse("image features enter at several blocks (deepstack), not only at the first"));
    }
    if gguf.get("shoal.slice.start").is_some() {
        return Err(refuse("the file is itself a slice; give the whole model"));
    }
    Hparams::read(gguf, architecture)
}

/// Whether any block takes image features: a count that is not 0, or a mapping with a block that is not −1.
fn has_deepstack(gguf: &Gguf, architecture: &str) -> bool {
    let get = |key: &str| gguf.get(&format!("{architecture}.{key}"));
    let count = get("n_deepstack_layers").and_then(Value::as_u64).unwrap_or(0);
    let mapped = match get("deepstack_mapping") {
        Some(Value::Array(Array::I32(blocks))) => blocks.iter().any(|block| *block >= 0),
        Some(_) => true,
        None => false,
    };
    count > 0 || mapped
}

pub(crate) fn shape_of(gguf: &Gguf, hparams: &Hparams) -> Result<ModelShape, Error> {
    let sizes = tensors::measure(gguf, hparams)?;
    let n = hparams.n_layer as usize;
    let blocks = (0..hparams.n_layer).zip(&sizes.blocks).map(|(index, block)| BlockShape {
        kind: BlockKind {
            attention: attention(hparams, index),
            feed_forward: if block.routed { FeedForward::MixtureOfExperts } else { FeedForward::Dense },
        },
        weight_bytes: Bytes(block.bytes),
        kv_elements_per_token: kv_elements(hparams, index),
        state_bytes_per_slot: if hparams.is_recurrent(index) {
            Bytes(hparams.state_bytes)
        } else {
            Bytes::ZERO
        },
    });
    Ok(ModelShape {
        architecture: hparams.architecture.name.to_owned(),
        name: gguf.get("general.name").and_then(Value::as_str).map(str::to_owned),
        n_embd: hparams.n_embd,
        n_vocab: sizes.n_vocab,
        n_ctx_train: hparams.n_ctx_train,
        n_head: hparams.n_head.iter().copied().take(n).collect(),
        n_head_kv: hparams.n_head_kv.iter().copied().take(n).collect(),
        blocks: blocks.collect(),
        embedding_bytes: Bytes(sizes.embedding),
        head_bytes: Bytes(sizes.head),
        tied: sizes.tied,
        global_bytes: Bytes(sizes.global),
        experts: (hparams.n_expert > 0)
            .then_some(Experts { count: hparams.n_expert, used: hparams.n_expert_used }),
        range_rules: range_rules(hparams, sizes.n_vocab),
    })
}

fn attention(hparams: &Hparams, block: u32) -> Attention {
    match hparams.window(block) {
        _ if hparams.is_recurrent(block) => Attention::Recurrent,
        Some(window) => Attention::SlidingWindow { window },
        None => Attention::Full,
    }
}

fn kv_elements(hparams: &Hparams, block: u32) -> u64 {
    if hparams.is_recurrent(block) {
        return 0;
    }
    let heads = hparams.n_head_kv.get(block as usize).copied().unwrap_or(0);
    let head = hparams.head;
    let (key, value) = match hparams.window(block) {
        Some(_) => (head.key_sliding, head.value_sliding),
        None => (head.key, head.value),
    };
    let value = if head.latent { 0 } else { value };
    u64::from(heads) * (u64::from(key) + u64::from(value))
}

/// Limits that come from constants in llama.cpp's source. Each names the file it is written in.
fn range_rules(hparams: &Hparams, n_vocab: u32) -> Vec<RangeRule> {
    let mut rules = Vec::new();
    let n_layer = hparams.n_layer;
    if let Some(step) = hparams.architecture.start_multiple {
        rules.push(RangeRule::StartMultiple { step });
    }
    // llm_graph_input_mem_hybrid::set_input (src/llama-graph.cpp) writes the inputs of both memories, whether or
    // not the graph has blocks that use them.
    if hparams.recurrent.is_some() {
        rules.push(RangeRule::BothMemories);
    }
    if hparams.sliding_window.as_ref().is_some_and(|sliding| sliding.without == WithoutSliding::Impossible) {
        rules.push(RangeRule::SlidingBlock);
    }
    match hparams.architecture.size_rule {
        SizeRule::None | SizeRule::MiniCpm => {}
        SizeRule::Constant { blocks } if blocks == n_layer => rules.push(RangeRule::WholeOnly),
        SizeRule::Constant { blocks } => rules.push(RangeRule::ForbiddenLength { length: blocks }),
        SizeRule::Deepseek2 if deepseek2_is_lite(hparams) => {}
        SizeRule::Deepseek2 => {
            let lengths: &[u32] = if n_vocab == DEEPSEEK2_LITE_VOCAB { &[26, 27, 48] } else { &[26, 27] };
            rules.extend(lengths.iter().map(|&length| RangeRule::ForbiddenLength { length }));
        }
    }
    rules.retain(|rule| !matches!(rule, RangeRule::ForbiddenLength { length } if *length >= n_layer));
    rules
}

const DEEPSEEK2_LITE_VOCAB: u32 = 128_256;

/// `is_lite` in `src/models/deepseek2.cpp`: such a model has no query compression, and llama.cpp tells it by its size.
pub(crate) fn deepseek2_is_lite(hparams: &Hparams) -> bool {
    let n_layer = hparams.n_layer;
    matches!(n_layer, 26 | 27) || n_layer == 48 && hparams.declared_vocab == DEEPSEEK2_LITE_VOCAB
}

pub(crate) fn missing_tensor(gguf: &Gguf, name: &str) -> Error {
    gguf.model_fault(format!("tensor {name:?}"), ModelFault::Missing)
}
