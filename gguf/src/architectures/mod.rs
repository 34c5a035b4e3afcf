//! The one table of architectures: what can be cut, what depends on a block's place in the model, and how a slice
//! states it. `docs/architectures.md` is generated from it.
//!
//! Every fact here was read in the pinned llama.cpp (`src/models/<architecture>.cpp`); when the pin moves, read
//! them again.

mod markdown;
mod table;

pub use markdown::markdown;
pub use table::TABLE;

/// Whether models of an architecture can be run in slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Proven by a test: a random model, cut, computes what the whole does, bit for bit.
    Certified,
    /// Nothing known stands against it, nothing proves it.
    Uncertified,
    /// It cannot; why.
    Refused(&'static str),
}

/// What a token's embedding row is multiplied by before the first block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EmbeddingScale {
    /// Nothing.
    One,
    /// The square root of the row's width.
    SqrtWidth,
    /// The model's `embedding_scale`. The graph scales hidden rows by it too, so slices state 0, llama.cpp's "none".
    Key {
        /// The factor of a model that states none.
        default: f32,
    },
}

/// How hidden rows enter the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HiddenInput {
    /// As `llama_batch.embd`, unchanged.
    Batch,
    /// As `llama_batch.embd`, but the graph then scales them as if they were embedding rows; so the rows must be written
    /// over the result of the node of this name, from the eval callback. A slice says so in `shoal.slice.input_node`.
    OverNode(&'static str),
    /// As `llama_batch.embd`, which the graph accepts only with M-RoPE; a slice states sections that make M-RoPE of
    /// text positions the same as plain RoPE. Positions are then four per row: p, p, p, 0.
    MultiRope,
}

/// Which blocks have sliding-window attention, where the file does not state it block by block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlidingWindow {
    /// None, whatever the file says.
    None,
    /// All but one block of each period.
    Pattern {
        /// The window's size.
        window: Window,
        /// The period, where the file states none.
        period: u32,
        /// Which block of the period is the other one.
        start: PatternStart,
        /// What a slice does without a block that slides.
        without: WithoutSliding,
    },
}

/// How a slice without any sliding block is expressed: llama.cpp's cache for models with sliding windows needs one
/// (`llama_model::create_memory` in `src/llama-model.cpp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutSliding {
    /// As a model without a sliding window.
    NoWindow,
    /// With a window wider than any context for all its blocks, which are otherwise the same as blocks without.
    WidestWindow,
    /// Not at all: there is no such slice.
    Impossible,
}

/// Where a sliding window's size comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The file; without it, or with 0, no block slides.
    Optional,
    /// The file must state it.
    Required,
    /// The file, or this.
    Default(u32),
}

/// Where in its period a pattern has the block with full attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternStart {
    /// At its end.
    Sliding,
    /// At its start.
    Dense,
}

/// Which blocks keep a recurrent state, where the file does not state it block by block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recurrence {
    /// None.
    None,
    /// All but the last of each interval; its length where the file states none.
    Interval(u32),
}

/// Constants that llama.cpp picks by the number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeRule {
    /// None that change the mathematics.
    None,
    /// Models of this many blocks are computed in another way.
    Constant {
        /// The number of blocks.
        blocks: u32,
    },
    /// MiniCPM: the scale of what a block adds, where the file states none.
    MiniCpm,
    /// DeepSeek 2: models of certain sizes have no query compression, and the default of the expert gating differs.
    Deepseek2,
}

/// What is known of an architecture.
#[derive(Debug, Clone, Copy)]
pub struct Architecture {
    /// llama.cpp's name of it, `general.architecture`.
    pub name: &'static str,
    /// Whether it can be cut.
    pub support: Support,
    /// What embedding rows are multiplied by.
    pub embedding_scale: EmbeddingScale,
    /// How hidden rows enter.
    pub hidden_input: HiddenInput,
    /// Sliding-window attention.
    pub sliding_window: SlidingWindow,
    /// Recurrent blocks.
    pub recurrence: Recurrence,
    /// Constants by size.
    pub size_rule: SizeRule,
    /// Slices must start at a multiple of this, because a pattern of this period cannot be stated in a file.
    pub start_multiple: Option<u32>,
    /// Anything else a user should know.
    pub note: &'static str,
}

/// What is known of the architecture of this name; none if the pinned llama.cpp does not have it.
pub fn find(name: &str) -> Option<&'static Architecture> {
    TABLE.iter().find(|architecture| architecture.name == name)
}
