//! What bounds the engine: the replica's slots and context, and how much may be under way at once.
//!
//! It knows nothing of where the numbers come from.

/// The fixed numbers of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLimits {
    /// Sequences that every stage has room for. Stages take batches of at least as many rows: every running generation
    /// may be in one.
    pub slots: u32,
    /// Positions of one slot.
    pub n_ctx: u32,
    /// Token ids lie in `0..n_vocab`.
    pub n_vocab: u32,
    /// Rows of a prefill frame, at most: no more than the stages take in one batch.
    pub prefill_chunk: u32,
    /// Prefill frames in flight, at most. As many as there are stages keeps every stage busy with one prompt.
    pub prefill_frames: u32,
    /// Decode frames in flight, at most.
    pub micro_batches: u32,
    /// Requests that may wait for a slot. With 0, a request that finds no slot is refused.
    pub queue_limit: u32,
    /// What the stages' caches can forget.
    pub rollback: Rollback,
}

/// What part of a sequence the stages' caches can forget while keeping the rest usable.
///
/// Forgetting the whole sequence is always possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rollback {
    /// Any tail: every block keeps the KV of every position.
    Any,
    /// Some blocks keep only the last so many positions (sliding-window attention). Once a sequence has outgrown
    /// the window, the positions that a shorter sequence would attend to are gone.
    Window(u32),
    /// Nothing: some blocks keep one state that stands for the whole sequence (recurrent blocks).
    AppendOnly,
}

/// A limit under which nothing could ever run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("starting the engine: {limit} is 0, it must be at least 1")]
pub struct LimitsError {
    /// The field's name.
    pub limit: &'static str,
}

impl EngineLimits {
    pub(super) fn check(&self) -> Result<(), LimitsError> {
        let at_least_one = [
            ("slots", self.slots),
            ("n_ctx", self.n_ctx),
            ("n_vocab", self.n_vocab),
            ("prefill_chunk", self.prefill_chunk),
            ("prefill_frames", self.prefill_frames),
            ("micro_batches", self.micro_batches),
        ];
        match at_least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((limit, _)) => Err(LimitsError { limit }),
            None => Ok(()),
        }
    }
}
