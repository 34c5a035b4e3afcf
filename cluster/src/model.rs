//! What a model is made of, as far as cutting, measuring and planning need to know.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Bytes, LayerRange, LayerRangeError, split_by_bytes};

/// How a block mixes information between tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Attention {
    /// Every earlier token; the KV cache grows with the context.
    Full,
    /// The last `window` tokens; the KV cache stops growing there.
    SlidingWindow {
        /// Tokens kept.
        window: u32,
    },
    /// A recurrent state of fixed size (Mamba, gated delta net, …).
    Recurrent,
}

/// How a block transforms each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// All weights are used for every token.
    Dense,
    /// A router picks experts for every token.
    MixtureOfExperts,
}

/// The type of a block: blocks of one type cost the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockKind {
    /// Token mixing.
    pub attention: Attention,
    /// Token transformation.
    pub feed_forward: FeedForward,
}

/// One Transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its type.
    pub kind: BlockKind,
    /// Bytes of its tensors in the file.
    pub weight_bytes: Bytes,
    /// Elements of keys and values cached per token (0 for a recurrent block); times the element size of the
    /// cache's types gives bytes.
    pub kv_elements_per_token: u64,
    /// Bytes of recurrent state per sequence (f32), 0 for an attention block.
    pub state_bytes_per_slot: Bytes,
}

/// Mixture-of-experts sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// Experts per block.
    pub count: u32,
    /// Experts used per token.
    pub used: u32,
}

/// A limit on the layer ranges that can be cut out of a model and still be computed by llama.cpp as the whole is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum RangeRule {
    /// A range starts at a multiple of `step`: a pattern of this period is fixed in llama.cpp's source.
    StartMultiple {
        /// The pattern's period, in blocks.
        step: u32,
    },
    /// A range holds at least one attention block and one recurrent block: llama.cpp's hybrid memory needs both.
    BothMemories,
    /// A range holds at least one block with a sliding window: llama.cpp's cache for such models needs one.
    SlidingBlock,
    /// A part of the model must not have this many blocks: llama.cpp would take it for a model of another size
    /// and compute with other constants. (The whole model may.)
    ForbiddenLength {
        /// The number of blocks.
        length: u32,
    },
    /// Only the whole model can be run: a constant depends on its number of blocks.
    WholeOnly,
}

impl fmt::Display for RangeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StartMultiple { step } => write!(
                f,
                "it must start at a multiple of {step}, because llama.cpp fixes a pattern of that period"
            ),
            Self::BothMemories => write!(
                f,
                "it must hold at least one attention block and one recurrent block, because llama.cpp's hybrid \
                 memory needs both"
            ),
            Self::SlidingBlock => write!(
                f,
                "it must hold at least one block with a sliding window, because llama.cpp's cache for such models \
                 needs one"
            ),
            Self::ForbiddenLength { length } => {
                write!(f, "a part of {length} blocks would be taken by llama.cpp for a model of another size")
            }
            Self::WholeOnly => write!(
                f,
                "only the whole model can be run, because llama.cpp picks a constant by the number of blocks"
            ),
        }
    }
}

/// Why a layer range of a model cannot be a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RangeRefusal {
    /// Blocks that the model does not have.
    #[error("layer range {range} is out of range: the model has {n_layer} blocks")]
    OutOfRange {
        /// The range asked for.
        range: LayerRange,
        /// Blocks of the model.
        n_layer: u32,
    },
    /// A rule of the model's architecture.
    #[error("layer range {range} cannot be cut out: {rule}")]
    Rule {
        /// The range asked for.
        range: LayerRange,
        /// The rule it breaks.
        rule: RangeRule,
    },
}

/// A model, described.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// `general.architecture`, llama.cpp's name of it.
    pub architecture: String,
    /// `general.name`, if the file has one.
    pub name: Option<String>,
    /// Width of a hidden row, in f32 elements.
    pub n_embd: u32,
    /// Vocabulary size.
    pub n_vocab: u32,
    /// Context length the model was trained for, in tokens.
    pub n_ctx_train: u32,
    /// Query heads of each block.
    pub n_head: Vec<u32>,
    /// Key and value heads of each block.
    pub n_head_kv: Vec<u32>,
    /// The blocks, in order.
    pub blocks: Vec<BlockShape>,
    /// Bytes of the token embedding matrix.
    pub embedding_bytes: Bytes,
    /// Bytes of output norm and LM head; where the head is tied, this counts the shared matrix.
    pub head_bytes: Bytes,
    /// Whether the LM head is the token embedding matrix.
    pub tied: bool,
    /// Bytes of tensors that every slice carries (rope factors, …).
    pub global_bytes: Bytes,
    /// Present for mixture-of-experts models.
    pub experts: Option<Experts>,
    /// Limits on the layer ranges it can be cut into; empty for most.
    #[serde(default)]
    pub range_rules: Vec<RangeRule>,
}

