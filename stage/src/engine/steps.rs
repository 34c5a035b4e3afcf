//! The steps in flight: which rows of each are waited for, and for whom.
//!
//! It knows neither what the rows hold nor whether anyone still waits.

use std::collections::BTreeMap;

use cluster::{SlotId, StepId};
use protocol::slots::SlotSet;

use super::frame::{FrameKind, StepFrame};
use super::request::RequestKey;

/// A result was reported for a step that is not in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{step} is not in flight")]
pub struct UnknownStep {
    /// The step.
    pub step: StepId,
}

/// A row whose logits a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutputRow {
    /// Index over all rows of the step.
    pub(super) row: usize,
    pub(super) slot: SlotId,
    /// The slot may be someone else's by the time the row comes back.
    pub(super) key: RequestKey,
}

/// What was sent.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) kind: FrameKind,
    pub(super) rows: usize,
    pub(super) outputs: Vec<OutputRow>,
    slots: SlotSet,
}

/// Every step that was sent and has not come back.
#[derive(Debug, Default)]
pub(super) struct Steps {
    in_flight: BTreeMap<StepId, Step>,
    last: u64,
}

impl Steps {
    /// A number never given before.
    pub(super) fn next_id(&mut self) -> StepId {
        self.last += 1;
        StepId(self.last)
    }

    pub(super) fn sent(&mut self, frame: &StepFrame, outputs: Vec<OutputRow>) {
        let slots = frame.runs.iter().map(|run| run.slot).collect();
        let step = Step { kind: frame.kind, rows: frame.tokens.len(), outputs, slots };
        let before = self.in_flight.insert(frame.step, step);
        assert!(before.is_none(), "{} is sent once", frame.step);
    }

    pub(super) fn returned(&mut self, step: StepId) -> Result<Step, UnknownStep> {
        self.in_flight.remove(&step).ok_or(UnknownStep { step })
    }

    pub(super) fn outputs_of(&self, step: StepId) -> &[OutputRow] {
        self.in_flight.get(&step).map_or(&[], |step| &step.outputs)
    }

    /// Whether rows of a slot are under way, wanted or not.
    pub(super) fn touch(&self, slot: SlotId) -> bool {
        self.in_flight.values().any(|step| step.slots.contains(slot))
    }

    /// The rows that are waited for.
    pub(super) fn outputs(&self) -> impl Iterator<Item = &OutputRow> {
        self.in_flight.values().flat_map(|step| &step.outputs)
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn clear(&mut self) {
        self.in_flight.clear();
    }
}
