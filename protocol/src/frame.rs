//! A step's frame, checked: no field of a received frame is used before [`Frame::check`] has compared it with the
//! stage's limits, because a wrong slot or position would make llama.cpp abort the process.

use bytes::Bytes;
use cluster::{Epoch, SlotId, StepId};
use thiserror::Error;

use crate::rows::{RowEncoding, UnknownEncoding};
use crate::slots::SlotSet;
use crate::v1;

/// KV operations one frame may carry: far beyond what an engine sends, so that a garbled count is refused.
pub const MAX_OPS: usize = 4096;

/// A change to the cache of every stage, applied in order before the frame's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvOp {
    /// Forget positions `>= from` of a slot.
    RemoveFrom {
        /// The slot.
        slot: SlotId,
        /// First position forgotten; 0 empties the slot.
        from: u32,
    },
    /// Replace `to` by a copy of the whole of `from`.
    Copy {
        /// Copied slot.
        from: SlotId,
        /// Replaced slot.
        to: SlotId,
    },
    /// Forget every slot but this one.
    KeepOnly(SlotId),
}

impl KvOp {
    /// The slots whose content the operation reads or changes.
    pub fn touches(self) -> SlotSet {
        match self {
            Self::RemoveFrom { slot, .. } => [slot].into_iter().collect(),
            Self::Copy { from, to } => [from, to].into_iter().collect(),
            Self::KeepOnly(_) => SlotSet::ALL,
        }
    }
}

/// `n` consecutive rows of one sequence, from `position` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRun {
    /// The sequence's slot.
    pub slot: SlotId,
    /// Position of the first row.
    pub position: u32,
    /// Number of rows, at least 1.
    pub n: u32,
}

/// What a frame's rows are.
#[derive(Debug, Clone, PartialEq)]
pub enum Rows {
    /// Token ids, from the master to stage 0.
    Tokens(Vec<i32>),
    /// Hidden states `[rows, n_embd]`, between stages.
    Hidden {
        /// Element type.
        encoding: RowEncoding,
        /// Little-endian elements, row-major.
        data: Bytes,
    },
}

/// One step on its way through the stages, checked. It may have operations and no rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// The replica's incarnation.
    pub epoch: Epoch,
    /// The step.
    pub step: StepId,
    /// Applied first, in order.
    pub ops: Vec<KvOp>,
    /// The rows, run by run; a slot appears at most once.
    pub runs: Vec<RowRun>,
    /// Prefill rows wait for decode rows.
    pub prefill: bool,
    /// As many rows as the runs name.
    pub rows: Rows,
    /// Slots whose sequences are complete with these rows and will be asked for by another replica. Of the runs' slots only.
    pub copies: Vec<SlotId>,
}

/// What a stage's input may hold. All numbers are the stage's own, none is the sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLimits {
    /// Sequences.
    pub slots: u32,
    /// Positions per sequence.
    pub n_ctx: u32,
    /// Rows per frame.
    pub n_batch: u32,
    /// The stage's first block.
    pub entry_layer: u32,
    /// What the rows must be.
    pub input: RowInput,
}

/// What a stage takes as rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowInput {
    /// Stage 0 takes token ids below `n_vocab`.
    Tokens {
        /// Vocabulary size.
        n_vocab: u32,
    },
    /// Every other stage takes hidden rows.
    Hidden {
        /// Width of a row.
        n_embd: u32,
    },
}

