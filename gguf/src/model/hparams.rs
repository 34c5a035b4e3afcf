//! The hyper-parameters of a model as llama.cpp reads them (`src/llama-model.cpp`, `load_hparams`, and the
//! `load_arch_hparams` of `src/models/<architecture>.cpp`), with every pattern over the blocks made explicit.

use super::keys::Keys;
use crate::architectures::{
    Architecture, EmbeddingScale, PatternStart, Recurrence, SlidingWindow, Window, WithoutSliding,
};
use crate::error::{Error, ModelFault};
use crate::{Gguf, Value};

/// `LLAMA_MAX_LAYERS` in `src/llama-hparams.h`.
const MAX_BLOCKS: u32 = 512;
/// More heads or wider rows than any model has; keeps products far from overflow.
const MAX_HEADS: u32 = 1 << 16;
const MAX_WIDTH: u32 = 1 << 20;

/// What cutting and describing need to know of a model.
#[derive(Debug)]
pub(crate) struct Hparams {
    pub(crate) architecture: &'static Architecture,
    /// Blocks in the file, with those that only predict further tokens (`nextn_predict_layers`).
    pub(crate) n_layer_all: u32,
    /// Blocks that are run.
    pub(crate) n_layer: u32,
    pub(crate) n_embd: u32,
    pub(crate) n_ctx_train: u32,
    /// As llama.cpp's size tests read it: `vocab_size`, or the number of tokens; 0 if neither.
    pub(crate) declared_vocab: u32,
    pub(crate) n_head: Vec<u32>,
    pub(crate) n_head_kv: Vec<u32>,
    pub(crate) head: HeadSizes,
    pub(crate) sliding_window: Option<SlidingBlocks>,
    /// Which blocks are recurrent; none for models without such blocks.
    pub(crate) recurrent: Option<Vec<bool>>,
    pub(crate) state_bytes: u64,
    pub(crate) n_expert: u32,
    pub(crate) n_expert_used: u32,
    pub(crate) leading_dense: Option<u32>,
    pub(crate) embedding_scale: f32,
}

/// Elements of a key and a value of one head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadSizes {
    pub(crate) key: u32,
    pub(crate) value: u32,
    pub(crate) key_sliding: u32,
    pub(crate) value_sliding: u32,
    /// Multi-head latent attention: keys and values share one cached vector (`src/llama-kv-cache.cpp`, `has_v`).
    pub(crate) latent: bool,
}

/// Sliding-window attention.
#[derive(Debug)]
pub(crate) struct SlidingBlocks {
    pub(crate) window: u32,
    /// Which blocks have it.
    pub(crate) blocks: Vec<bool>,
    pub(crate) without: WithoutSliding,
}

impl Hparams {
    pub(crate) fn read(gguf: &Gguf, architecture: &'static Architecture) -> Result<Self, Error> {
        let keys = Keys::new(gguf)?;
        let n_layer_all = keys.u32_in("block_count", 1, MAX_BLOCKS)?;
        let nextn = keys.u32("nextn_predict_layers")?.unwrap_or(0);
        if nextn >= n_layer_all {
            return Err(keys.out_of_range("nextn_predict_layers", nextn.into(), 0, n_layer_all - 1));
        }
        let n_layer = n_layer_all - nextn;
        let n_embd = keys.u32_in("embedding_length", 1, MAX_WIDTH)?;
        let (n_head, n_head_kv) = heads(&keys, n_layer_all)?;
        let head = head_sizes(&keys, n_embd, n_head.first().copied().unwrap_or(0))?;
        let (n_expert, n_expert_used) = experts(&keys, n_layer_all)?;
        Ok(Self {
            architecture,
            n_layer_all,
            n_layer,
            n_embd,
            n_ctx_train: keys.required_u32("context_length")?,
            declared_vocab: declared_vocab(gguf, &keys)?,
            n_head,
            n_head_kv,
            head,
            sliding_window: sliding_blocks(&keys, architecture, n_layer, n_layer_all)?,
            recurrent: recurrent_blocks(&keys, architecture, n_layer, n_layer_all)?,
            state_bytes: state_bytes(&keys)?,
            n_expert,
            n_expert_used,
            leading_dense: keys.u32("leading_dense_block_count")?,
            embedding_scale: embedding_scale(&keys, architecture, n_embd)?,
        })
    }

    pub(crate) fn is_recurrent(&self, block: u32) -> bool {
        self.recurrent.as_ref().is_some_and(|blocks| blocks.get(block as usize) == Some(&true))
    }

    pub(crate) fn window(&self, block: u32) -> Option<u32> {
        let sliding = self.sliding_window.as_ref()?;
        (sliding.blocks.get(block as usize) == Some(&true)).then_some(sliding.window)
    }
}

fn heads(keys: &Keys<'_>, n: u32) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let check = |key: &str, heads: &[u32]| match heads.iter().find(|n| **n > MAX_HEADS) {
        Some(&n) => Err(keys.out_of_range(key, n.into(), 0, MAX_HEADS)),
        None => Ok(()),
    };
    let n_head = keys.per_block("attention.head_count", n)?.unwrap_or_else(|| vec![0; n as usize]);
    check("attention.head_count", &n_head)?;
    let n_head_kv = keys.per_block("attention.head_count_kv", n)?.unwrap_or_else(|| n_head.clone());
    check("attention.head_count_kv", &n_head_kv)?;
    Ok((n_head, n_head_kv))
}

