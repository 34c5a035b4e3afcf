//! A discrete-event simulator of a plan under a workload: routing, prefill queues, hand-over of caches, decode slots,
//! batching. One seed, one result.
//!
//! Requests come to a prefill queue that a [`Policy`] chooses, are computed in order, wait in one central line for a
//! decode slot, have their cache sent over once a slot is reserved, and are generated at a speed that follows from
//! how many run beside them. Until its cache is there a request keeps its place at the prefill replica, which has few. A mixed
//! replica gives a slot before it prefills, computes all prompts that have one in turns, and runs their chunks between
//! decode steps. So does the engine (`stage::engine`), and so the router (`orchestrator::desk`); where they do otherwise,
//! `shoal bench testbed` tells. It does not know how plans are made.

mod decode;
mod engine;
mod hand_over;
mod policy;
mod report;
mod traffic;

#[cfg(test)]
mod theory;

pub use engine::simulate;
pub use policy::{DecodeView, Policy, PrefillView, RoundRobin, ShortestCount, ShortestWork};
pub use report::{ReplicaUse, Report, Served, Summary};
pub use traffic::{Request, requests};

use cluster::Role;

pub use crate::prefill::PrefillTimes;

/// A replica as the simulator sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct SimReplica {
    /// What it is used for.
    pub role: Role,
    /// Decode slots. Of a replica that only prefills, how many requests it computes or holds until they are taken over; 0 for as many
    /// as come.
    pub slots: usize,
    /// Stages, which all have something to do if as many requests run.
    pub stages: usize,
    /// Times of prompts.
    pub prefill: PrefillTimes,
    /// Seconds per token with `n` requests running, by `n`; index 0 is not used.
    pub tpot: Vec<f64>,
}

impl SimReplica {
    /// A replica with times in proportion: for tests against theory, and for emulation.
    pub fn simple(role: Role, slots: usize, seconds_per_prompt_token: f64, tpot: Vec<f64>) -> Self {
        Self::chunked(role, slots, (seconds_per_prompt_token, 1e12), tpot)
    }

    /// The same with prompts computed so many tokens at a time, between which a mixed replica decodes.
    pub fn chunked(role: Role, slots: usize, (seconds_per_token, chunk): (f64, f64), tpot: Vec<f64>) -> Self {
        Self { role, slots, stages: 1, prefill: PrefillTimes::proportional(seconds_per_token, chunk), tpot }
    }

    /// Seconds from the start of a prompt of so many tokens to its first token, if nothing else is done meanwhile.
    pub fn prompt_seconds(&self, tokens: f64) -> f64 {
        self.prefill.of(tokens).sum
    }

    pub(crate) fn decodes(&self) -> bool {
        self.role != Role::Prefill
    }

    pub(crate) fn prefills(&self) -> bool {
        self.role != Role::Decode
    }

    /// Seconds per token with `n` running.
    pub(crate) fn tpot(&self, n: usize) -> f64 {
        self.tpot[n.clamp(1, self.tpot.len() - 1)]
    }
}

/// What handing a cache over from one replica to another takes, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Handover {
    /// For each prompt token.
    pub per_token: f64,
    /// For each prompt token within the sliding window: older ones are not sent.
    pub per_token_in_window: f64,
    /// Tokens of that window.
    pub window: f64,
    /// Whatever the prompt's length.
    pub fixed: f64,
}

impl Handover {
    /// So much for each token, and so much in any case.
    pub const fn linear(per_token: f64, fixed: f64) -> Self {
        Self { per_token, per_token_in_window: 0.0, window: 0.0, fixed }
    }

    /// For a prompt of so many tokens.
    pub fn seconds(&self, tokens: f64) -> f64 {
        self.per_token * tokens + self.per_token_in_window * tokens.min(self.window) + self.fixed
    }

    fn possible(&self) -> bool {
        self.per_token.is_finite() && self.per_token_in_window.is_finite() && self.fixed.is_finite()
    }
}

/// The replicas of a plan, and what handing a cache over costs between them.
#[derive(Debug, Clone, PartialEq)]
pub struct SimCluster {
    replicas: Vec<SimReplica>,
    /// `[from][to]`.
    handover: Vec<Handover>,
    /// Whether those who hand over and take over do so between two batches.
    between_batches: bool,
}

impl SimCluster {
    /// `handover[from · replicas + to]` is what sending a cache from one to another takes.
    pub fn new(replicas: Vec<SimReplica>, handover: Vec<Handover>) -> Self {
        debug_assert_eq!(handover.len(), replicas.len() * replicas.len());
        Self { replicas, handover, between_batches: true }
    }

    /// Handing over costs nothing.
    pub fn without_handover(replicas: Vec<SimReplica>) -> Self {
        let n = replicas.len();
        Self { between_batches: false, ..Self::new(replicas, vec![Handover::default(); n * n]) }
    }

    /// Its replicas.
    pub fn replicas(&self) -> &[SimReplica] {
        &self.replicas
    }

    /// Whether a cache can be sent at all.
    pub(crate) fn connects(&self, from: usize, to: usize) -> bool {
        self.handover[from * self.replicas.len() + to].possible()
    }

    /// Whether a request that is prefilled anywhere can be decoded somewhere.
    fn can_serve(&self) -> bool {
        let has_slots = |r: usize| self.replicas[r].decodes() && self.replicas[r].slots > 0;
        let reaches =
            |from: usize| (0..self.replicas.len()).any(|to| has_slots(to) && self.connects(from, to));
        let mut prefill = (0..self.replicas.len()).filter(|&r| self.replicas[r].prefills()).peekable();
        prefill.peek().is_some() && prefill.all(|r| has_slots(r) || reaches(r))
    }

    pub(crate) fn handover_seconds(&self, from: usize, to: usize, tokens: f64) -> f64 {
        self.handover[from * self.replicas.len() + to].seconds(tokens)
    }
}

/// How far a simulation goes and what it notes down.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Stop as soon as the longest wait, with the two means below as far as they are known, is above this many seconds: the
    /// caller has something better.
    pub most: f64,
    /// What the mean time to first token counts for in that.
    pub ttft_weight: f64,
    /// What the mean time per token counts for.
    pub tpot_weight: f64,
    /// What of the first is known of every request before it comes.
    pub least_ttft: f64,
    /// What of the second.
    pub least_tpot: f64,
    /// Points in time at which queues are noted; 0 for none.
    pub samples: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            most: f64::INFINITY,
            ttft_weight: 0.0,
            tpot_weight: 0.0,
            least_ttft: 0.0,
            least_tpot: 0.0,
            samples: 0,
        }
    }
}
