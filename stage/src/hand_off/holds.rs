//! The slots that a master holds for other replicas, for those who are not on its inference thread.
//!
//! Whoever has pulled a slot's sequence asks whether the slot was held all along. That must not wait for the batch that runs, which may be
//! a long prompt's: so holds are listed here. They are taken off before any frame of their slot goes out, so a hold that is on the list
//! has had nothing written into its slot yet.

use std::sync::{Mutex, PoisonError};

use cluster::SlotId;

use crate::engine::RequestKey;

/// A held slot, and who holds it.
type Held = (SlotId, RequestKey);

/// The holds.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<Vec<(Held, Release)>>);

/// Whether somebody has released it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    No,
    /// The engine will hear of it.
    Yes,
}

impl Holds {
    /// These are all there are.
    pub(crate) fn are(&self, held: impl Iterator<Item = Held>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let release_of = |held: &Held| {
            all.iter().find(|(known, _)| known == held).map_or(Release::No, |(_, release)| *release)
        };
        let now: Vec<_> = held.map(|held| (held, release_of(&held))).collect();
        *all = now;
    }

    /// Whether a slot is held until now, and by nobody from now on.
    pub(crate) fn release(&self, slot: SlotId, key: RequestKey) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter_mut().find(|(held, _)| *held == (slot, key));
        found.is_some_and(|(_, release)| std::mem::replace(release, Release::Yes) == Release::No)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_released_once_and_not_after_its_end() {
        let holds = Holds::default();
        let (one, two) = ((SlotId(1), RequestKey(7)), (SlotId(2), RequestKey(8)));
        assert!(!holds.release(one.0, one.1), "nothing is held");
        holds.are([one, two].into_iter());
        assert!(!holds.release(one.0, two.1), "another's hold");
        assert!(holds.release(one.0, one.1));
        // The engine has not heard of it yet.
        holds.are([one, two].into_iter());
        assert!(!holds.release(one.0, one.1), "once only");
        holds.are([one].into_iter());
        assert!(!holds.release(two.0, two.1), "it has ended");
    }
}