/// Why a frame is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum FrameError {
    #[error("frame of epoch {got}, but this stage is in epoch {own}")]
    Epoch { got: u64, own: u64 },
    #[error("frame enters at layer {got}, but this stage begins at layer {own}")]
    EntryLayer { got: u32, own: u32 },
    #[error("frame carries {got} kv operations, more than {limit}")]
    TooManyOps { got: usize, limit: usize },
    #[error("kv operation {index} says nothing")]
    EmptyOp { index: usize },
    #[error("slot {slot} is out of range: this stage has {slots} slots")]
    Slot { slot: u32, slots: u32 },
    #[error("slot {slot} is copied onto itself")]
    SelfCopy { slot: u32 },
    #[error("slot {slot} is cut at position {from}, beyond its {n_ctx} positions")]
    RemovePosition { slot: u32, from: u32, n_ctx: u32 },
    #[error("slot {slot} appears twice in one frame")]
    SlotTwice { slot: u32 },
    #[error("slot {slot} is to be copied out twice or without rows")]
    CopyOf { slot: u32 },
    #[error("run of slot {slot} has no rows")]
    EmptyRun { slot: u32 },
    #[error("run of {n} rows from position {position} of slot {slot} exceeds its {n_ctx} positions")]
    Position { slot: u32, position: u32, n: u32, n_ctx: u32 },
    #[error("frame has {got} rows, more than {limit}")]
    TooManyRows { got: u64, limit: u32 },
    #[error("frame has no payload for its {rows} rows")]
    NoPayload { rows: u32 },
    #[error("frame carries {got}, but this stage takes {wanted}")]
    WrongPayload { got: &'static str, wanted: &'static str },
    #[error("frame names {rows} rows but carries {tokens} token ids")]
    TokenCount { rows: u32, tokens: usize },
    #[error("token id {token} is outside the vocabulary of {n_vocab}")]
    Token { token: i32, n_vocab: u32 },
    #[error("frame names {rows} rows of {row_bytes} bytes but carries {got} bytes")]
    HiddenBytes { rows: u32, row_bytes: u64, got: usize },
    #[error(transparent)]
    Encoding(#[from] UnknownEncoding),
}

impl Frame {
    /// Checks every field of a received frame against the stage's own epoch and limits.
    pub fn check(wire: v1::Frame, epoch: Epoch, limits: &FrameLimits) -> Result<Self, FrameError> {
        if wire.epoch != epoch.0 {
            return Err(FrameError::Epoch { got: wire.epoch, own: epoch.0 });
        }
        if wire.entry_layer != limits.entry_layer {
            return Err(FrameError::EntryLayer { got: wire.entry_layer, own: limits.entry_layer });
        }
        let ops = check_ops(&wire.ops, limits)?;
        let (runs, rows) = check_runs(&wire.runs, limits)?;
        Ok(Self {
            epoch,
            step: StepId(wire.step),
            ops,
            runs,
            prefill: wire.prefill,
            rows: check_payload(wire.payload, rows, limits.input)?,
            copies: check_copies(&wire.copies, &wire.runs)?,
        })
    }

    /// The message for the stage that begins at `entry_layer`.
    pub fn into_wire(self, entry_layer: u32) -> v1::Frame {
        let payload = match self.rows {
            Rows::Tokens(ids) => v1::frame::Payload::Tokens(v1::TokenRows { ids }),
            Rows::Hidden { encoding, data } => v1::frame::Payload::Hidden(v1::HiddenRows {
                encoding: v1::Encoding::from(encoding).into(),
                data,
            }),
        };
        v1::Frame {
            epoch: self.epoch.0,
            step: self.step.0,
            ops: self.ops.into_iter().map(Into::into).collect(),
            entry_layer,
            prefill: self.prefill,
            runs: self.runs.into_iter().map(Into::into).collect(),
            payload: Some(payload),
            due_ns: 0,
            copies: self.copies.into_iter().map(|slot| slot.0).collect(),
        }
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.runs.iter().map(|run| run.n as usize).sum()
    }

    /// The slots whose content the frame's operations read or change.
    pub fn slots_of_ops(&self) -> SlotSet {
        let mut set = SlotSet::EMPTY;
        for op in &self.ops {
            set.extend(&op.touches());
        }
        set
    }

    /// The slots that the frame's rows extend.
    pub fn slots_of_rows(&self) -> SlotSet {
        self.runs.iter().map(|run| run.slot).collect()
    }

    /// Both.
    pub fn slots(&self) -> SlotSet {
        let mut set = self.slots_of_ops();
        set.extend(&self.slots_of_rows());
        set
    }
}

fn check_slot(slot: u32, limits: &FrameLimits) -> Result<SlotId, FrameError> {
    if slot < limits.slots { Ok(SlotId(slot)) } else { Err(FrameError::Slot { slot, slots: limits.slots }) }
}

