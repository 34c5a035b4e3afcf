//! The paper's adaptation of Splitwise (E2LLM, section 4.2): the strongest replicas prefill, as many as the ratio of
//! prompt to output tokens says; among groupings the congestion model of `els` decides.

use super::{Els, Objective, Rates, Score};
use crate::instance::Work;

pub(crate) struct Splitwise;

impl Objective for Splitwise {
    fn score(&self, work: &Work, rates: Rates) -> Score {
        Els.score(work, rates)
    }
}

/// How many of so many replicas prefill: `clamp(round(R · ρ / (1 + ρ)), 1, R − 1)` with ρ = NP/ND.
pub(crate) fn prefill_replicas(work: &Work, replicas: usize) -> usize {
    let ratio = work.prompt / work.output;
    let share = (replicas as f64 * ratio / (1.0 + ratio)).round() as usize;
    share.clamp(1, replicas.saturating_sub(1).max(1))
}
