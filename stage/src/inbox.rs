//! Which of the waiting frames a stage runs next.
//!
//! # The policy
//!
//! **Decode first.** A decode row is all that somebody waits for; a prefill chunk takes as long as many of them. So
//! waiting decode frames pass waiting prefill frames, and a running generation is never held up by more than the one
//! chunk that already runs. They cannot pass for ever: the engine stops sending decode frames when no prefill frame
//! comes back (`engine::schedule`).
//!
//! **Together.** The weights are read once per batch, whatever its size, so all waiting decode frames run as one batch,
//! as long as their rows fit `n_batch`. Prefill frames run one by one, in the order they came: each is a batch of its own
//! size already, and decode frames get a turn in between.
//!
//! **In the order of each slot.** Frames that touch a common slot, by rows or by operations, are never reordered: a
//! decode frame that touches a slot of a waiting prefill frame waits behind it. In a batch all operations are applied
//! before all rows, so a frame whose operations touch a slot that the batch already has rows of starts another batch.
//! Decode frames never pass each other, nor do prefill frames, so the next stage gets them in an order that keeps this
//! true there.
//!
//! Plain data: no clock, no llama.cpp, no channel. Whoever fills it bounds it.

use std::collections::VecDeque;

use protocol::slots::SlotSet;

use crate::events::Arrived;

/// Frames that have arrived and not been run.
#[derive(Debug)]
pub(crate) struct Inbox {
    waiting: VecDeque<Waiting>,
    n_batch: usize,
}

#[derive(Debug)]
struct Waiting {
    arrived: Arrived,
    n_rows: usize,
    /// Slots of the rows.
    rows: SlotSet,
    /// Slots of the rows and of the operations.
    touched: SlotSet,
}

impl Inbox {
    /// An empty one, for batches of up to `n_batch` rows.
    pub(crate) fn new(n_batch: u32) -> Self {
        Self { waiting: VecDeque::new(), n_batch: n_batch as usize }
    }

    /// Number of waiting frames.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets every frame.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Lets a frame wait.
    pub(crate) fn push(&mut self, arrived: Arrived) {
        let frame = &arrived.frame;
        let rows = frame.slots_of_rows();
        let touched = frame.slots();
        self.waiting.push_back(Waiting { n_rows: frame.n_rows(), rows, touched, arrived });
    }

    /// Moves the next batch into `batch`, which must be empty and stays so if nothing waits. All operations of its
    /// frames, in order, are to be applied before all its rows.
    pub(crate) fn take(&mut self, batch: &mut Vec<Arrived>) {
        self.take_decode(batch);
        if batch.is_empty() {
            batch.extend(self.waiting.pop_front().map(|waiting| waiting.arrived));
        }
    }

