//! A set of slot numbers, small enough to copy and test without touching the heap: every frame is compared with
//! every waiting frame by the slots it touches.

use cluster::SlotId;

/// Slots a replica may have at most: llama.cpp's limit of sequences in a context (`LLAMA_MAX_SEQ`, `src/llama-cparams.h`).
pub const MAX_SLOTS: u32 = 256;

const WORDS: usize = MAX_SLOTS as usize / 64;

/// A set of slots below [`MAX_SLOTS`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotSet([u64; WORDS]);

impl SlotSet {
    /// No slot.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// Every slot.
    pub const ALL: Self = Self([u64::MAX; WORDS]);

    /// Adds a slot; false if it was there already or lies beyond [`MAX_SLOTS`].
    pub const fn insert(&mut self, slot: SlotId) -> bool {
        if slot.0 >= MAX_SLOTS {
            return false;
        }
        let (word, bit) = (slot.0 as usize / 64, 1 << (slot.0 % 64));
        let fresh = self.0[word] & bit == 0;
        self.0[word] |= bit;
        fresh
    }

    /// Whether the slot is in the set.
    pub const fn contains(&self, slot: SlotId) -> bool {
        slot.0 < MAX_SLOTS && self.0[slot.0 as usize / 64] & (1 << (slot.0 % 64)) != 0
    }

    /// Adds every slot of `other`.
    pub fn extend(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }

    /// Whether the sets have a slot in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(a, b)| a & b != 0)
    }
}

impl FromIterator<SlotId> for SlotSet {
    fn from_iter<I: IntoIterator<Item = SlotId>>(slots: I) -> Self {
        let mut set = Self::EMPTY;
        for slot in slots {
            set.insert(slot);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_new_once_and_slots_beyond_the_limit_never_enter() {
        let mut set = SlotSet::default();
        assert!(set.insert(SlotId(0)) && set.insert(SlotId(255)));
        assert!(!set.insert(SlotId(255)));
        assert!(!set.insert(SlotId(256)) && !set.contains(SlotId(256)));
        assert!(set.contains(SlotId(255)) && !set.contains(SlotId(63)));
    }

    #[test]
    fn sets_overlap_only_where_they_share_a_slot() {
        let low: SlotSet = [1, 2, 64].map(SlotId).into_iter().collect();
        let high: SlotSet = [3, 65].map(SlotId).into_iter().collect();
        assert!(!low.overlaps(&high));
        assert!(low.overlaps(&SlotSet::ALL));
        let mut both = low;
        both.extend(&high);
        assert!(both.overlaps(&high) && both.contains(SlotId(64)));
    }
}
