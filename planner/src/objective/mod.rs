//! What makes a plan good, one file for each opinion.

mod els;
mod ft;
mod queue;
mod splitwise;
mod trial;

pub(crate) use els::Els;
pub(crate) use ft::Ft;
pub(crate) use queue::{Queue, Trials, seconds, sim_cluster};
pub(crate) use splitwise::{Splitwise, prefill_replicas};
pub(crate) use trial::{Least, Reach};

use crate::instance::Work;
use crate::settings::ObjectiveKind;

/// Lower is better; the first number that differs decides.
pub(crate) type Score = [f64; 3];

/// The score of a plan that serves nothing.
pub(crate) const WORST: Score = [f64::INFINITY; 3];

/// Numbers closer than this, relatively, are equal: rates are sums in varying order.
const EQUAL: f64 = 1e-9;

/// Whether one score is better than another.
pub(crate) fn better(a: &Score, b: &Score) -> bool {
    compare(a, b).is_lt()
}

/// Order of scores, better first.
pub(crate) fn compare(a: &Score, b: &Score) -> std::cmp::Ordering {
    let near = |x: f64, y: f64| x == y || (x - y).abs() <= EQUAL * x.abs().min(y.abs());
    let differing = a.iter().zip(b).find(|(x, y)| !near(**x, **y));
    differing.map_or(std::cmp::Ordering::Equal, |(x, y)| x.total_cmp(y))
}

/// Rates of a whole plan.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Rates {
    /// Prompt tokens per second.
    pub ps: f64,
    /// Generated tokens per second.
    pub ds: f64,
    /// Decode slots.
    pub slots: f64,
}

/// An opinion about rates. It must not prefer less of either rate: the exact search drops what is dominated.
pub(crate) trait Objective: Sync {
    /// How good a plan with these rates is.
    fn score(&self, work: &Work, rates: Rates) -> Score;
}

/// The objective by which a search on rates alone is led.
pub(crate) fn by_rates(kind: ObjectiveKind) -> &'static dyn Objective {
    match kind {
        ObjectiveKind::Els => &Els,
        ObjectiveKind::Ft => &Ft,
        ObjectiveKind::Splitwise => &Splitwise,
        ObjectiveKind::Queue => &Queue,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_objective_prefers_less_of_a_rate() {
        let mut rng = crate::rng::Rng::new(3);
        for _ in 0..2000 {
            let work = Work {
                prompt: rng.between(1.0, 3000.0),
                output: rng.between(1.0, 3000.0),
                interval: rng.between(0.01, 10.0),
                requests: 100.0,
                max_tpot: 0.2,
                max_slots: 32,
            };
            let less = Rates { ps: rng.between(1.0, 3000.0), ds: rng.between(1.0, 500.0), slots: 10.0 };
            let more =
                Rates { ps: less.ps * rng.between(1.0, 2.0), ds: less.ds * rng.between(1.0, 2.0), ..less };
            for kind in ObjectiveKind::ALL {
                let objective = by_rates(kind);
                let (more, less) = (objective.score(&work, more), objective.score(&work, less));
                assert!(!better(&less, &more), "{kind:?}: {less:?} is better than {more:?}");
            }
        }
    }
}
