//! `round-robin`: one after the other.
//!
//! **What.** The replica with the next higher number after the one that was chosen last; after the highest the lowest. Replicas
//! that cannot serve are passed over, and the order of the others stays.
//!
//! **Why.** Nothing is easier to foretell: for debugging, for measuring replicas against each other, and as the baseline that
//! every other policy has to beat.
//!
//! **When it errs.** It gives a slow replica as much as a fast one, so with unequal replicas the slow one's line grows
//! without end while the fast one is idle.

use super::{Policy, ReplicaView};

/// Each in turn.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundRobin {
    /// The lowest number that is due.
    due: usize,
}

impl Policy for RoundRobin {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        let chosen = views.iter().position(|view| view.replica >= self.due).unwrap_or(0);
        self.due = views[chosen].replica + 1;
        chosen
    }
}
