//! Shoal's objective: what requests go through in the simulator. Longest wait + 0.1 · mean TTFT + 10 · mean TPOT, in
//! seconds, the mean over some seeds of the workload, with a penalty where over 5 % of requests are generated more
//! slowly than asked for. Each seed is tried as it is and with all requests a little longer: a plan at the edge of
//! congestion must not win by a lucky seed.
//!
//! Simulating is dear, so plans are tried in the order of a fluid estimate from rates alone, dropped at once where a
//! proven bound is above what is already reached, and given up in mid-run where their longest wait is.

use cluster::Role;

use super::{Objective, Rates, Score, WORST};
use crate::evaluate::Replica;
use crate::instance::{Instance, Work};
use crate::sim::{Bounds, Handover, Request, ShortestWork, SimCluster, SimReplica, Summary, simulate};

const TTFT_WEIGHT: f64 = 0.1;
const TPOT_WEIGHT: f64 = 10.0;
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

struct Trial {
    requests: Vec<Request>,
    last_arrival: f64,
    prompts: f64,
    longest_prompt: f64,
    shortest_prompt: f64,
    /// Sums of the shortest outputs, less the token that prefill makes: `[how many]`.
    shortest_outputs: Vec<f64>,
}

/// What a replica can do at most in any of the trials.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    /// Prompt tokens per second, for each trial the most.
    prompt_rate: f64,
    /// Seconds of the longest prompt, where caches are handed over; of the shortest prompt.
    longest_pass: f64,
    shortest_pass: f64,
    token_rate: f64,
    tpot: f64,
    slots: f64,
}

impl Trial {
    fn new(requests: Vec<Request>) -> Self {
        let mut outputs: Vec<f64> = requests.iter().map(|r| (r.output - 1.0).max(0.0)).collect();
        outputs.sort_by(f64::total_cmp);
        let mut sum = 0.0;
        let sums = outputs.iter().map(|output| {
            sum += output;
            sum
        });
        let prompt = |fold: fn(f64, f64) -> f64, start| requests.iter().map(|r| r.prompt).fold(start, fold);
        Self {
            last_arrival: requests.last().map_or(0.0, |r| r.at),
            prompts: requests.iter().map(|r| r.prompt).sum(),
            longest_prompt: prompt(f64::max, 0.0),
            shortest_prompt: prompt(f64::min, f64::INFINITY),
            shortest_outputs: std::iter::once(0.0).chain(sums).collect(),
            requests,
        }
    }

    /// The longest wait is never shorter: when the last request gets its slot, all but as many as there are slots are
    /// done; when the last prefill begins, all but one prompt for each replica is done.
    fn least_wait(&self, total: &Reach, prefillers: f64) -> f64 {
        let n = self.requests.len();
        let done = n.saturating_sub(total.slots as usize);
        let decoded = self.shortest_outputs[done] / total.token_rate - total.longest_pass;
        let prefilled = (self.prompts - prefillers * self.longest_prompt) / total.prompt_rate;
        (decoded.max(prefilled) - self.last_arrival).max(0.0)
    }
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
        let mut reach = Reach {
            prompt_rate: 0.0,
            longest_pass: 0.0,
            shortest_pass: f64::INFINITY,
            token_rate: 0.0,
            tpot: f64::INFINITY,
            slots: 0.0,
        };
        if replica.role != Role::Decode {
            for trial in &self.seeds {
                for request in &trial.requests {
                    let pass = replica.prefill.of(request.prompt);
                    reach.prompt_rate = reach.prompt_rate.max(request.prompt / pass.slowest);
                }
                reach.shortest_pass = reach.shortest_pass.min(replica.prefill.of(trial.shortest_prompt).sum);
                if replica.role == Role::Prefill {
                    reach.longest_pass = reach.longest_pass.max(replica.prefill.of(trial.longest_prompt).sum);
                }
            }
        }
        if replica.role != Role::Prefill {
            let rates = (1..=replica.slots).map(|n| n as f64 / replica.tpot(n));
            reach.token_rate = rates.fold(0.0, f64::max);
            reach.tpot = (1..=replica.slots).map(|n| replica.tpot(n)).fold(f64::INFINITY, f64::min);
            reach.slots = replica.slots as f64;
        }
        reach
    }

    /// No plan of replicas with this reach has a better score.
    pub(crate) fn bound(&self, replicas: &[Reach]) -> f64 {
        let mut total = Reach {
            prompt_rate: 0.0,
            longest_pass: 0.0,
            shortest_pass: f64::INFINITY,
            token_rate: 0.0,
            tpot: f64::INFINITY,
            slots: 0.0,
        };
        let mut prefillers = 0.0;
        for reach in replicas {
            total.prompt_rate += reach.prompt_rate;
            total.token_rate += reach.token_rate;
            total.slots += reach.slots;
            total.longest_pass = total.longest_pass.max(reach.longest_pass);
            total.shortest_pass = total.shortest_pass.min(reach.shortest_pass);
            total.tpot = total.tpot.min(reach.tpot);
            prefillers += f64::from(u8::from(reach.prompt_rate > 0.0));
        }
        if total.prompt_rate == 0.0 || total.token_rate == 0.0 {
            return f64::INFINITY;
        }
        let mean = self.seeds.iter().map(|trial| trial.least_wait(&total, prefillers)).sum::<f64>()
            / self.seeds.len() as f64;
        // Requests of a single token have no time per token.
        let all_long = self.seeds.iter().all(|t| t.shortest_outputs.get(1).is_some_and(|first| *first > 0.0));
        let tpot = if all_long { total.tpot } else { 0.0 };
        (mean + TTFT_WEIGHT * total.shortest_pass + TPOT_WEIGHT * tpot) * (1.0 - 1e-9)
    }

    /// The score of a plan; infinite as soon as it cannot be below `limit`.
    pub(crate) fn score(&self, inst: &Instance, replicas: &[&Replica], limit: f64) -> f64 {
        let cluster = sim_cluster(inst, replicas);
        let share = 1.0 / self.seeds.len() as f64;
        let mut score = 0.0;
        for trial in &self.seeds {
            let max_wait = (limit - score) / share;
            let bounds = Bounds { max_wait, samples: 0 };
            let Some(report) = simulate(&cluster, &trial.requests, &mut ShortestWork, bounds) else {
                return f64::INFINITY;
            };
            score += share * seconds(&report.summary(self.max_tpot));
        }
        score
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
