//! `prefix-affinity`: where the beginning of the prompt is held already, as long as that is not much longer a wait.
//!
//! **What.** Among the replicas whose predicted work exceeds the least by at most [`MOST_IMBALANCE_SHARE`] of it or
//! [`MOST_IMBALANCE_SECONDS`], whichever is more, the one that is believed to hold the longest prefix of the prompt; among
//! equals the one with the least work. Where nobody holds anything it is `jsq`.
//!
//! **Why.** A slot keeps the KV of what it computed last. The second turn of a chat, or the next question about one long
//! document, computes only what is new if it comes back to the same replica: seconds less until its first token.
//!
//! **When it errs.** Popular prefixes attract: a system prompt that everyone sends would lead everyone to one replica. The
//! bound is for that: affinity chooses among nearly equal replicas, and never adds more to a wait than the bound says.

use super::{Policy, ReplicaView, least};

/// Of the least predicted work: so much longer may an answer take for the sake of a prefix.
pub const MOST_IMBALANCE_SHARE: f64 = 0.25;

/// In seconds, where that is more: an idle replica's work is next to nothing, and a quarter of it is nothing at all. Half a
/// second is about what computing a few hundred tokens takes on the hosts that Shoal is for, so affinity gains what it may cost.
pub const MOST_IMBALANCE_SECONDS: f64 = 0.5;

/// The longest prefix among those with nearly the least work.
#[derive(Debug, Clone, Copy, Default)]
pub struct PrefixAffinity;

impl Policy for PrefixAffinity {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        let least_work = views.iter().map(ReplicaView::work).fold(f64::INFINITY, f64::min);
        let bound = least_work + (least_work * MOST_IMBALANCE_SHARE).max(MOST_IMBALANCE_SECONDS);
        let is_near = |view: &ReplicaView| view.work() <= bound;
        // Nearest first; false is before true.
        least(views, |view| (!is_near(view), std::cmp::Reverse(view.prefix), view.work()))
    }
}
