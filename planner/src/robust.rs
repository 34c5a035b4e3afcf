//! Plans that stay good when measurements are wrong.
//!
//! The best plans of the search, and the one the paper's model would take, are judged under device speeds, links and
//! workloads that are off by some per cent, drawn from a seed. The plan with the best 90th percentile is taken, of those
//! that are hardly ever worse than the paper's: a plan that is better nearly always and much worse at times is no
//! answer to doubt.

use std::sync::Arc;

use cluster::Plan;
use rayon::prelude::*;

use crate::evaluate::{Draft, Evaluator, Replica, replica};
use crate::instance::Instance;
use crate::objective::{Rates, Trials, by_rates, seconds};
use crate::problem::Problem;
use crate::replay::replicas_of;
use crate::rng::Rng;
use crate::search::{Ranked, Search, roles_of, serves};
use crate::settings::{ObjectiveKind, Settings, SlotRule};
use crate::sim::requests;
use crate::solve::{PlanError, Solution, drawn, plan_of, trials};
use crate::watch::{Watch, Work, show};

/// How wrong measurements may be, and how hard to look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Doubt {
    /// Device speeds are off by up to this share, each for itself.
    pub devices: f64,
    /// All links are off by up to this share.
    pub links: f64,
    /// Lengths of prompts and outputs are off by up to this share.
    pub lengths: f64,
    /// Draws that each plan is judged by.
    pub draws: usize,
    /// Plans that are judged.
    pub candidates: usize,
}

impl Default for Doubt {
    fn default() -> Self {
        // Profiles of one device differ by about 15 % between runs (design, section 8); lengths are a guess anyway.
        Self { devices: 0.15, links: 0.15, lengths: 0.10, draws: 96, candidates: 120 }
    }
}

/// The percentile that decides.
const PERCENTILE: f64 = 0.9;
/// A plan is worse than the paper's in a world if its score is over this much larger, and may be so in this share of
/// worlds.
const WORSE: f64 = 1.02;
const WORSE_AT_MOST: f64 = 0.02;

/// Plans that are judged between two looks at whether to go on.
const ABREAST: usize = 8;

/// One way in which the world may differ from what was measured.
struct World {
    inst: Instance,
    trials: Trials,
}

/// Plans for measurements in doubt. The score is the plan's 90th percentile.
pub fn solve_robust(
    problem: &Problem,
    settings: &Settings,
    doubt: &Doubt,
    watch: &dyn Watch,
) -> Result<Solution, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let (trials, drawn) = (trials(problem, settings), drawn(problem, settings));
    let evaluator = Evaluator::new(&inst, settings, roles_of(settings.objective));
    let search = Search { evaluator: &evaluator, settings, trials: &trials, keep: doubt.candidates, watch };
    let Ranked { mut plans, method, judged, cut_short } = search.run()?;
    let paper = Settings { objective: ObjectiveKind::Els, slots: SlotRule::Largest, ..settings.clone() };
    let apart = Evaluator::new(&inst, &paper, roles_of(paper.objective));
    let of_paper = Search { evaluator: &apart, settings: &paper, trials: &trials, keep: 1, watch }.run()?;
    plans.extend(of_paper.plans);
    plans.retain(|(score, _)| serves(score));
    let worlds: Vec<World> =
        (0..doubt.draws.max(1)).map(|d| world(problem, settings, &inst, (doubt, d))).collect();
    let mut scores: Vec<Vec<f64>> = Vec::with_capacity(plans.len());
    for chunk in plans.chunks(ABREAST) {
        show(watch, Work::Worlds, (scores.len(), plans.len()))?;
        let of_plan =
            |(_, draft): &(_, Draft)| worlds.iter().map(|w| score(&evaluator, settings, draft, w)).collect();
        scores.par_extend(chunk.par_iter().map(of_plan));
    }
    // The paper's plan is the last; it is never worse than itself.
    let paper = scores.last().cloned().unwrap_or_default();
    let mut ranked: Vec<(bool, f64, &Draft)> = scores
        .into_iter()
        .zip(&plans)
        .map(|(scores, (_, draft))| {
            let worse = scores.iter().zip(&paper).filter(|(score, paper)| **score > WORSE * **paper).count();
            let doubtful = worse as f64 > WORSE_AT_MOST * scores.len() as f64;
            (doubtful, percentile(scores), draft)
        })
        .collect();
    ranked.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut solutions = ranked
        .into_iter()
        .filter_map(|(_, score, draft)| Some((score, plan_of(&evaluator, settings, &drawn, draft)?)));
    let Some((score, plan)) = solutions.next() else {
        return Err(crate::diagnose::why_not(problem, settings, (&inst, watch)));
    };
    let others = solutions.take(2).collect();
    Ok(Solution { plan, score, others, bound: None, method, judged, cut_short })
}

