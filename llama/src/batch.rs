//! Splits the rows of a run into `llama_decode` calls whose results come back in a known order. Calls no C.
//!
//! llama.cpp cuts a batch into ubatches itself, and the eval callback then sees the rows of each ubatch. How it cuts
//! depends on the memory (llama-batch.cpp):
//!
//! - `split_simple` (unified attention caches): the batch's order, `n_ubatch` rows at a time;
//! - `split_equal` (everything else): the sequences of a ubatch are those that come next in the batch (with one
//!   cache per slot, only as long as their ids are consecutive), each gives the same number of rows, and the rows are
//!   laid out sequence by sequence.
//!
//! So if in a call (1) slots ascend and each slot's rows are together and ascend, (2) all slots have equally many
//! rows, and (3) there are at most `n_ubatch` rows, then every ubatch takes whole slots, in order, and its rows one
//! after another are the batch. Both rules then give the callback's rows, over all ubatches, exactly the call's order.
//! [`Plan`] makes only such calls; the slots of a mixed batch are grouped by their number of rows, which is what
//! `split_equal` does to decode rows beside a prompt anyway.

use std::ops::Range;

use crate::Token;
use crate::error::RowsError;

/// What a run starts from.
#[derive(Debug, Clone, Copy)]
pub enum RowInput<'a> {
    /// `[n, n_embd]`: embedding rows for the first slice of a model, hidden rows for the others.
    Hidden(&'a [f32]),
    /// Token ids, for a whole model as it came: slices are fed with rows, and hold next to no embeddings.
    Tokens(&'a [Token]),
}

/// Rows to run, in any order. Each slot's positions must continue its sequence without a gap.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// One row's input after the other.
    pub input: RowInput<'a>,
    /// The slot of each row.
    pub slots: &'a [u32],
    /// The position of each row in its slot.
    pub positions: &'a [u32],
    /// Whether logits of the row are wanted. Ignored by contexts that give hidden rows: they give all.
    pub outputs: &'a [bool],
}

/// What a context allows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) n_embd: usize,
    pub(crate) n_vocab: usize,
    pub(crate) n_slots: u32,
    pub(crate) n_ctx_per_slot: u32,
    /// Rows of one run.
    pub(crate) n_batch: u32,
    /// Rows of one call.
    pub(crate) n_ubatch: u32,
    /// Rows of one run that may want logits; `None` where `outputs` is ignored.
    pub(crate) max_outputs: Option<u32>,
}

/// Rows of one slot that belong together, as a range of [`Plan::order`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) slot: u32,
    pub(crate) first_position: u32,
    start: usize,
    count: usize,
}

/// The calls of one run. Kept from run to run, so that nothing is allocated once it has grown.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Indices of the caller's rows in the order in which they are sent.
    order: Vec<usize>,
    runs: Vec<Run>,
    /// Ranges of `order`, one per call.
    calls: Vec<Range<usize>>,
    scratch: Vec<usize>,
    in_given_order: bool,
}

impl Plan {
    /// Checks `rows` and plans their calls. `next_position` tells where a slot continues.
    pub(crate) fn prepare(
        &mut self,
        rows: &Rows<'_>,
        limits: &Limits,
        next_position: impl Fn(u32) -> u32,
    ) -> Result<(), RowsError> {
        self.clear();
        check_shape(rows, limits)?;
        self.sort(rows);
        self.find_runs(rows, limits, next_position)?;
        self.group_by_count();
        self.make_calls(limits.n_ubatch as usize);
        self.in_given_order = self.order.iter().enumerate().all(|(place, row)| place == *row);
        Ok(())
    }

    /// Indices of the caller's rows in the order in which they are sent.
    pub(crate) fn order(&self) -> &[usize] {
        &self.order
    }

    /// One range of [`order`](Self::order) per call.
    pub(crate) fn calls(&self) -> &[Range<usize>] {
        &self.calls
    }

    /// The slots of the run.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether the rows are sent as they were given, so that nothing has to be rearranged.
    pub(crate) fn in_given_order(&self) -> bool {
        self.in_given_order
    }

    fn clear(&mut self) {
        self.order.clear();
        self.runs.clear();
        self.calls.clear();
    }

