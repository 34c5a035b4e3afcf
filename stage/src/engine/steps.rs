//! The steps in flight: which rows of each are waited for, and for whom.
//!
//! It knows neither what the rows hold nor whether anyone still waits.

use std::collections::VecDeque;

use cluster::{SlotId, StepId};
use protocol::slots::SlotSet;

use super::frame::{FrameKind, StepFrame};
use super::request::RequestKey;
use super::schedule::FewSlots;

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
    pub(super) outputs: FewSlots<OutputRow>,
    slots: SlotSet,
}

/// Every step that was sent and has not come back.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// In the order of their numbers. There are few, and they come back in about this order.
    in_flight: VecDeque<(StepId, Step)>,
    last: u64,
}

impl Steps {
    /// A number never given before.
    pub(super) fn next_id(&mut self) -> StepId {
        self.last += 1;
        StepId(self.last)
    }

    pub(super) fn sent(&mut self, frame: &StepFrame, outputs: FewSlots<OutputRow>) {
        let slots = frame.runs.iter().map(|run| run.slot).collect();
        let step = Step { kind: frame.kind, rows: frame.tokens.len(), outputs, slots };
        let is_next = self.in_flight.back().is_none_or(|(last, _)| *last < frame.step);
        assert!(is_next, "{} is sent once, after those before it", frame.step);
        self.in_flight.push_back((frame.step, step));
    }

    pub(super) fn returned(&mut self, step: StepId) -> Result<Step, UnknownStep> {
        let place = self.in_flight.iter().position(|(id, _)| *id == step);
        place.and_then(|place| self.in_flight.remove(place)).map(|(_, step)| step).ok_or(UnknownStep { step })
    }

    pub(super) fn outputs_of(&self, step: StepId) -> &[OutputRow] {
        let found = self.in_flight.iter().find(|(id, _)| *id == step);
        found.map_or(&[], |(_, step)| &step.outputs)
    }

    /// Whether rows of a slot are under way, wanted or not.
    pub(super) fn touch(&self, slot: SlotId) -> bool {
        self.in_flight.iter().any(|(_, step)| step.slots.contains(slot))
    }

    /// The rows that are waited for.
    pub(super) fn outputs(&self) -> impl Iterator<Item = &OutputRow> {
        self.in_flight.iter().flat_map(|(_, step)| &step.outputs)
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn clear(&mut self) {
        self.in_flight.clear();
    }
}
