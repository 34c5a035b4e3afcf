//! What the driver and a worker say to each other: one line of JSON each way. The first line sets the worker up; then each
//! command has one answer. Both are the same binary, so there is no version.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What is measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Processor {
    /// The host's CPU.
    Cpu,
    /// The GPU of this name.
    Gpu(String),
}

/// What every measurement of a worker has in common.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) processor: Processor,
    pub(crate) threads: u32,
    /// Streamed through the caches before each run.
    pub(crate) cold_bytes: u64,
    pub(crate) n_embd: u32,
    /// Where input rows come from; without it they are made up.
    pub(crate) embedding: Option<PathBuf>,
}

/// What a slice gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Gives {
    /// Hidden rows.
    Hidden,
    /// Logits.
    Logits,
}

/// A context to make, in place of the one that had its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContextSpec {
    /// Its number.
    pub(crate) context: usize,
    /// The number of the slice.
    pub(crate) slice: usize,
    pub(crate) gives: Gives,
    pub(crate) slots: u32,
    pub(crate) n_ctx: u32,
    pub(crate) n_ubatch: u32,
    /// Tokens that each slot holds before a run.
    pub(crate) depth: u32,
    /// Whether the look-up of token embeddings belongs to a run.
    pub(crate) looks_up: bool,
}

/// An order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Load a slice under the next number.
    Load { path: PathBuf },
    /// Make a context.
    Context(ContextSpec),
    /// Let a context go.
    Drop { context: usize },
    /// Run one row in each of so many slots.
    Decode { context: usize, rows: u32 },
    /// Run so many rows of one slot.
    Prefill { context: usize, rows: u32 },
    /// Look the embeddings of so many tokens up.
    Embed { rows: u32 },
    /// Measure what idling adds to a call.
    ColdCall { context: usize },
    /// Send a frame of so many rows to the other end of a link.
    Hop { rows: u32 },
    /// Only say what memory the process has.
    Look,
}

/// An answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// Bytes that the process holds now.
    pub(crate) resident_bytes: u64,
    /// The most it ever held.
    pub(crate) peak_bytes: u64,
    pub(crate) outcome: Outcome,
}

/// What came of an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Nothing but done.
    Done,
    /// So long.
    Took { ms: f64 },
    /// Idling for so long adds so much.
    Cold { gaps_ms: Vec<f64>, extra_ms: Vec<f64> },
    /// The slice is loaded; besides its weights, loading took this.
    Loaded { besides_weights_bytes: u64 },
    /// The context is there.
    Made { uses: Vec<BufferUse> },
    /// It could not be done, and the worker can go on.
    Failed { reason: String },
}

/// Memory of a context and its model in buffers of one type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BufferUse {
    pub(crate) on_host: bool,
    pub(crate) weights: u64,
    pub(crate) cache: u64,
    pub(crate) compute: u64,
}
