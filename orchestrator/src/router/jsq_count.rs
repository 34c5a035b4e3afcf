//! `jsq-count`: join the shortest queue, by the number of requests. E2LLM's own load balancer, taken literally.
//!
//! **What.** The replica where the fewest requests wait for their prompts to be computed; among equals the one that would be
//! the quickest with this prompt.
//!
//! **Why.** It is what the paper describes and what most balancers do, so plans can be compared under it. It needs no
//! prediction: where requests are alike and replicas too, it does as well as `jsq`.
//!
//! **When it errs.** Where slots, speeds or prompts differ: a replica of two slots gets as long a line as one of eight, and
//! its line takes four times as long.

use super::{Policy, ReplicaView, least};

/// The fewest requests that wait.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestCount;

impl Policy for ShortestCount {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        least(views, |view| (view.waiting, view.service))
    }
}
