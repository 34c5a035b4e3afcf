//! One workload that plans are tried with, what replicas can do at most in it, and so the score that no plan of such
//! replicas can beat. It simulates nothing.

use cluster::Role;

use super::queue::{TPOT_WEIGHT, TTFT_WEIGHT};
use crate::sim::{Request, SimReplica};

/// A workload's requests, and what is needed for bounds.
pub(super) struct Trial {
    pub requests: Vec<Request>,
    last_arrival: f64,
    prompts: f64,
    longest_prompt: f64,
    shortest_prompt: f64,
    /// Sums of the shortest prompts: `[how many]`.
    shortest_prompts: Vec<f64>,
    /// Sums of the shortest outputs, less the token that prefill makes: `[how many]`.
    shortest_outputs: Vec<f64>,
}

/// What a replica can do at most in any of the trials.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    role: Role,
    /// Prompt tokens per second, for each trial the most.
    prompt_rate: f64,
    /// Seconds of the longest prompt, where caches are handed over; of the shortest prompt.
    longest_pass: f64,
    shortest_pass: f64,
    /// Seconds to the first token, for each token of the prompt.
    pass_per_token: f64,
    token_rate: f64,
    tpot: f64,
    slots: f64,
}

/// What a plan gives at least in a trial.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Least {
    pub score: f64,
    /// The time to the first token and for each further one, of every request.
    pub ttft: f64,
    pub tpot: f64,
}

/// Bounds are compared with sums in another order.
const ROUNDING: f64 = 1e-9;

/// The reach of a plan's replicas together.
pub(super) struct Together {
    total: Reach,
    prefillers: f64,
    /// Where replicas share their time between the phases: weights of a prompt token against a generated one, and how much
    /// of that all replicas do in a second. All weights give bounds; these are the corners of the best.
    shared: Vec<(f64, f64)>,
}

impl Reach {
    const NONE: Self = Self {
        role: Role::Mixed,
        prompt_rate: 0.0,
        longest_pass: 0.0,
        shortest_pass: f64::INFINITY,
        pass_per_token: f64::INFINITY,
        token_rate: 0.0,
        tpot: f64::INFINITY,
        slots: 0.0,
    };

    pub(super) fn new(trials: &[Trial], replica: &SimReplica) -> Self {
        let mut reach = Self { role: replica.role, ..Self::NONE };
        if replica.role != Role::Decode {
            for trial in trials {
                for request in &trial.requests {
                    let pass = replica.prefill.of(request.prompt);
                    reach.prompt_rate = reach.prompt_rate.max(request.prompt / pass.slowest);
                    reach.pass_per_token = reach.pass_per_token.min(pass.sum / request.prompt);
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

    /// With a weight for prompt tokens and one for each generated token, what it does in a second.
    fn weighted(&self, weight: f64) -> f64 {
        (weight * self.prompt_rate).max(self.token_rate)
    }
}

impl Together {
    /// None if one of the phases has no replica.
    pub(super) fn new(replicas: &[Reach]) -> Option<Self> {
        let mut total = Reach::NONE;
        let mut prefillers = 0.0;
        for reach in replicas {
            total.prompt_rate += reach.prompt_rate;
            total.token_rate += reach.token_rate;
            total.slots += reach.slots;
            total.longest_pass = total.longest_pass.max(reach.longest_pass);
            total.shortest_pass = total.shortest_pass.min(reach.shortest_pass);
            total.pass_per_token = total.pass_per_token.min(reach.pass_per_token);
            total.tpot = total.tpot.min(reach.tpot);
            prefillers += f64::from(u8::from(reach.prompt_rate > 0.0));
        }
        let mixed = replicas.iter().filter(|reach| reach.role == Role::Mixed);
        let shared = mixed.map(|reach| {
            let weight = reach.token_rate / reach.prompt_rate;
            (weight, replicas.iter().map(|other| other.weighted(weight)).sum())
        });
        let shared = shared.filter(|(weight, _)| weight.is_finite()).collect();
        (total.prompt_rate > 0.0 && total.token_rate > 0.0).then_some(Self { total, prefillers, shared })
    }
}

impl Trial {
    pub(super) fn new(requests: Vec<Request>) -> Self {
        let sums = |of: &dyn Fn(&Request) -> f64| {
            let mut values: Vec<f64> = requests.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            let mut sum = 0.0;
            let sums = values.iter().map(|value| {
                sum += value;
                sum
            });
            std::iter::once(0.0).chain(sums).collect::<Vec<f64>>()
        };
        let prompt = |fold: fn(f64, f64) -> f64, start| requests.iter().map(|r| r.prompt).fold(start, fold);
        Self {
            last_arrival: requests.last().map_or(0.0, |r| r.at),
            prompts: requests.iter().map(|r| r.prompt).sum(),
            longest_prompt: prompt(f64::max, 0.0),
            shortest_prompt: prompt(f64::min, f64::INFINITY),
            shortest_prompts: sums(&|request| request.prompt),
            shortest_outputs: sums(&|request| (request.output - 1.0).max(0.0)),
            requests,
        }
    }

    /// No plan of such replicas has a better score in this trial.
    pub(super) fn least(&self, of: &Together) -> Least {
        let mean_prompt = self.prompts / self.requests.len().max(1) as f64;
        let ttft = of.total.shortest_pass.max(of.total.pass_per_token * mean_prompt);
        // Requests of a single token have no time per token.
        let all_long = self.shortest_outputs.get(1).is_some_and(|first| *first > 0.0);
        let tpot = if all_long { of.total.tpot } else { 0.0 };
        let score = (self.least_wait(of) + TTFT_WEIGHT * ttft + TPOT_WEIGHT * tpot) * (1.0 - ROUNDING);
        let of_each = |seconds: f64| seconds * (1.0 - ROUNDING);
        Least { score, ttft: of_each(of.total.shortest_pass), tpot: of_each(tpot) }
    }

    /// The longest wait is never shorter: when the last request gets its slot, all but as many as there are slots are
    /// done; when the last prefill begins, all but one prompt for each replica is done.
    fn least_wait(&self, Together { total, prefillers, shared }: &Together) -> f64 {
        let done = self.requests.len().saturating_sub(total.slots as usize);
        let (prompts, outputs) = (self.shortest_prompts[done], self.shortest_outputs[done]);
        let both = shared.iter().map(|(weight, rate)| (weight * prompts + outputs) / rate);
        let decoded = both.fold(outputs / total.token_rate, f64::max) - total.longest_pass;
        let prefilled = (self.prompts - prefillers * self.longest_prompt) / total.prompt_rate;
        (decoded.max(prefilled) - self.last_arrival).max(0.0)
    }
}
