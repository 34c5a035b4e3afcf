//! A discrete-event simulator of a plan under a workload: routing, prefill queues, hand-over of caches, decode slots,
//! batching. One seed, one result.
//!
//! Requests come to a prefill queue that a [`Policy`] chooses, are computed in order, wait in one central line for a
//! decode slot, have their cache sent over once a slot is reserved, and are generated at a speed that follows from
//! how many run beside them. A mixed replica gives a slot before it prefills, and runs prefill chunks between
//! decode steps. It does not know how plans are made.

mod decode;
mod engine;
mod policy;
mod report;
mod traffic;

#[cfg(test)]
mod theory;

pub use engine::{Bounds, simulate};
pub use policy::{DecodeView, Policy, PrefillView, RoundRobin, ShortestCount, ShortestWork};
pub use report::{ReplicaUse, Report, Served, Summary};
pub use traffic::{Request, requests};

use cluster::Role;

pub use crate::chain::PrefillTimes;

/// A replica as the simulator sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct SimReplica {
    /// What it is used for.
    pub role: Role,
    /// Decode slots.
    pub slots: usize,
    /// Times of prompts.
    pub prefill: PrefillTimes,
    /// Seconds per token with `n` requests running, by `n`; index 0 is not used.
    pub tpot: Vec<f64>,
}

impl SimReplica {
    /// A replica with times in proportion: for tests against theory, and for emulation.
    pub fn simple(role: Role, slots: usize, seconds_per_prompt_token: f64, tpot: Vec<f64>) -> Self {
        let prefill = PrefillTimes::proportional(seconds_per_prompt_token, 1e12);
        Self { role, slots, prefill, tpot }
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

/// The replicas of a plan, and what handing a cache over costs between them.
#[derive(Debug, Clone, PartialEq)]
pub struct SimCluster {
    replicas: Vec<SimReplica>,
    /// Seconds per prompt token, and fixed seconds: `[from][to]`.
    handover: Vec<(f64, f64)>,
}

impl SimCluster {
    /// `handover[from · replicas + to]` is seconds per prompt token and fixed seconds.
    pub fn new(replicas: Vec<SimReplica>, handover: Vec<(f64, f64)>) -> Self {
        debug_assert_eq!(handover.len(), replicas.len() * replicas.len());
        Self { replicas, handover }
    }

    /// Handing over costs nothing.
    pub fn without_handover(replicas: Vec<SimReplica>) -> Self {
        let n = replicas.len();
        Self::new(replicas, vec![(0.0, 0.0); n * n])
    }

    /// Its replicas.
    pub fn replicas(&self) -> &[SimReplica] {
        &self.replicas
    }

    /// Whether a cache can be sent at all.
    pub(crate) fn connects(&self, from: usize, to: usize) -> bool {
        let (per_token, fixed) = self.handover[from * self.replicas.len() + to];
        per_token.is_finite() && fixed.is_finite()
    }

    pub(crate) fn handover_seconds(&self, from: usize, to: usize, tokens: f64) -> f64 {
        let (per_token, fixed) = self.handover[from * self.replicas.len() + to];
        per_token * tokens + fixed
    }
}
