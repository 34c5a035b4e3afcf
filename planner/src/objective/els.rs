//! The paper's congestion model (E2LLM, section 3.3): how much longer a request takes in the slower phase than the time
//! to the next one, with rates summed over replicas.
//!
//! All plans that keep up have w = 0; among them the one with the faster prefill is taken, since that is what a request
//! still waits for, then the one with the faster decode.

use super::{Objective, Rates, Score, WORST};
use crate::instance::Work;

pub(crate) struct Els;

impl Objective for Els {
    fn score(&self, work: &Work, rates: Rates) -> Score {
        if !(rates.ps > 0.0 && rates.ds > 0.0) {
            return WORST;
        }
        let (prefill, decode) = (work.prompt / rates.ps, work.output / rates.ds);
        let bottleneck = prefill.max(decode) - work.interval;
        let w = if bottleneck > 0.0 { prefill + bottleneck } else { 0.0 };
        [w, prefill, decode]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_that_keep_up_do_not_wait() {
        let work = Work {
            prompt: 500.0,
            output: 700.0,
            interval: 1.0,
            requests: 100.0,
            max_tpot: 0.2,
            max_slots: 32,
        };
        let score = |ps, ds| Els.score(&work, Rates { ps, ds, slots: 1.0 });
        assert_eq!(score(1000.0, 1000.0)[0], 0.0);
        // Decode is the bottleneck: 7 s for a request each second, after half a second of prefill.
        assert_eq!(score(1000.0, 100.0)[0], 6.5);
        assert_eq!(score(0.0, 100.0), WORST);
    }
}