impl ModelShape {
    /// Number of blocks.
    pub fn n_layer(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Bytes of the blocks in `range`.
    pub fn block_bytes(&self, range: LayerRange) -> Bytes {
        self.blocks_in(range).map(|block| block.weight_bytes).sum()
    }

    /// Bytes of the slice with the blocks in `range`: of these, of what every slice has, and of the head if it is the last.
    pub fn slice_bytes(&self, range: LayerRange) -> Bytes {
        let head = if range.end() == self.n_layer() { self.head_bytes } else { Bytes::ZERO };
        self.block_bytes(range) + head + self.global_bytes
    }

    /// Bytes of cache that `slots` sequences of up to `n_ctx` tokens need for the blocks in `range`, with
    /// `kv_element_bytes` per cached element (2 for f16).
    ///
    /// A sliding-window block caps at its window plus one micro-batch of `n_ubatch` tokens, as llama.cpp sizes it
    /// (`src/llama-kv-cache-iswa.cpp`).
    pub fn cache_bytes(&self, range: LayerRange, request: CacheRequest) -> Bytes {
        self.blocks_in(range)
            .map(|block| {
                let tokens = tokens_kept(block.kind.attention, request);
                let kv = Bytes(block.kv_elements_per_token) * u64::from(tokens) * request.kv_element_bytes;
                (kv + block.state_bytes_per_slot) * u64::from(request.slots)
            })
            .sum()
    }

    /// Cells of one slot that masks span: blocks with full attention have a cache of one length, blocks with a sliding
    /// window of another, recurrent blocks none.
    pub fn cells(&self, range: LayerRange, request: CacheRequest) -> u64 {
        let longest = |is_of_cache: fn(Attention) -> bool| {
            let blocks = self.blocks_in(range).filter(|block| is_of_cache(block.kind.attention));
            blocks.map(|block| u64::from(tokens_kept(block.kind.attention, request))).max().unwrap_or(0)
        };
        longest(|attention| attention == Attention::Full)
            + longest(|attention| matches!(attention, Attention::SlidingWindow { .. }))
    }

    /// Whether any block keeps a recurrent state, which cannot be rolled back to an earlier position.
    pub fn has_recurrent_state(&self) -> bool {
        self.blocks.iter().any(|b| b.kind.attention == Attention::Recurrent)
    }

    /// The smallest sliding window of any block.
    pub fn smallest_window(&self) -> Option<u32> {
        self.blocks
            .iter()
            .filter_map(|block| match block.kind.attention {
                Attention::SlidingWindow { window } => Some(window),
                Attention::Full | Attention::Recurrent => None,
            })
            .min()
    }

    /// Whether `range` can be a slice of this model, and if not, why.
    pub fn check_range(&self, range: LayerRange) -> Result<(), RangeRefusal> {
        let n_layer = self.n_layer();
        if range.end() > n_layer {
            return Err(RangeRefusal::OutOfRange { range, n_layer });
        }
        match self.range_rules.iter().find(|rule| self.breaks(range, **rule)) {
            Some(&rule) => Err(RangeRefusal::Rule { range, rule }),
            None => Ok(()),
        }
    }

    /// Splits the blocks into `stages` ranges, each of which can be a slice, whose largest is as small as possible;
    /// the head counts with the last.
    pub fn split(&self, stages: u32) -> Result<Vec<LayerRange>, LayerRangeError> {
        let blocks: Vec<Bytes> = self.blocks.iter().map(|block| block.weight_bytes).collect();
        split_by_bytes(&blocks, self.head_bytes, stages, &|range| self.check_range(range).is_ok())
    }

    /// The split into as many ranges as can be slices: one per block, unless a rule forbids it.
    pub fn finest_split(&self) -> Vec<LayerRange> {
        (1..=self.n_layer()).rev().find_map(|stages| self.split(stages).ok()).unwrap_or_default()
    }

    fn breaks(&self, range: LayerRange, rule: RangeRule) -> bool {
        let whole = range.len() == self.n_layer();
        match rule {
            RangeRule::StartMultiple { step } => !range.start().is_multiple_of(step.max(1)),
            RangeRule::ForbiddenLength { length } => range.len() == length && !whole,
            RangeRule::WholeOnly => !whole,
            RangeRule::SlidingBlock => !self
                .blocks_in(range)
                .any(|block| matches!(block.kind.attention, Attention::SlidingWindow { .. })),
            RangeRule::BothMemories => {
                let recurrent = self
                    .blocks_in(range)
                    .filter(|block| block.kind.attention == Attention::Recurrent)
                    .count();
                recurrent == 0 || recurrent == range.len() as usize
            }
        }
    }

    fn blocks_in(&self, range: LayerRange) -> impl Iterator<Item = &BlockShape> {
        self.blocks.iter().take(range.end() as usize).skip(range.start() as usize)
    }
}

/// What a cache is asked to hold.
#[derive(Debug, Clone, Copy)]
pub struct CacheRequest {
    /// Sequences.
    pub slots: u32,
    /// Tokens per sequence.
    pub n_ctx: u32,
    /// Rows computed at once.
    pub n_ubatch: u32,
    /// Bytes per cached element.
    pub kv_element_bytes: u64,
}

fn tokens_kept(attention: Attention, request: CacheRequest) -> u32 {
    match attention {
        Attention::SlidingWindow { window } => {
            request.n_ctx.min(pad(window.saturating_add(request.n_ubatch), 256))
        }
        Attention::Full | Attention::Recurrent => request.n_ctx,
    }
}

/// The next multiple of `to`, or the largest number where there is none.
fn pad(n: u32, to: u32) -> u32 {
    n.div_ceil(to).saturating_mul(to)
}
