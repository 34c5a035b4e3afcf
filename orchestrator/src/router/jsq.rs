//! `jsq`: join the shortest queue, measured in predicted work. The default.
//!
//! **What.** Of each replica: the seconds before a new request would start, plus its own prefill, plus its own generation
//! beside those that run there. The least wins; where two promise the same, as fresh ones of one kind do, the one with more
//! of its slots free, and then the first.
//!
//! **Why.** Waits are made of seconds. A queue of two long prompts is longer than one of five short ones, four waiting requests
//! are few for a replica of eight slots and many for one of two, and a fast replica may deserve a request although a slow one
//! is idle. Predicted seconds put all of this on one scale.
//!
//! **When it errs.** Output lengths are not known beforehand: the mean of late stands for each. A replica that got long
//! answers looks shorter than it is until it stops finishing requests. And rates are believed until enough was observed, so of
//! the very first requests some may go to the slower replica.

use super::{Policy, ReplicaView, least};

/// The least predicted work, the request's own included.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestWork;

impl Policy for ShortestWork {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        least(views, |view| (view.work(), share_held(view)))
    }
}

/// Share of its slots that are taken.
fn share_held(view: &ReplicaView) -> f64 {
    view.held as f64 / view.slots.max(1) as f64
}