    fn sort(&mut self, rows: &Rows<'_>) {
        let key = |row: &usize| (rows.slots[*row], rows.positions[*row]);
        self.order.extend(0..rows.slots.len());
        if !self.order.is_sorted_by_key(key) {
            self.order.sort_unstable_by_key(key);
        }
    }

    fn find_runs(
        &mut self,
        rows: &Rows<'_>,
        limits: &Limits,
        next_position: impl Fn(u32) -> u32,
    ) -> Result<(), RowsError> {
        let mut start = 0;
        for same_slot in self.order.chunk_by(|a, b| rows.slots[*a] == rows.slots[*b]) {
            let slot = rows.slots[same_slot[0]];
            let first_position = next_position(slot);
            check_positions(same_slot.iter().map(|row| rows.positions[*row]), slot, first_position, limits)?;
            self.runs.push(Run { slot, first_position, start, count: same_slot.len() });
            start += same_slot.len();
        }
        Ok(())
    }

    /// Puts slots with equally many rows next to each other, those with few rows (decode) first.
    fn group_by_count(&mut self) {
        if self.runs.windows(2).all(|pair| pair[0].count == pair[1].count) {
            return;
        }
        self.runs.sort_unstable_by_key(|run| (run.count, run.slot));
        self.scratch.clear();
        for run in &mut self.runs {
            let start = self.scratch.len();
            self.scratch.extend_from_slice(&self.order[run.start..run.start + run.count]);
            run.start = start;
        }
        std::mem::swap(&mut self.order, &mut self.scratch);
    }

    fn make_calls(&mut self, n_ubatch: usize) {
        let calls = &mut self.calls;
        for group in self.runs.chunk_by(|a, b| a.count == b.count) {
            let count = group[0].count;
            let end = group[group.len() - 1].start + count;
            // Whole slots while they fit; a slot that does not fit alone goes in pieces, alone.
            let (step, stride) = if count <= n_ubatch {
                (n_ubatch / count * count, end - group[0].start)
            } else {
                (n_ubatch, count)
            };
            for first in (group[0].start..end).step_by(stride) {
                let last = first + stride;
                calls.extend((first..last).step_by(step).map(|start| start..last.min(start + step)));
            }
        }
    }
}

fn check_shape(rows: &Rows<'_>, limits: &Limits) -> Result<(), RowsError> {
    let n = rows.slots.len();
    if n == 0 {
        return Err(RowsError::Empty);
    }
    if n > limits.n_batch as usize {
        return Err(RowsError::TooMany { rows: n, limit: limits.n_batch });
    }
    let outputs = if limits.max_outputs.is_some() { rows.outputs.len() } else { n };
    let lengths = [
        ("positions", rows.positions.len(), n),
        ("outputs", outputs, n),
        match rows.input {
            RowInput::Hidden(hidden) => ("numbers in hidden", hidden.len(), n * limits.n_embd),
            RowInput::Tokens(tokens) => ("tokens", tokens.len(), n),
        },
    ];
    for (field, got, expected) in lengths {
        if got != expected {
            return Err(RowsError::Lengths { rows: n, field, got, expected });
        }
    }
    if let Some(row) = rows.slots.iter().position(|slot| *slot >= limits.n_slots) {
        return Err(RowsError::Slot { row, slot: rows.slots[row], n_slots: limits.n_slots });
    }
    if let RowInput::Tokens(tokens) = rows.input {
        let unknown = |token: &Token| usize::try_from(token.0).map_or(true, |id| id >= limits.n_vocab);
        if let Some(token) = tokens.iter().find(|token| unknown(token)) {
            return Err(RowsError::Token { token: token.0, n_vocab: limits.n_vocab });
        }
    }
    if let Some(limit) = limits.max_outputs {
        let wanted = rows.outputs.iter().filter(|wanted| **wanted).count();
        if wanted > limit as usize {
            return Err(RowsError::TooManyOutputs { wanted, limit });
        }
    }
    Ok(())
}