fn check_ops(ops: &[v1::KvOp], limits: &FrameLimits) -> Result<Vec<KvOp>, FrameError> {
    if ops.len() > MAX_OPS {
        return Err(FrameError::TooManyOps { got: ops.len(), limit: MAX_OPS });
    }
    ops.iter()
        .enumerate()
        .map(|(index, op)| check_op(op.op.as_ref().ok_or(FrameError::EmptyOp { index })?, limits))
        .collect()
}

fn check_op(op: &v1::kv_op::Op, limits: &FrameLimits) -> Result<KvOp, FrameError> {
    match *op {
        v1::kv_op::Op::Remove(v1::RemoveFrom { slot, from }) => {
            if from > limits.n_ctx {
                return Err(FrameError::RemovePosition { slot, from, n_ctx: limits.n_ctx });
            }
            Ok(KvOp::RemoveFrom { slot: check_slot(slot, limits)?, from })
        }
        v1::kv_op::Op::Copy(v1::CopySlot { from, to }) => {
            if from == to {
                return Err(FrameError::SelfCopy { slot: from });
            }
            Ok(KvOp::Copy { from: check_slot(from, limits)?, to: check_slot(to, limits)? })
        }
        v1::kv_op::Op::KeepOnly(slot) => Ok(KvOp::KeepOnly(check_slot(slot, limits)?)),
    }
}

fn check_runs(runs: &[v1::RowRun], limits: &FrameLimits) -> Result<(Vec<RowRun>, u32), FrameError> {
    let mut seen = SlotSet::EMPTY;
    let mut rows = 0_u64;
    let mut checked = Vec::with_capacity(runs.len().min(limits.slots as usize));
    for &v1::RowRun { slot, position, n } in runs {
        let id = check_slot(slot, limits)?;
        if !seen.insert(id) {
            return Err(FrameError::SlotTwice { slot });
        }
        if n == 0 {
            return Err(FrameError::EmptyRun { slot });
        }
        if position.checked_add(n).is_none_or(|end| end > limits.n_ctx) {
            return Err(FrameError::Position { slot, position, n, n_ctx: limits.n_ctx });
        }
        rows += u64::from(n);
        checked.push(RowRun { slot: id, position, n });
    }
    match u32::try_from(rows) {
        Ok(rows) if rows <= limits.n_batch => Ok((checked, rows)),
        _ => Err(FrameError::TooManyRows { got: rows, limit: limits.n_batch }),
    }
}

/// There are no more copies than runs, whose slots have been checked.
fn check_copies(copies: &[u32], runs: &[v1::RowRun]) -> Result<Vec<SlotId>, FrameError> {
    let mut seen = SlotSet::EMPTY;
    let of_run = |slot: u32| runs.iter().any(|run| run.slot == slot);
    let checked = copies.iter().map(|&slot| match of_run(slot) && seen.insert(SlotId(slot)) {
        true => Ok(SlotId(slot)),
        false => Err(FrameError::CopyOf { slot }),
    });
    checked.collect()
}

fn check_payload(
    payload: Option<v1::frame::Payload>,
    rows: u32,
    input: RowInput,
) -> Result<Rows, FrameError> {
    match (payload, input) {
        (Some(v1::frame::Payload::Tokens(tokens)), RowInput::Tokens { n_vocab }) => {
            check_tokens(tokens.ids, rows, n_vocab)
        }
        (Some(v1::frame::Payload::Hidden(hidden)), RowInput::Hidden { n_embd }) => {
            check_hidden(hidden, rows, n_embd)
        }
        (Some(v1::frame::Payload::Hidden(_)), RowInput::Tokens { .. }) => {
            Err(FrameError::WrongPayload { got: "hidden rows", wanted: "token ids" })
        }
        (Some(v1::frame::Payload::Tokens(_)), RowInput::Hidden { .. }) => {
            Err(FrameError::WrongPayload { got: "token ids", wanted: "hidden rows" })
        }
        (None, _) if rows > 0 => Err(FrameError::NoPayload { rows }),
        (None, RowInput::Tokens { .. }) => Ok(Rows::Tokens(Vec::new())),
        (None, RowInput::Hidden { .. }) => {
            Ok(Rows::Hidden { encoding: RowEncoding::F32, data: Bytes::new() })
        }
    }
}

