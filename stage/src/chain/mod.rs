//! What a stage runs batches through, behind one seam: the slices of a model, or a device that is emulated. Knows rows and
//! slots, no frames' ways and no requests.

mod slices;

use std::ops::Range;
use std::time::{Duration, Instant};

use cluster::{LayerRange, Phase, SlotId, StageTimeError};
use llama::kv_blob::{Blob, BlobError, Prepared};
use protocol::frame::{Frame, KvOp};
use thiserror::Error;

use crate::events::Arrived;
pub(crate) use slices::{Slice, Slices};

/// Why a batch could not be run.
#[derive(Debug, Error)]
pub(crate) enum ChainError {
    /// llama.cpp, or a check before it.
    #[error("blocks {layers}: {source}")]
    Slice {
        layers: LayerRange,
        #[source]
        source: llama::Error,
    },
    /// The token embeddings could not be looked up.
    #[error("token embeddings: {0}")]
    Embedding(#[source] llama::Error),
    /// Some block does not keep what is needed to go back there. The engine avoids such operations.
    #[error("blocks {layers}: {slot} cannot be cut back to position {from}, the state there is not kept")]
    CannotForget { layers: LayerRange, slot: SlotId, from: u32 },
    /// Token ids reached a stage without embeddings; frames are checked against that.
    #[error("token ids without embeddings to look them up in")]
    NoEmbedding,
    /// An emulated cache would have a hole, or a position twice. llama.cpp refuses such rows itself.
    #[error("{slot} is given position {position}, but its next is {next}")]
    NotNext { slot: SlotId, position: u32, next: u32 },
    /// The lock by which stages of a host take turns.
    #[error("waiting for a turn to compute: {0}")]
    Turn(#[source] std::io::Error),
    /// Keys and values of a slot could not be cut or put together.
    #[error("keys and values of {slot}: {source}")]
    Blob {
        slot: SlotId,
        #[source]
        source: BlobError,
    },
    /// A hand-off brought blobs for other slices.
    #[error("{got} blobs came for {slices} slices")]
    BlobCount { got: usize, slices: usize },
    /// As llama.cpp's caches of such models have it.
    #[error("recurrent blocks keep a state that is not cut by position and layer")]
    Recurrent,
    /// An emulated slot has no tokens. llama.cpp says so itself.
    #[error("{slot} has no tokens")]
    Empty { slot: SlotId },
    /// An emulated device's profile cannot tell how long the batch takes.
    #[error(transparent)]
    Time(#[from] StageTimeError),
}

/// A batch, as far as its time is concerned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    pub(crate) rows: u32,
    /// Mean position of the first rows of its runs, each weighing as much as it has rows.
    pub(crate) depth: f64,
    /// Rows whose logits are wanted.
    pub(crate) outputs: u32,
    /// When its first frame came.
    pub(crate) arrived: Instant,
    /// How long the stage had nothing to do before that.
    pub(crate) idle: Duration,
}

impl Call {
    /// The call that a batch makes; none without rows. `ended` is when the batch before it was done.
    pub(crate) fn of(batch: &[Arrived], outputs: u32, ended: Option<Instant>) -> Option<Self> {
        let is_prefill = batch.first()?.frame.prefill;
        let runs = || batch.iter().flat_map(|arrived| &arrived.frame.runs);
        let rows: u32 = runs().map(|run| run.n).sum();
        let depths: u64 = runs().map(|run| u64::from(run.position) * u64::from(run.n)).sum();
        let arrived = batch.iter().map(|arrived| arrived.at).min()?;
        let idle = ended.map_or(Duration::ZERO, |ended| arrived.saturating_duration_since(ended));
        (rows > 0).then(|| Self {
            phase: if is_prefill { Phase::Prefill } else { Phase::Decode },
            rows,
            depth: depths as f64 / f64::from(rows),
            outputs,
            arrived,
            idle,
        })
    }
}

/// What runs batches. A batch is begun, filled and run; its results last until the next is begun.
pub(crate) trait Chain {
    /// Forgets every sequence.
    fn clear(&mut self);

    /// Applies an operation to all blocks.
    fn apply(&mut self, op: KvOp) -> Result<(), ChainError>;

    /// A copy of a slot's keys and values, of all blocks.
    fn export(&mut self, slot: SlotId) -> Result<Blob, ChainError>;

    /// Replaces a slot's sequence: a blob for each slice. On an error the slot may hold anything, or nothing.
    fn import(&mut self, slot: SlotId, blobs: &[Prepared]) -> Result<(), ChainError>;

    /// Begins an empty batch.
    fn begin(&mut self);

    /// Adds a frame's rows to the batch and returns where they are in it.
    fn add(&mut self, frame: &Frame) -> Range<usize>;

    /// Asks for the logits of a row of the batch.
    fn want(&mut self, row: usize);

    /// Runs the batch and says how long computing took. A batch without rows is none.
    fn run(&mut self, call: &Call) -> Result<Duration, ChainError>;

    /// When the last run was over; a device that is emulated has a time of its own.
    fn ended(&self) -> Instant {
        Instant::now()
    }

    /// Hidden rows `[rows, n_embd]` of the last run, unless the stage is a master.
    fn hidden(&self, rows: Range<usize>) -> &[f32];

    /// Logits `[n_vocab]` of a row of the last run, if they were asked for; empty where text comes by rule.
    fn logits(&self, row: usize) -> Option<&[f32]>;
}
