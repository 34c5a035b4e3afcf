//! From a problem to a plan.

use std::sync::Arc;

use cluster::{
    DeviceId, LayerRange, Limit, Millis, Plan, Prediction, ReplicaPlan, Role, StagePlan, TokensPerSecond,
};
use thiserror::Error;

use crate::bound;
use crate::chain::{Chain, forward_hops};
use crate::diagnose::{self, NoFit};
use crate::evaluate::{Draft, Evaluator, Replica};
use crate::instance::Instance;
use crate::objective::{Trials, by_rates};
use crate::problem::{Problem, ProblemError};
use crate::search::{CutShort, Method, Ranked, Search, roles_of, serves};
use crate::settings::{ObjectiveKind, Settings};
use crate::sim::{Request, Summary, requests};
use crate::table::in_short;
use crate::watch::{Stopped, Unwatched, Watch};

/// Plans that are kept beside the best, so that it can be said how much better it is.
const KEPT: usize = 3;
const KEPT_OF_BROKEN: usize = 300;

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// The best plan.
    pub plan: Plan,
    /// Its score, lower is better, in the objective's own seconds.
    pub score: f64,
    /// The next best, with their scores.
    pub others: Vec<(f64, Plan)>,
    /// A score that no plan can beat, however it is made, where the objective allows such a bound.
    pub bound: Option<f64>,
    /// How it was found.
    pub method: Method,
    /// Plans or groupings that were judged on the way.
    pub judged: u64,
    /// What the search left undone, if it had to.
    pub cut_short: Vec<CutShort>,
}

impl Solution {
    /// The best plan that is another one, its score, and by which share of the best score it is worse.
    pub fn next_best(&self) -> Option<(&Plan, f64, f64)> {
        let (score, plan) = self.others.iter().find(|(_, plan)| in_short(plan) != in_short(&self.plan))?;
        let worse_by = if self.score > 0.0 { score / self.score - 1.0 } else { 0.0 };
        Some((plan, *score, worse_by))
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PlanError {
    /// The problem itself is wrong.
    #[error("the problem cannot be planned: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Problem(Vec<ProblemError>),
    /// The model does not fit.
    #[error("{0}")]
    NoFit(Box<NoFit>),
    /// It fits, but no replica is fast enough.
    #[error(
        "no replica generates {asked:.1} tok/s for even one request; the fastest gives {best:.1} tok/s (on {}): ask for \
         less, or add a faster device", on.iter().map(|d| d.0.as_str()).collect::<Vec<_>>().join(", ")
    )]
    TooSlow {
        /// The speed asked for, in tokens per second.
        asked: f64,
        /// The best there is.
        best: f64,
        /// The devices that give it.
        on: Vec<DeviceId>,
    },
    /// A given plan does not match the problem.
    #[error("the plan does not match the cluster: {0}")]
    Mismatch(String),
    /// Whoever watches the search has ended it.
    #[error("planning was stopped")]
    Stopped,
}

impl From<Stopped> for PlanError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// Plans. The same problem and settings give the same plan, on any number of threads.
pub fn solve(problem: &Problem, settings: &Settings) -> Result<Solution, PlanError> {
    solve_watched(problem, settings, &Unwatched)
}

/// [`solve`], telling how far it is.
pub fn solve_watched(
    problem: &Problem,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<Solution, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let (trials, drawn) = (trials(problem, settings), drawn(problem, settings));
    let evaluator = Evaluator::new(&inst, settings, roles_of(settings.objective));
    // Rates know nothing of links between replicas, so where some are missing a plan further down may be the first that
    // can hand caches over.
    let keep = if inst.some_cannot_talk() { KEPT_OF_BROKEN } else { KEPT };
    let search = Search { evaluator: &evaluator, settings, trials: &trials, keep, watch };
    let ranked = search.run()?;
    let plans = ranked.plans.iter().filter(|(score, _)| serves(score));
    let mut plans =
        plans.filter_map(|(score, draft)| Some((score[0], plan_of(&evaluator, settings, &drawn, draft)?)));
    let Some((score, plan)) = plans.next() else {
        return Err(diagnose::why_not(problem, settings, (&inst, watch)));
    };
    let others = plans.take(KEPT - 1).collect();
    let bound = bound_of(&inst, settings);
    let Ranked { method, judged, cut_short, .. } = ranked;
    Ok(Solution { plan, score, others, bound, method, judged, cut_short })
}

/// The paper's objectives look at rates alone, for which there is a bound.
fn bound_of(inst: &Instance, settings: &Settings) -> Option<f64> {
    let of_rates = settings.objective != ObjectiveKind::Queue;
    of_rates.then(|| bound::bound(inst, by_rates(settings.objective)))
}

/// What plans are tried with.
pub(crate) fn trials(problem: &Problem, settings: &Settings) -> Trials {
    Trials::with_margin(seeds(problem, settings), 1.0 / problem.workload.min_rate.0)
}

/// What plans are described with: the workload's requests for each seed, as they are.
pub(crate) fn drawn(problem: &Problem, settings: &Settings) -> Trials {
    Trials::new(seeds(problem, settings), 1.0 / problem.workload.min_rate.0)
}

fn seeds(problem: &Problem, settings: &Settings) -> Vec<Vec<Request>> {
    settings.simulated_seeds.iter().map(|&seed| requests(&problem.workload, seed)).collect()
}

