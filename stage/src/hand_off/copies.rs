//! Copies of sequences that another replica will ask for, made as soon as the rows that complete them have run.
//!
//! A stage that computes prompts does so all the time, and a copy can only be made between two batches. If it were made when it is
//! asked for, every hand-off would wait for the next prompts on every stage. So frames say which of their slots are to be copied
//! ([`protocol::frame::Frame::copies`]), and a copy is there until its slot is touched again. All of them together take as much memory as one
//! slot may; beyond that the oldest go, and are made anew when they are asked for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cluster::{Epoch, SlotId};
use llama::kv_blob::Blob;
use protocol::slots::SlotSet;

/// A slot's sequence as it was.
#[derive(Debug)]
struct Copied<B> {
    epoch: Epoch,
    slot: SlotId,
    tokens: u32,
    blob: Arc<B>,
}

/// The copies of a stage, the oldest first.
#[derive(Debug)]
pub(crate) struct Copies<B = Blob> {
    all: Mutex<VecDeque<Copied<B>>>,
    /// Spares a step the lock where nothing is handed off.
    are_there: AtomicBool,
}

impl<B> Default for Copies<B> {
    fn default() -> Self {
        Self { all: Mutex::default(), are_there: AtomicBool::new(false) }
    }
}

impl<B> Copies<B> {
    /// Keeps a copy of so many tokens, beside others of `room` tokens together.
    pub(crate) fn keep(&self, (epoch, slot): (Epoch, SlotId), (blob, tokens): (B, u32), room: u32) {
        let mut all = self.lock();
        all.retain(|copied| copied.slot != slot);
        all.push_back(Copied { epoch, slot, tokens, blob: Arc::new(blob) });
        let mut sum: u64 = all.iter().map(|copied| u64::from(copied.tokens)).sum();
        while sum > u64::from(room)
            && let Some(oldest) = all.pop_front()
        {
            sum -= u64::from(oldest.tokens);
        }
        self.are_there.store(!all.is_empty(), Ordering::Relaxed);
    }

    /// These slots hold, or are about to hold, something else.
    pub(crate) fn forget(&self, slots: impl FnOnce() -> SlotSet) {
        if self.are_there.load(Ordering::Relaxed) {
            let (slots, mut all) = (slots(), self.lock());
            all.retain(|copied| !slots.contains(copied.slot));
            self.are_there.store(!all.is_empty(), Ordering::Relaxed);
        }
    }

    /// Nothing that was copied counts any more.
    pub(crate) fn clear(&self) {
        self.lock().clear();
        self.are_there.store(false, Ordering::Relaxed);
    }

    /// The copy of a slot with so many tokens.
    pub(crate) fn of(&self, epoch: Epoch, slot: SlotId, tokens: u32) -> Option<Arc<B>> {
        let all = self.lock();
        let is_meant =
            |copied: &&Copied<B>| (copied.epoch, copied.slot, copied.tokens) == (epoch, slot, tokens);
        all.iter().find(is_meant).map(|copied| Arc::clone(&copied.blob))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Copied<B>>> {
        // The list is whole after every statement.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Epoch = Epoch(3);

    #[test]
    fn a_copy_is_there_until_its_slot_is_touched() {
        let copies = Copies::<&str>::default();
        copies.keep((NOW, SlotId(1)), ("one", 10), 100);
        copies.keep((NOW, SlotId(2)), ("two", 20), 100);
        assert_eq!(copies.of(NOW, SlotId(1), 10).as_deref(), Some(&"one"));
        assert_eq!(copies.of(NOW, SlotId(1), 11), None, "another sequence");
        assert_eq!(copies.of(Epoch(2), SlotId(1), 10), None, "another incarnation");
        copies.forget(|| [SlotId(1), SlotId(7)].into_iter().collect());
        assert_eq!(copies.of(NOW, SlotId(1), 10), None);
        assert_eq!(copies.of(NOW, SlotId(2), 20).as_deref(), Some(&"two"));
        copies.clear();
        assert_eq!(copies.of(NOW, SlotId(2), 20), None);
    }

    #[test]
    fn the_oldest_make_room() {
        let copies = Copies::<u32>::default();
        for slot in 0..4 {
            copies.keep((NOW, SlotId(slot)), (slot, 30), 100);
        }
        let kept: Vec<u32> = (0..4).filter(|slot| copies.of(NOW, SlotId(*slot), 30).is_some()).collect();
        assert_eq!(kept, [1, 2, 3]);
        copies.keep((NOW, SlotId(9)), (9, 101), 100);
        assert_eq!(copies.of(NOW, SlotId(9), 101), None, "none is larger than a slot");
    }
}
