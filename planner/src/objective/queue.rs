//! Shoal's objective: what requests go through in the simulator. Longest wait + 0.1 · mean TTFT + 10 · mean TPOT, in
//! seconds, the mean over some seeds of the workload, with a penalty where over 5 % of requests are generated more
//! slowly than asked for. Each seed is tried as it is and with all requests a little longer: a plan at the edge of
//! congestion must not win by a lucky seed.
//!
//! Simulating is dear, so plans are tried in the order of a fluid estimate from rates alone, dropped at once where a
//! proven bound is above what is already reached, and given up in mid-run where their longest wait is.

use cluster::Role;

use super::trial::{Least, Reach, Together, Trial};
use super::{Objective, Rates, Score, WORST};
use crate::evaluate::Replica;
use crate::instance::{Instance, Work};
use crate::sim::{Bounds, Handover, Request, ShortestWork, SimCluster, SimReplica, Summary, simulate};

pub(super) const TTFT_WEIGHT: f64 = 0.1;
pub(super) const TPOT_WEIGHT: f64 = 10.0;
/// Requests that may be slower than asked for before it counts.
const TOLERATED: f64 = 0.05;
/// Seconds for all requests being too slow: more than any wait that is worth comparing.
const PENALTY: f64 = 1e4;

/// How much longer requests are in every second trial. Three lucky seeds at the edge of congestion differ from eight others
/// by more than a second of wait; a load 5 % higher tells such plans apart.
const LONGER: f64 = 1.05;

pub(crate) struct Queue;

impl Objective for Queue {
    /// The fluid estimate: the work that is left when the last request comes, at full rates.
    fn score(&self, work: &Work, rates: Rates) -> Score {
        if !(rates.ps > 0.0 && rates.ds > 0.0) {
            return WORST;
        }
        let arrivals = work.requests * work.interval;
        let (prefill, decode) = (work.prompt / rates.ps, work.output / rates.ds);
        let queued = (work.requests - rates.slots).max(0.0) * decode;
        let wait = (work.requests * prefill).max(queued) - arrivals;
        [wait.max(0.0) + prefill + decode, prefill, decode]
    }
}

/// The workload's requests for each seed, and what is needed for bounds.
pub(crate) struct Trials {
    seeds: Vec<Trial>,
    max_tpot: f64,
}

impl Trials {
    /// What plans are chosen by: each seed's requests, and before them the same a little longer, since they rule out
    /// more plans.
    pub(crate) fn with_margin(requests: Vec<Vec<Request>>, max_tpot: f64) -> Self {
        let longer = |of: &Vec<Request>| -> Vec<Request> {
            // A request of a single token needs no decode slot, and is not to.
            let output = |r: &Request| if r.output > 1.0 { r.output * LONGER } else { r.output };
            let lengthened = |r: &Request| Request { prompt: r.prompt * LONGER, output: output(r), ..*r };
            of.iter().map(lengthened).collect()
        };
        let all = requests.iter().map(longer).chain(requests.iter().cloned());
        Self::new(all.collect(), max_tpot)
    }

    pub(crate) fn new(requests: Vec<Vec<Request>>, max_tpot: f64) -> Self {
        Self { seeds: requests.into_iter().map(Trial::new).collect(), max_tpot }
    }

    /// What a replica can do at most.
    pub(crate) fn reach(&self, replica: &SimReplica) -> Reach {
        Reach::new(&self.seeds, replica)
    }

    /// For each trial, a score that no plan of replicas with this reach beats; none if they cannot serve.
    pub(crate) fn least(&self, replicas: &[Reach]) -> Option<Vec<Least>> {
        let together = Together::new(replicas)?;
        Some(self.seeds.iter().map(|trial| trial.least(&together)).collect())
    }

    /// The score of a plan; infinite as soon as it cannot be below `limit`, for which it helps to know what each trial
    /// gives at least.
    pub(crate) fn score(
        &self,
        inst: &Instance,
        replicas: &[&Replica],
        (limit, least): (f64, &[Least]),
    ) -> f64 {
        let cluster = sim_cluster(inst, replicas);
        let trials = self.seeds.len() as f64;
        let (mut sum, mut left) = (0.0, least.iter().map(|least| least.score).sum::<f64>());
        for (index, trial) in self.seeds.iter().enumerate() {
            let least = least.get(index).copied().unwrap_or_default();
            left -= least.score;
            let most = limit * trials - sum - left.max(0.0);
            let bounds = Bounds {
                most,
                ttft_weight: TTFT_WEIGHT,
                tpot_weight: TPOT_WEIGHT,
                least_ttft: least.ttft,
                least_tpot: least.tpot,
                samples: 0,
            };
            let Some(report) = simulate(&cluster, &trial.requests, &mut ShortestWork, bounds) else {
                return f64::INFINITY;
            };
            sum += seconds(&report.summary(self.max_tpot));
        }
        sum / trials
    }

    /// The summary of a plan, the mean over the seeds.
    pub(crate) fn summary(&self, inst: &Instance, replicas: &[&Replica]) -> Option<Summary> {
        let cluster = sim_cluster(inst, replicas);
        let mut mean = Summary::default();
        let share = 1.0 / self.seeds.len() as f64;
        for trial in &self.seeds {
            let report = simulate(&cluster, &trial.requests, &mut ShortestWork, Bounds::default())?;
            let one = report.summary(self.max_tpot);
            mean.wait += share * one.wait;
            mean.max_wait += share * one.max_wait;
            mean.ttft += share * one.ttft;
            mean.tpot += share * one.tpot;
            mean.below_min_rate += share * one.below_min_rate;
            mean.throughput += share * one.throughput;
        }
        Some(mean)
    }
}

/// One number for what requests go through.
pub(crate) fn seconds(summary: &Summary) -> f64 {
    summary.max_wait
        + TTFT_WEIGHT * summary.ttft
        + TPOT_WEIGHT * summary.tpot
        + PENALTY * (summary.below_min_rate - TOLERATED).max(0.0)
}

/// The replicas of a plan, for the simulator.
pub(crate) fn sim_cluster(inst: &Instance, replicas: &[&Replica]) -> SimCluster {
    let handover = replicas.iter().flat_map(|from| {
        replicas.iter().map(move |to| {
            let apart = from.role == Role::Prefill && to.role != Role::Prefill;
            if apart { from.chain.handover(inst, &to.chain) } else { Handover::default() }
        })
    });
    SimCluster::new(replicas.iter().map(|r| r.sim.clone()).collect(), handover.collect())
}