/// A draft in the cluster's nouns.
pub(crate) fn plan_of(
    evaluator: &Evaluator<'_>,
    settings: &Settings,
    trials: &Trials,
    draft: &Draft,
) -> Option<Plan> {
    let mut replicas = evaluator.realise(draft)?;
    replicas.sort_by(|a, b| (a.role, &a.chain.devices).cmp(&(b.role, &b.chain.devices)));
    let inst = evaluator.inst();
    let references: Vec<&Replica> = replicas.iter().map(Arc::as_ref).collect();
    let used = |d: &usize| replicas.iter().any(|r| r.chain.devices.contains(d));
    Some(Plan {
        objective: settings.objective.name().to_owned(),
        prediction: prediction(&trials.summary(inst, &references)?),
        idle: (0..inst.devices.len()).filter(|d| !used(d)).map(|d| inst.names[d].clone()).collect(),
        replicas: replicas.iter().map(|r| replica_plan(inst, r)).collect(),
    })
}

pub(crate) fn prediction(summary: &Summary) -> Prediction {
    let millis = |seconds: f64| Millis(seconds * 1e3);
    Prediction {
        ttft: millis(summary.ttft),
        tpot: millis(summary.tpot),
        wait: millis(summary.wait),
        max_wait: millis(summary.max_wait),
        below_min_rate: summary.below_min_rate,
    }
}

fn replica_plan(inst: &Instance, replica: &Replica) -> ReplicaPlan {
    let chain = &replica.chain;
    let tpot = if replica.role == Role::Prefill { 0.0 } else { replica.sim.tpot[chain.slots] };
    let prompt = replica.sim.prefill.of(inst.work.prompt).slowest;
    let loads = loads(inst, replica);
    let stages = chain.ranges().into_iter().enumerate().filter_map(|(place, (start, end))| {
        Some(StagePlan {
            device: inst.names[chain.devices[place]].clone(),
            layers: LayerRange::new(start as u32, end as u32).ok()?,
            gpu_blocks: chain.blocks[place].0,
            encoding: chain.encoding,
            load: loads[place],
        })
    });
    ReplicaPlan {
        role: replica.role,
        stages: stages.collect(),
        slots: chain.slots as u32,
        prefill_rate: TokensPerSecond(if replica.role == Role::Decode {
            0.0
        } else {
            inst.work.prompt / prompt
        }),
        decode_rate: TokensPerSecond(if tpot > 0.0 { chain.slots as f64 / tpot } else { 0.0 }),
        tpot: Millis(tpot * 1e3),
        limit: limit(inst, replica, &loads),
    }
}

/// Rows of a micro-batch and their number, with all slots busy.
fn micro_batches(inst: &Instance, chain: &Chain) -> (usize, usize) {
    let (_, g) = chain.time_per_token(inst, chain.slots);
    (if inst.serial { 1 } else { chain.slots.div_ceil(g) }, g)
}

/// Share of the time in which each stage computes, with all slots or the prefill pipeline busy.
fn loads(inst: &Instance, replica: &Replica) -> Vec<f64> {
    let chain = &replica.chain;
    if replica.role == Role::Prefill {
        let stages: Vec<f64> = (0..chain.len()).map(|place| chain.prefill_stage(inst, place)).collect();
        let links = forward_hops(inst, &chain.devices, chain.encoding, inst.work.prompt);
        let slowest = stages.iter().copied().fold(links.slowest, f64::max);
        return stages.into_iter().map(|seconds| seconds / slowest).collect();
    }
    let (rows, g) = micro_batches(inst, chain);
    let tpot = replica.sim.tpot[chain.slots];
    (0..chain.len()).map(|place| g as f64 * chain.decode_stage(inst, place, rows) / tpot).collect()
}

/// What keeps a replica from being faster or larger.
fn limit(inst: &Instance, replica: &Replica, loads: &[f64]) -> Limit {
    let chain = &replica.chain;
    let slowest = (0..loads.len()).fold(0, |a, b| if loads[b] > loads[a] { b } else { a });
    if replica.role != Role::Prefill {
        if chain.slots >= inst.work.max_slots {
            return Limit::SlotCap;
        }
        let per_slot = replica.sim.tpot[chain.slots] / chain.slots as f64;
        let one_more = replica.sim.tpot[chain.slots] + per_slot;
        if one_more > inst.work.max_tpot && loads[slowest] > 0.9 {
            return Limit::Qos;
        }
        if !diagnose::holds(inst, replica, chain.slots + 1) {
            return Limit::Memory;
        }
    }
    let rows = if replica.role == Role::Prefill { inst.work.prompt } else { 1.0 };
    let hops = forward_hops(inst, &chain.devices, chain.encoding, rows);
    let (_, g) = if replica.role == Role::Prefill { (0, 1) } else { micro_batches(inst, chain) };
    let busy = if replica.role == Role::Prefill {
        replica.sim.prefill.of(inst.work.prompt).slowest
    } else {
        replica.sim.tpot[chain.slots] / g as f64
    };
    if hops.slowest > 0.0 && hops.slowest >= busy * loads[slowest] * (1.0 - 1e-9) {
        let link = |place: usize| inst.link(chain.devices[place], chain.devices[place + 1]).0;
        let at = (0..chain.len() - 1).fold(0, |a, b| if link(b) > link(a) { b } else { a });
        return Limit::Link(at as u32);
    }
    Limit::Stage(slowest as u32)
}