    fn take_decode(&mut self, batch: &mut Vec<Arrived>) {
        let (mut passed, mut in_batch) = (SlotSet::EMPTY, SlotSet::EMPTY);
        let mut n_rows = 0;
        let mut at = 0;
        while let Some(next) = self.waiting.get(at) {
            if next.arrived.frame.prefill {
                passed.extend(&next.touched);
                at += 1;
                continue;
            }
            let fits = batch.is_empty() || n_rows + next.n_rows <= self.n_batch;
            if !fits || next.touched.overlaps(&passed) || next.touched.overlaps(&in_batch) {
                return;
            }
            n_rows += next.n_rows;
            in_batch.extend(&next.rows);
            batch.extend(self.waiting.remove(at).map(|waiting| waiting.arrived));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Instant;

    use cluster::{Epoch, SlotId, StepId};
    use proptest::prelude::*;
    use protocol::frame::{Frame, KvOp, RowRun, Rows};

    use super::*;

    const SLOTS: u32 = 5;
    const N_BATCH: u32 = 6;

    fn frame(step: u64, prefill: bool, ops: Vec<KvOp>, runs: &[(u32, u32)]) -> Frame {
        let runs: Vec<RowRun> =
            runs.iter().map(|&(slot, n)| RowRun { slot: SlotId(slot), position: 0, n }).collect();
        let tokens = runs.iter().map(|run| run.n).sum::<u32>() as usize;
        let (step, rows) = (StepId(step), Rows::Tokens(vec![0; tokens]));
        Frame { epoch: Epoch(1), step, ops, runs, prefill, rows, copies: Vec::new() }
    }

    fn arrived(frame: Frame) -> Arrived {
        Arrived { frame, at: Instant::now() }
    }

    fn decode(step: u64, slots: &[u32]) -> Frame {
        frame(step, false, vec![], &slots.iter().map(|slot| (*slot, 1)).collect::<Vec<_>>())
    }

    fn prefill(step: u64, slot: u32) -> Frame {
        frame(step, true, vec![], &[(slot, 4)])
    }

    fn remove(slot: u32) -> KvOp {
        KvOp::RemoveFrom { slot: SlotId(slot), from: 0 }
    }

    fn batches(frames: impl IntoIterator<Item = Frame>) -> Vec<Vec<u64>> {
        let mut inbox = Inbox::new(N_BATCH);
        frames.into_iter().for_each(|frame| inbox.push(arrived(frame)));
        std::iter::from_fn(|| {
            let mut batch = Vec::new();
            inbox.take(&mut batch);
            (!batch.is_empty()).then(|| batch.iter().map(|arrived| arrived.frame.step.0).collect())
        })
        .collect()
    }

    /// Field case 23.
    #[test]
    fn decode_frames_pass_prefill_frames_and_run_together() {
        let frames = [prefill(1, 0), decode(2, &[1]), prefill(3, 2), decode(4, &[3, 4])];
        assert_eq!(batches(frames), [vec![2, 4], vec![1], vec![3]]);
    }

    #[test]
    fn a_batch_holds_no_more_rows_than_allowed() {
        let frames = [decode(1, &[0, 1, 2, 3]), decode(2, &[4]), decode(3, &[0, 1])];
        assert_eq!(batches(frames), [vec![1, 2], vec![3]]);
        let wide = frame(1, false, vec![], &[(0, 9)]);
        assert_eq!(batches([wide, decode(2, &[1])]), [vec![1], vec![2]], "no frame is stuck");
    }

    #[test]
    fn a_decode_frame_does_not_pass_a_prefill_frame_of_its_slot() {
        let frames = [prefill(1, 0), decode(2, &[0]), decode(3, &[1])];
        assert_eq!(batches(frames), [vec![1], vec![2, 3]]);
        let frames = [prefill(1, 0), frame(2, false, vec![remove(0)], &[(1, 1)])];
        assert_eq!(batches(frames), [vec![1], vec![2]], "nor with an operation");
        let clears = frame(1, true, vec![KvOp::KeepOnly(SlotId(4))], &[(4, 1)]);
        assert_eq!(batches([clears, decode(2, &[1])]), [vec![1], vec![2]], "nor one that clears it");
    }

    #[test]
    fn operations_on_a_slot_of_the_batch_start_another() {
        let frames = [decode(1, &[0, 1]), frame(2, false, vec![remove(1)], &[(2, 1)]), decode(3, &[3])];
        assert_eq!(batches(frames), [vec![1], vec![2, 3]]);
        let frames = [decode(1, &[0]), decode(2, &[0])];
        assert_eq!(batches(frames), [vec![1], vec![2]], "so do rows of the same slot");
    }

    #[test]
    fn a_frame_of_operations_alone_passes_through() {
        assert_eq!(batches([frame(7, false, vec![remove(0)], &[])]), [vec![7]]);
    }

    /// What a stage's cache would hold: per slot, the steps that wrote it.
    type Cache = BTreeMap<u32, Vec<u64>>;

    fn apply(cache: &mut Cache, op: KvOp) {
        match op {
            KvOp::RemoveFrom { slot, from } => cache.entry(slot.0).or_default().truncate(from as usize),
            KvOp::Copy { from, to } => {
                let copy = cache.get(&from.0).cloned().unwrap_or_default();
                cache.insert(to.0, copy);
            }
            KvOp::KeepOnly(slot) => cache.retain(|other, _| *other == slot.0),
        }
    }

    fn run(cache: &mut Cache, batch: &[Frame]) {
        batch.iter().flat_map(|frame| &frame.ops).for_each(|op| apply(cache, *op));
        for frame in batch {
            for run in &frame.runs {
                cache.entry(run.slot.0).or_default().extend(vec![frame.step.0; run.n as usize]);
            }
        }
    }

    fn compact(mut cache: Cache) -> Cache {
        cache.retain(|_, steps| !steps.is_empty());
        cache
    }

    fn any_op() -> impl Strategy<Value = KvOp> {
        prop_oneof![
            4 => (0..SLOTS, 0..3_u32).prop_map(|(slot, from)| KvOp::RemoveFrom { slot: SlotId(slot), from }),
            2 => (0..SLOTS, 1..SLOTS).prop_map(|(from, by)| KvOp::Copy { from: SlotId(from), to: SlotId((from + by) % SLOTS) }),
            1 => (0..SLOTS).prop_map(|slot| KvOp::KeepOnly(SlotId(slot))),
        ]
    }

    fn any_frames() -> impl Strategy<Value = Vec<(Frame, usize)>> {
        let ops = prop_oneof![3 => Just(vec![]), 1 => proptest::collection::vec(any_op(), 1..3)];
        let runs = proptest::collection::btree_map(0..SLOTS, 1..3_u32, 0..4);
        // Each frame comes with the number of batches taken before it arrives.
        proptest::collection::vec((any::<bool>(), ops, runs, 0..2_usize), 1..24).prop_map(|frames| {
            (1..)
                .zip(frames)
                .map(|(step, (prefill, ops, runs, takes))| {
                    (frame(step, prefill, ops, &runs.into_iter().collect::<Vec<_>>()), takes)
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn batches_leave_the_caches_as_the_frames_one_by_one_would(frames in any_frames()) {
            let (mut inbox, mut cache, mut expected) = (Inbox::new(N_BATCH), Cache::new(), Cache::new());
            let mut seen = Vec::new();
            let mut take = |inbox: &mut Inbox| {
                let decode_waits = inbox.waiting.iter().any(|w| !w.arrived.frame.prefill);
                let front_is_prefill = inbox.waiting.front().is_some_and(|w| w.arrived.frame.prefill);
                let mut batch = Vec::new();
                inbox.take(&mut batch);
                let batch: Vec<Frame> = batch.into_iter().map(|arrived| arrived.frame).collect();
                assert!(batch.len() <= 1 || batch.iter().all(|f| !f.prefill));
                assert!(batch.len() <= 1 || batch.iter().map(Frame::n_rows).sum::<usize>() <= N_BATCH as usize);
                assert!(front_is_prefill || !decode_waits || !batch[0].prefill);
                run(&mut cache, &batch);
                seen.extend(batch.iter().map(|f| (f.prefill, f.step.0)));
                batch.len()
            };
            let n = frames.len();
            for (frame, takes) in frames {
                (0..takes).for_each(|_| { take(&mut inbox); });
                run(&mut expected, std::slice::from_ref(&frame));
                inbox.push(arrived(frame));
            }
            while take(&mut inbox) > 0 {}
            prop_assert_eq!(seen.len(), n);
            prop_assert!(seen.iter().filter(|(p, _)| *p).is_sorted(), "prefill frames keep their order");
            prop_assert!(seen.iter().filter(|(p, _)| !*p).is_sorted(), "so do decode frames");
            prop_assert_eq!(compact(cache), compact(expected));
        }
    }
}