fn check_tokens(ids: Vec<i32>, rows: u32, n_vocab: u32) -> Result<Rows, FrameError> {
    if ids.len() != rows as usize {
        return Err(FrameError::TokenCount { rows, tokens: ids.len() });
    }
    let outside = |id: &&i32| u32::try_from(**id).map_or(true, |id| id >= n_vocab);
    match ids.iter().find(outside) {
        Some(&token) => Err(FrameError::Token { token, n_vocab }),
        None => Ok(Rows::Tokens(ids)),
    }
}

fn check_hidden(hidden: v1::HiddenRows, rows: u32, n_embd: u32) -> Result<Rows, FrameError> {
    let encoding = RowEncoding::try_from(hidden.encoding)?;
    // At most 2^32 × 4: no overflow, and neither has the product of two u32 beyond u64.
    let row_bytes = u64::from(n_embd) * encoding.element_bytes() as u64;
    if u64::from(rows).checked_mul(row_bytes) != Some(hidden.data.len() as u64) {
        return Err(FrameError::HiddenBytes { rows, row_bytes, got: hidden.data.len() });
    }
    Ok(Rows::Hidden { encoding, data: hidden.data })
}

impl From<KvOp> for v1::KvOp {
    fn from(op: KvOp) -> Self {
        let op = match op {
            KvOp::RemoveFrom { slot, from } => v1::kv_op::Op::Remove(v1::RemoveFrom { slot: slot.0, from }),
            KvOp::Copy { from, to } => v1::kv_op::Op::Copy(v1::CopySlot { from: from.0, to: to.0 }),
            KvOp::KeepOnly(slot) => v1::kv_op::Op::KeepOnly(slot.0),
        };
        Self { op: Some(op) }
    }
}