/// What one plan gives in one world.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InDoubt {
    /// The longest wait, in seconds.
    pub max_wait: f64,
    /// `queue`'s score, which also counts TTFT, TPOT and requests that are generated too slowly.
    pub score: f64,
}

/// For each draw of what may be wrong, what each plan gives: for comparing plans.
pub fn compare_in_doubt(
    problem: &Problem,
    settings: &Settings,
    doubt: &Doubt,
    plans: &[&Plan],
) -> Result<Vec<Vec<InDoubt>>, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    // Fails here, once, if a plan is not of this problem.
    plans.iter().try_for_each(|plan| replicas_of(&inst, plan).map(drop))?;
    let draws = (0..doubt.draws).into_par_iter().map(|draw| {
        let world = world(problem, settings, &inst, (doubt, draw));
        let of = |plan: &&Plan| {
            let replicas = replicas_of(&world.inst, plan).unwrap_or_default();
            let references: Vec<&Replica> = replicas.iter().collect();
            let summary = world.trials.summary(&world.inst, &references);
            InDoubt {
                max_wait: summary.map_or(f64::INFINITY, |s| s.max_wait),
                score: summary.map_or(f64::INFINITY, |s| seconds(&s)),
            }
        };
        plans.iter().map(of).collect()
    });
    Ok(draws.collect())
}

fn world(problem: &Problem, settings: &Settings, inst: &Instance, (doubt, draw): (&Doubt, usize)) -> World {
    let mut rng = Rng::fork(settings.seed ^ 0x0D0B_7000, draw as u64);
    let mut off = |share: f64| 1.0 + rng.between(-share, share);
    let devices: Vec<f64> = inst.devices.iter().map(|_| 1.0 / off(doubt.devices)).collect();
    let mut inst = inst.perturbed(&devices, 1.0 / off(doubt.links));
    let (prompt, output) = (off(doubt.lengths), off(doubt.lengths));
    inst.work.prompt *= prompt;
    inst.work.output *= output;
    let mut workload = problem.workload.clone();
    workload.prompt.mean *= prompt;
    workload.output.mean *= output;
    // Another seed for each world: an unlucky one must not decide.
    let seed = Rng::fork(settings.seed, draw as u64).next_u64();
    let trials = Trials::new(vec![requests(&workload, seed)], inst.work.max_tpot);
    World { inst, trials }
}

/// A plan's score in a world: its layout stays, its times change.
fn score(evaluator: &Evaluator<'_>, settings: &Settings, draft: &Draft, world: &World) -> f64 {
    let Some(replicas) = evaluator.realise(draft) else { return f64::INFINITY };
    let changed: Vec<Replica> =
        replicas.iter().map(|r: &Arc<Replica>| replica(&world.inst, r.role, r.chain.clone())).collect();
    if settings.objective == ObjectiveKind::Queue {
        let references: Vec<&Replica> = changed.iter().collect();
        return world.trials.score(&world.inst, &references, (f64::INFINITY, &[]));
    }
    let work = &world.inst.work;
    let mut rates = Rates::default();
    for replica in &changed {
        let prefill =
            if replica.sim.prefills() { 1.0 / replica.sim.prefill.of(work.prompt).slowest } else { 0.0 };
        let slots = replica.chain.slots;
        let decode =
            if replica.sim.decodes() { slots as f64 / replica.sim.tpot[slots] / work.output } else { 0.0 };
        // One that does both shares its time between the phases.
        let both = prefill > 0.0 && decode > 0.0;
        let rate = if both { prefill * decode / (prefill + decode) } else { prefill + decode };
        rates.ps += if prefill > 0.0 { rate * work.prompt } else { 0.0 };
        rates.ds += if decode > 0.0 { rate * work.output } else { 0.0 };
    }
    by_rates(settings.objective).score(work, rates)[0]
}

fn percentile(mut scores: Vec<f64>) -> f64 {
    scores.sort_by(f64::total_cmp);
    let at = (scores.len() as f64 * PERCENTILE).ceil() as usize;
    scores.get(at.saturating_sub(1)).copied().unwrap_or(f64::INFINITY)
}
