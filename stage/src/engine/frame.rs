//! The frames that the engine sends through the pipeline.
//!
//! It knows neither how they travel nor what the stages make of them.

use cluster::{SlotId, StepId};
use protocol::frame::{KvOp, RowRun};

use super::request::Token;

/// One step's rows for stage 0. A slot appears in one run at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFrame {
    /// The step's number, never used twice by one engine, not even across a reset.
    pub step: StepId,
    /// Which of the stages' two queues it waits in.
    pub kind: FrameKind,
    /// Applied before the rows: removals only, and only of slots that have a run here.
    pub ops: Vec<KvOp>,
    /// The rows.
    pub runs: Vec<RowRun>,
    /// One token per row, run by run.
    pub tokens: Vec<Token>,
    /// Slots whose prompts end here and will be held for another replica.
    pub copies: Vec<SlotId>,
}

/// Prefill frames wait for decode frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// One row for each of some running generations.
    Decode,
    /// Pieces of prompts.
    Prefill,
}

/// What a frame that has been through leaves to the next.
#[derive(Debug, Default)]
pub struct FrameMemory {
    runs: Vec<RowRun>,
    tokens: Vec<Token>,
}

impl FrameMemory {
    /// Of such runs and tokens, which are forgotten.
    pub fn of(mut runs: Vec<RowRun>, mut tokens: Vec<Token>) -> Self {
        runs.clear();
        tokens.clear();
        Self { runs, tokens }
    }
}

impl StepFrame {
    pub(super) fn new(step: StepId, kind: FrameKind, FrameMemory { runs, tokens }: FrameMemory) -> Self {
        Self { step, kind, ops: Vec::new(), runs, tokens, copies: Vec::new() }
    }

    /// Appends a run, after forgetting the slot's positions from `removed` on, and returns the row index of its last
    /// row.
    pub(super) fn push(&mut self, run: RowRun, removed: Option<u32>, tokens: &[Token]) -> usize {
        let RowRun { slot, n, .. } = run;
        assert_eq!(n as usize, tokens.len(), "{slot}: a run has one token per row");
        assert!(n > 0, "{slot}: a run has rows");
        let elsewhere = self.runs.iter().all(|other| other.slot != slot);
        assert!(elsewhere, "{slot} has one run in {}", self.step);
        self.ops.extend(removed.map(|from| KvOp::RemoveFrom { slot, from }));
        self.runs.push(run);
        self.tokens.extend_from_slice(tokens);
        self.tokens.len() - 1
    }
}