impl From<RowRun> for v1::RowRun {
    fn from(run: RowRun) -> Self {
        Self { slot: run.slot.0, position: run.position, n: run.n }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    const EPOCH: Epoch = Epoch(7);
    const N_EMBD: u32 = 6;

    fn limits(input: RowInput) -> FrameLimits {
        FrameLimits { slots: 4, n_ctx: 64, n_batch: 16, entry_layer: 3, input }
    }

    fn hidden_limits() -> FrameLimits {
        limits(RowInput::Hidden { n_embd: N_EMBD })
    }

    fn token_limits() -> FrameLimits {
        limits(RowInput::Tokens { n_vocab: 100 })
    }

    fn hidden(rows: usize, encoding: RowEncoding) -> Rows {
        Rows::Hidden { encoding, data: encoding.encode(&vec![0.5; rows * N_EMBD as usize]) }
    }

    /// A frame that passes, for tests that then break one field.
    fn good() -> v1::Frame {
        let frame = Frame {
            epoch: EPOCH,
            step: StepId(9),
            ops: vec![
                KvOp::RemoveFrom { slot: SlotId(1), from: 64 },
                KvOp::Copy { from: SlotId(1), to: SlotId(2) },
                KvOp::KeepOnly(SlotId(3)),
            ],
            runs: vec![
                RowRun { slot: SlotId(3), position: 63, n: 1 },
                RowRun { slot: SlotId(0), position: 0, n: 2 },
            ],
            prefill: false,
            rows: hidden(3, RowEncoding::F32),
            copies: vec![SlotId(0)],
        };
        frame.into_wire(3)
    }

    fn refusal(change: impl FnOnce(&mut v1::Frame)) -> FrameError {
        let mut wire = good();
        change(&mut wire);
        Frame::check(wire, EPOCH, &hidden_limits()).unwrap_err()
    }

    fn set_op(op: v1::kv_op::Op) -> impl FnOnce(&mut v1::Frame) {
        move |wire| wire.ops = vec![v1::KvOp { op: Some(op) }]
    }

    #[test]
    fn a_frame_of_another_epoch_or_entry_layer_is_refused() {
        assert_eq!(refusal(|f| f.epoch = 6).to_string(), "frame of epoch 6, but this stage is in epoch 7");
        assert_eq!(
            refusal(|f| f.entry_layer = 0).to_string(),
            "frame enters at layer 0, but this stage begins at layer 3"
        );
    }

    #[test]
    fn operations_outside_the_slots_are_refused() {
        use v1::kv_op::Op;
        let remove = |slot, from| Op::Remove(v1::RemoveFrom { slot, from });
        let copy = |from, to| Op::Copy(v1::CopySlot { from, to });
        assert!(matches!(refusal(set_op(remove(4, 0))), FrameError::Slot { slot: 4, .. }));
        assert!(matches!(refusal(set_op(remove(0, 65))), FrameError::RemovePosition { from: 65, .. }));
        assert!(matches!(refusal(set_op(copy(1, 1))), FrameError::SelfCopy { slot: 1 }));
        assert!(matches!(refusal(set_op(copy(0, u32::MAX))), FrameError::Slot { .. }));
        assert!(matches!(refusal(set_op(copy(9, 0))), FrameError::Slot { .. }));
        assert!(matches!(refusal(set_op(Op::KeepOnly(4))), FrameError::Slot { .. }));
        assert!(matches!(refusal(|f| f.ops.push(v1::KvOp { op: None })), FrameError::EmptyOp { index: 3 }));
        assert!(matches!(
            refusal(|f| f.ops = vec![v1::KvOp { op: None }; MAX_OPS + 1]),
            FrameError::TooManyOps { .. }
        ));
    }

    #[test]
    fn runs_outside_the_slots_are_refused() {
        assert!(matches!(refusal(|f| f.runs[0].slot = 4), FrameError::Slot { .. }));
        assert!(matches!(refusal(|f| f.runs[0].slot = 0), FrameError::SlotTwice { slot: 0 }));
        assert!(matches!(refusal(|f| f.runs[0].n = 0), FrameError::EmptyRun { slot: 3 }));
        assert!(matches!(refusal(|f| f.copies = vec![1]), FrameError::CopyOf { slot: 1 }));
        assert!(matches!(refusal(|f| f.copies = vec![0, 3, 0]), FrameError::CopyOf { slot: 0 }));
        assert!(matches!(refusal(|f| f.runs[0].position = 64), FrameError::Position { .. }));
        assert!(matches!(refusal(|f| f.runs[1].n = u32::MAX), FrameError::Position { .. }));
        assert!(matches!(refusal(|f| f.runs[0].position = u32::MAX), FrameError::Position { .. }));
        assert!(matches!(refusal(|f| f.runs[1].n = 17), FrameError::TooManyRows { got: 18, limit: 16 }));
    }

    #[test]
    fn a_payload_of_another_kind_or_length_is_refused() {
        use v1::frame::Payload;
        assert!(matches!(refusal(|f| f.payload = None), FrameError::NoPayload { rows: 3 }));
        let tokens = |ids: &[i32]| Payload::Tokens(v1::TokenRows { ids: ids.to_vec() });
        let wrong = refusal(|f| f.payload = Some(tokens(&[1, 2, 3])));
        assert_eq!(wrong.to_string(), "frame carries token ids, but this stage takes hidden rows");
        let wrong = Frame::check(good(), EPOCH, &token_limits()).unwrap_err();
        assert!(matches!(wrong, FrameError::WrongPayload { .. }));
        let bytes = |encoding, n| Some(Payload::Hidden(v1::HiddenRows { encoding, data: vec![0; n].into() }));
        assert!(matches!(refusal(|f| f.payload = bytes(1, 71)), FrameError::HiddenBytes { .. }));
        assert!(matches!(refusal(|f| f.payload = bytes(2, 72)), FrameError::HiddenBytes { .. }));
        assert!(matches!(refusal(|f| f.payload = bytes(0, 72)), FrameError::Encoding(_)));
        assert!(matches!(refusal(|f| f.payload = bytes(3, 72)), FrameError::Encoding(_)));
    }

    #[test]
    fn token_ids_outside_the_vocabulary_are_refused() {
        for (ids, passes) in [
            (&[0, 99, 5][..], true),
            (&[0, 100, 5], false),
            (&[0, -1, 5], false),
            (&[i32::MIN, i32::MAX, 5], false),
            (&[0, 1], false),
        ] {
            let mut wire = good();
            wire.payload = Some(v1::frame::Payload::Tokens(v1::TokenRows { ids: ids.to_vec() }));
            let result = Frame::check(wire, EPOCH, &token_limits());
            assert_eq!(result.is_ok(), passes, "{ids:?}");
        }
    }

    #[test]
    fn a_frame_may_carry_operations_alone() {
        let mut wire = good();
        wire.runs.clear();
        wire.copies.clear();
        wire.payload = None;
        for limits in [hidden_limits(), token_limits()] {
            let frame = Frame::check(wire.clone(), EPOCH, &limits).unwrap();
            assert_eq!((frame.ops.len(), frame.n_rows()), (3, 0));
        }
    }

    fn any_op() -> impl Strategy<Value = KvOp> {
        prop_oneof![
            (0..4_u32, 0..=64_u32).prop_map(|(slot, from)| KvOp::RemoveFrom { slot: SlotId(slot), from }),
            (0..4_u32, 1..4_u32)
                .prop_map(|(from, by)| KvOp::Copy { from: SlotId(from), to: SlotId((from + by) % 4) }),
            (0..4_u32).prop_map(|slot| KvOp::KeepOnly(SlotId(slot))),
        ]
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let runs = proptest::collection::btree_map(0..4_u32, (0..60_u32, 1..=4_u32), 0..4);
        let ops = proptest::collection::vec(any_op(), 0..5);
        (any::<u64>(), ops, runs, any::<bool>(), any::<bool>()).prop_map(|(step, ops, runs, prefill, f16)| {
            let runs: Vec<RowRun> = runs
                .into_iter()
                .map(|(slot, (position, n))| RowRun { slot: SlotId(slot), position, n })
                .collect();
            let n = runs.iter().map(|run| run.n as usize).sum();
            let encoding = if f16 { RowEncoding::F16 } else { RowEncoding::F32 };
            let (step, copies) = (StepId(step), runs.iter().map(|run| run.slot).filter(|_| f16).collect());
            Frame { epoch: EPOCH, step, ops, runs, prefill, rows: hidden(n, encoding), copies }
        })
    }

    /// Whatever passes the check lies within the limits.
    fn assert_within(frame: &Frame, limits: &FrameLimits) {
        assert!(frame.n_rows() <= limits.n_batch as usize);
        for run in &frame.runs {
            assert!(run.slot.0 < limits.slots && run.n > 0);
            assert!(run.position + run.n <= limits.n_ctx);
        }
        match &frame.rows {
            Rows::Tokens(ids) => assert_eq!(ids.len(), frame.n_rows()),
            Rows::Hidden { encoding, data } => {
                assert_eq!(data.len(), frame.n_rows() * N_EMBD as usize * encoding.element_bytes());
            }
        }
    }

    proptest! {
        #[test]
        fn a_frame_survives_the_wire(frame in any_frame()) {
            let bytes = frame.clone().into_wire(3).encode_to_vec();
            let wire = v1::Frame::decode(&bytes[..]).unwrap();
            prop_assert_eq!(Frame::check(wire, EPOCH, &hidden_limits()).unwrap(), frame);
        }

        #[test]
        fn a_frame_with_garbled_bytes_is_refused_or_within_limits(
            frame in any_frame(),
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = frame.into_wire(3).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            for limits in [hidden_limits(), token_limits()] {
                if let Ok(wire) = v1::Frame::decode(&bytes[..])
                    && let Ok(frame) = Frame::check(wire, EPOCH, &limits)
                {
                    assert_within(&frame, &limits);
                }
            }
        }
    }

    #[test]
    fn random_bytes_never_panic_in_the_check() {
        // A fixed xorshift, so that a failure repeats. The epoch and entry layer follow the bytes, so that the check
        // goes on to the later fields.
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut decoded = 0;
        for _ in 0..200_000 {
            let n = next() as usize % 48;
            let bytes: Vec<u8> = (0..n).map(|_| (next() >> 32) as u8 & 0x7F).collect();
            let Ok(wire) = v1::Frame::decode(&bytes[..]) else {
                continue;
            };
            decoded += 1;
            let epoch = Epoch(wire.epoch);
            for mut limits in [hidden_limits(), token_limits()] {
                limits.entry_layer = wire.entry_layer;
                if let Ok(frame) = Frame::check(wire.clone(), epoch, &limits) {
                    assert_within(&frame, &limits);
                }
            }
        }
        assert!(decoded > 1000, "only {decoded} random frames decoded");
    }
}