fn head_sizes(keys: &Keys<'_>, n_embd: u32, n_head: u32) -> Result<HeadSizes, Error> {
    let size = |key: &str, default: u32| match keys.u32(key)? {
        Some(n) if n > MAX_WIDTH => Err(keys.out_of_range(key, n.into(), 0, MAX_WIDTH)),
        found => Ok(found.unwrap_or(default)),
    };
    let default = n_embd.checked_div(n_head).unwrap_or(0);
    let key = size("attention.key_length", default)?;
    let value = size("attention.value_length", default)?;
    Ok(HeadSizes {
        key,
        value,
        key_sliding: size("attention.key_length_swa", key)?,
        value_sliding: size("attention.value_length_swa", value)?,
        latent: size("attention.key_length_mla", 0)? != 0 && size("attention.value_length_mla", 0)? != 0,
    })
}

fn experts(keys: &Keys<'_>, n: u32) -> Result<(u32, u32), Error> {
    let count = keys.u32("expert_count")?.unwrap_or(0);
    let used = keys.per_block("expert_used_count", n)?.unwrap_or_default();
    Ok((count, used.into_iter().max().unwrap_or(0)))
}

fn declared_vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, Error> {
    if let Some(n) = keys.u32("vocab_size")? {
        return Ok(n);
    }
    let tokens = gguf.get("tokenizer.ggml.tokens").and_then(Value::as_array);
    Ok(tokens.map_or(0, |tokens| u32::try_from(tokens.len()).unwrap_or(u32::MAX)))
}

/// `llama_model_base::load_swa_pattern`: an array, or a period, or the architecture's own period.
fn sliding_blocks(
    keys: &Keys<'_>,
    architecture: &Architecture,
    n_layer: u32,
    n_layer_all: u32,
) -> Result<Option<SlidingBlocks>, Error> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let SlidingWindow::Pattern { window, period, start, without } = architecture.sliding_window else {
        return Ok(None);
    };
    let stated = keys.u32("attention.sliding_window")?;
    let window = match (window, stated) {
        (Window::Optional, None | Some(0)) => return Ok(None),
        (Window::Default(default), None) => default,
        (Window::Required, None) => return Err(keys.missing("attention.sliding_window")),
        (_, Some(stated)) => stated,
    };
    let mut blocks = vec![false; n_layer_all as usize];
    if let Some(array) = keys.get(PATTERN).and_then(Value::as_array) {
        let wrong = ModelFault::WrongType { found: array.element_type().name(), wanted: "bools" };
        let stated = array.as_u64s().ok_or_else(|| keys.fault(PATTERN, wrong))?;
        for (block, stated) in blocks.iter_mut().zip(stated) {
            *block = stated != 0;
        }
    } else {
        let period = keys.u32(PATTERN)?.unwrap_or(period);
        for block in 0..n_layer {
            blocks[block as usize] = slides(block, period, start);
        }
    }
    Ok(Some(SlidingBlocks { window, blocks, without }))
}

/// `llama_hparams::set_swa_pattern`.
fn slides(block: u32, period: u32, start: PatternStart) -> bool {
    match (period, start) {
        (0, _) => true,
        (period, PatternStart::Sliding) => block % period < period - 1,
        (period, PatternStart::Dense) => !block.is_multiple_of(period),
    }
}

fn recurrent_blocks(
    keys: &Keys<'_>,
    architecture: &Architecture,
    n_layer: u32,
    n_layer_all: u32,
) -> Result<Option<Vec<bool>>, Error> {
    let Recurrence::Interval(interval) = architecture.recurrence else { return Ok(None) };
    if let Some(stated) = keys.per_block("attention.recurrent_layers", n_layer_all)? {
        return Ok(Some(stated.into_iter().map(|n| n != 0).collect()));
    }
    const INTERVAL: &str = "full_attention_interval";
    let interval = keys.u32(INTERVAL)?.unwrap_or(interval);
    if interval == 0 {
        return Err(keys.out_of_range(INTERVAL, 0, 1, u32::MAX));
    }
    let recurrent = |block| block < n_layer && (block + 1) % interval != 0;
    Ok(Some((0..n_layer_all).map(recurrent).collect()))
}

/// `llama_hparams::n_embd_r` and `n_embd_s` for a state-space block, in f32 (`src/llama-memory-recurrent.cpp`).
fn state_bytes(keys: &Keys<'_>) -> Result<u64, Error> {
    let read = |key: &str| Ok::<_, Error>(u64::from(keys.u32(key)?.unwrap_or(0)));
    let (inner, state) = (read("ssm.inner_size")?, read("ssm.state_size")?);
    let (kernel, groups) = (read("ssm.conv_kernel")?, read("ssm.group_count")?);
    let channels = inner.saturating_add(groups.saturating_mul(state).saturating_mul(2));
    let convolution = kernel.saturating_sub(1).saturating_mul(channels);
    Ok(convolution.saturating_add(state.saturating_mul(inner)).saturating_mul(4))
}

fn embedding_scale(keys: &Keys<'_>, architecture: &Architecture, n_embd: u32) -> Result<f32, Error> {
    Ok(match architecture.embedding_scale {
        EmbeddingScale::One => 1.0,
        EmbeddingScale::SqrtWidth => (n_embd as f32).sqrt(),
        EmbeddingScale::Key { default } => match keys.f32("embedding_scale")?.unwrap_or(default) {
            // llama.cpp takes 0 for "none".
            0.0 => 1.0,
            scale => scale,
        },
    })
}