fn check_positions(
    positions: impl Iterator<Item = u32>,
    slot: u32,
    first: u32,
    limits: &Limits,
) -> Result<(), RowsError> {
    for (got, expected) in positions.zip(first..) {
        if got != expected {
            return Err(RowsError::Position { slot, expected, got });
        }
        if got >= limits.n_ctx_per_slot {
            return Err(RowsError::SlotFull { slot, position: got, n_ctx: limits.n_ctx_per_slot });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits {
        n_embd: 1,
        n_vocab: 32,
        n_slots: 8,
        n_ctx_per_slot: 100,
        n_batch: 64,
        n_ubatch: 6,
        max_outputs: Some(2),
    };

    fn plan(slots: &[u32], positions: &[u32]) -> Result<Plan, RowsError> {
        let hidden = vec![0.0; slots.len()];
        let outputs = vec![false; slots.len()];
        let rows = Rows { input: RowInput::Hidden(&hidden), slots, positions, outputs: &outputs };
        let mut plan = Plan::default();
        plan.prepare(&rows, &LIMITS, |slot| 10 * slot)?;
        Ok(plan)
    }

    #[test]
    fn slots_with_equally_many_rows_share_a_call() {
        let plan = plan(&[2, 0, 5], &[20, 0, 50]).unwrap();
        assert_eq!(plan.order(), [1, 0, 2]);
        assert_eq!(plan.calls(), std::slice::from_ref(&(0..3)));
        assert!(!plan.in_given_order());
    }

    #[test]
    fn decode_rows_go_before_a_prompt_beside_them() {
        let plan = plan(&[0, 0, 0, 1, 2], &[0, 1, 2, 10, 20]).unwrap();
        assert_eq!(plan.order(), [3, 4, 0, 1, 2]);
        assert_eq!(plan.calls(), [0..2, 2..5]);
    }

    #[test]
    fn rows_beyond_a_ubatch_go_in_further_calls() {
        // Two slots of 4 rows do not fit a ubatch of 6 together.
        let plan = plan(&[0, 0, 0, 0, 1, 1, 1, 1], &[0, 1, 2, 3, 10, 11, 12, 13]).unwrap();
        assert_eq!(plan.calls(), [0..4, 4..8]);
        assert!(plan.in_given_order());
        // A slot of 8 rows is cut by itself.
        let slots = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
        let positions = [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17];
        let plan = self::plan(&slots, &positions).unwrap();
        assert_eq!(plan.calls(), [0..6, 6..8, 8..14, 14..16]);
    }

    #[test]
    fn rows_that_do_not_continue_their_slot_are_refused() {
        let gap = plan(&[1, 1], &[10, 12]).unwrap_err();
        assert_eq!(gap, RowsError::Position { slot: 1, expected: 11, got: 12 });
        let twice = plan(&[1, 1], &[10, 10]).unwrap_err();
        assert_eq!(twice, RowsError::Position { slot: 1, expected: 11, got: 10 });
        let late = plan(&[1], &[11]).unwrap_err();
        assert_eq!(late, RowsError::Position { slot: 1, expected: 10, got: 11 });
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_refused() {
        for token in [-1, 32, i32::MAX] {
            let input = RowInput::Tokens(&[Token(token)]);
            let rows = Rows { input, slots: &[0], positions: &[0], outputs: &[true] };
            let error = Plan::default().prepare(&rows, &LIMITS, |_| 0).unwrap_err();
            assert_eq!(error, RowsError::Token { token, n_vocab: 32 });
        }
    }

    #[test]
    fn rows_beyond_a_limit_are_refused_with_the_numbers() {
        assert_eq!(plan(&[], &[]).unwrap_err(), RowsError::Empty);
        assert_eq!(plan(&[8], &[0]).unwrap_err(), RowsError::Slot { row: 0, slot: 8, n_slots: 8 });
        let long = (0..65).collect::<Vec<_>>();
        assert_eq!(plan(&[0; 65], &long).unwrap_err(), RowsError::TooMany { rows: 65, limit: 64 });
        let rows =
            Rows { input: RowInput::Hidden(&[0.0; 2]), slots: &[0], positions: &[0], outputs: &[true] };
        let error = Plan::default().prepare(&rows, &LIMITS, |_| 0).unwrap_err();
        assert_eq!(error, RowsError::Lengths { rows: 1, field: "numbers in hidden", got: 2, expected: 1 });
        let rows = Rows {
            input: RowInput::Hidden(&[0.0; 3]),
            slots: &[0, 1, 2],
            positions: &[0; 3],
            outputs: &[true; 3],
        };
        let error = Plan::default().prepare(&rows, &LIMITS, |_| 0).unwrap_err();
        assert_eq!(error, RowsError::TooManyOutputs { wanted: 3, limit: 2 });
        let rows =
            Rows { input: RowInput::Hidden(&[0.0]), slots: &[0], positions: &[100], outputs: &[false] };
        let error = Plan::default().prepare(&rows, &LIMITS, |_| 100).unwrap_err();
        assert_eq!(error, RowsError::SlotFull { slot: 0, position: 100, n_ctx: 100 });
    }

    /// llama-batch.cpp's `split_equal(n_ubatch, sequential)`, written after it, for rows of one sequence each.
    fn split_equal(slots: &[u32], n_ubatch: usize, sequential: bool) -> Vec<Vec<usize>> {
        let mut used = vec![false; slots.len()];
        let mut ubatches = Vec::new();
        loop {
            let mut sequences: Vec<u32> = Vec::new();
            for row in (0..slots.len()).filter(|row| !used[*row]) {
                let follows = sequences.last().is_none_or(|last| !sequential || slots[row] == last + 1);
                if !sequences.contains(&slots[row]) && follows {
                    sequences.push(slots[row]);
                    if sequences.len() > n_ubatch {
                        break;
                    }
                }
            }
            if sequences.is_empty() {
                return ubatches;
            }
            let mut left: Vec<Vec<usize>> = sequences
                .iter()
                .map(|slot| {
                    (0..slots.len()).rev().filter(|row| !used[*row] && slots[*row] == *slot).collect()
                })
                .collect();
            let mut taken = vec![Vec::new(); sequences.len()];
            while left.iter().all(|rows| !rows.is_empty()) {
                for (rows, taken) in left.iter_mut().zip(&mut taken) {
                    taken.extend(rows.pop());
                }
                if (taken[0].len() + 1) * sequences.len() > n_ubatch {
                    break;
                }
            }
            let ubatch = taken.concat();
            ubatch.iter().for_each(|row| used[*row] = true);
            ubatches.push(ubatch);
        }
    }

    proptest! {
        #[test]
        fn llama_cpp_sees_each_calls_rows_in_the_calls_order(
            counts in prop::collection::vec(0_u32..20, 8),
            order in any::<u64>(),
            n_ubatch in 1_u32..24,
            sequential in any::<bool>(),
        ) {
            let mut rows: Vec<(u32, u32)> =
                counts.iter().zip(0..).flat_map(|(count, slot)| (0..*count).map(move |position| (slot, position))).collect();
            prop_assume!(!rows.is_empty());
            rows.sort_by_key(|(slot, position)| u64::from(slot * 31 + position).wrapping_mul(order | 1).rotate_left(17));
            let (slots, positions): (Vec<_>, Vec<_>) = rows.iter().copied().unzip();
            let hidden = vec![0.0; rows.len()];
            let limits = Limits { n_batch: 1000, n_ubatch, max_outputs: None, ..LIMITS };
            let mut plan = Plan::default();
            plan.prepare(&Rows { input: RowInput::Hidden(&hidden), slots: &slots, positions: &positions, outputs: &[] }, &limits, |_| 0).unwrap();

            let mut next = [0; 8];
            let mut seen = vec![false; rows.len()];
            for call in plan.calls() {
                let sent = &plan.order()[call.clone()];
                prop_assert!(sent.len() <= n_ubatch as usize);
                let sent_slots: Vec<u32> = sent.iter().map(|row| slots[*row]).collect();
                let computed = split_equal(&sent_slots, n_ubatch as usize, sequential).concat();
                prop_assert_eq!(computed, (0..sent.len()).collect::<Vec<_>>());
                for row in sent {
                    let slot = slots[*row] as usize;
                    prop_assert_eq!(positions[*row], next[slot]);
                    next[slot] += 1;
                    seen[*row] = true;
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }
}
