//! What requests go through, in numbers that can be compared.

use planner::sim::{Bounds, Request, ShortestWork, SimCluster, Summary, simulate};
use serde::Serialize;

/// What the means count for beside the longest wait: as in the planner's objective `queue`.
const TTFT_WEIGHT: f64 = 0.1;
const TPOT_WEIGHT: f64 = 10.0;

/// Requests that may be slower than asked for before it counts; as there.
const TOLERATED: f64 = 0.05;

/// Seconds of waiting that it is worth that all requests are fast enough. The planner's penalty is larger than any wait,
/// because it may say that there is no plan; here something is always served.
const TOO_SLOW_S: f64 = 60.0;

/// What requests go through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Outlook {
    /// The longest wait.
    pub max_wait_s: f64,
    /// Mean time to the first token.
    pub ttft_s: f64,
    /// Mean time for each further one.
    pub tpot_s: f64,
    /// Share of requests generated more slowly than asked for.
    pub below_min_rate: f64,
}

impl Outlook {
    /// In seconds; lower is better.
    pub fn score(&self) -> f64 {
        self.seconds() + TOO_SLOW_S * (self.below_min_rate - TOLERATED).max(0.0)
    }

    /// The part of the score that is spent.
    pub fn seconds(&self) -> f64 {
        self.max_wait_s + TTFT_WEIGHT * self.ttft_s + TPOT_WEIGHT * self.tpot_s
    }

    /// The mean of several.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let share = 1.0 / all.len().max(1) as f64;
        all.iter().fold(Self::default(), |sum, one| Self {
            max_wait_s: sum.max_wait_s + share * one.max_wait_s,
            ttft_s: sum.ttft_s + share * one.ttft_s,
            tpot_s: sum.tpot_s + share * one.tpot_s,
            below_min_rate: sum.below_min_rate + share * one.below_min_rate,
        })
    }
}

impl From<Summary> for Outlook {
    fn from(of: Summary) -> Self {
        Self { max_wait_s: of.max_wait, ttft_s: of.ttft, tpot_s: of.tpot, below_min_rate: of.below_min_rate }
    }
}

/// What requests go through on these replicas, the mean over several lots of them; none if somebody waits longer than `most`
/// seconds, or if the replicas cannot serve. Answers should not come more slowly than one token in `max_tpot` seconds.
pub fn outlook(cluster: &SimCluster, lots: &[Vec<Request>], (most, max_tpot): (f64, f64)) -> Option<Outlook> {
    let bounds = Bounds { most: most * lots.len() as f64, ..Bounds::default() };
    let served = lots.iter().map(|requests| {
        let report = simulate(cluster, requests, &mut ShortestWork, bounds)?;
        Some(Outlook::from(report.summary(max_tpot)))
    });
    Some(Outlook::mean(&served.collect::<Option<Vec<_>>>()?))
}
