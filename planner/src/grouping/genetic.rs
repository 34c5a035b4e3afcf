//! The genetic search over groupings, for clusters too large for the exact one (E2LLM, algorithm 2), with what it takes
//! to be good there: groupings filled greedily as seeds, a crossover that keeps groups whole, and local search.
//!
//! Every individual of every generation has a random stream of its own, so the number of threads changes nothing.

use std::sync::Arc;

use rayon::prelude::*;

use super::local::Local;
use super::operators::{Individual, cross_groups, cross_orders, mutate};
use crate::evaluate::{Draft, DraftGroup, Evaluator, GroupOption};
use crate::objective::{Objective, Rates, Score, better, compare};
use crate::rng::Rng;
use crate::roles::{Assignment, assign};
use crate::settings::{Effort, ObjectiveKind};
use crate::watch::{Stopped, Watch, Work, show};

/// Generations without a better plan after which the search ends: more of them while they are cheap.
const PATIENCE: [usize; 2] = [30, 8];
const SMALL: usize = 24;
/// Moves of local search for each device: for a child now and then, and for the best at the end, and more at the end for
/// very large clusters.
const TOUCHES: usize = 6;
const TOUCHES_AT_MOST: usize = 150;
const POLISH: usize = 400;
const POLISH_AT_LEAST: usize = 4000;
/// Individuals of the first population between two looks at what is spent.
const ABREAST: usize = 16;
/// Share of children that local search improves.
const TOUCHED: f64 = 0.25;

/// What a search needs to judge groups.
pub(crate) struct Context<'a> {
    pub evaluator: &'a Evaluator<'a>,
    pub kind: ObjectiveKind,
    pub objective: &'a dyn Objective,
    pub seed: u64,
    pub effort: Effort,
    pub watch: &'a dyn Watch,
}

impl Context<'_> {
    /// The options of a group of devices.
    pub(crate) fn options(&self, group: &[u16]) -> Arc<[GroupOption]> {
        if group.is_empty() || group.len() > 12 {
            // No replica is a chain of more than a dozen hosts: each hop costs every token.
            return Arc::from([]);
        }
        self.evaluator.options(&self.classes(group))
    }

    fn classes(&self, group: &[u16]) -> Vec<u16> {
        let class_of = &self.evaluator.inst().class_of;
        let mut classes: Vec<u16> = group.iter().map(|&d| class_of[usize::from(d)] as u16).collect();
        classes.sort_unstable();
        classes
    }

    /// Whether two devices are of different classes.
    pub(crate) fn differ(&self, a: u16, b: u16) -> bool {
        let class_of = &self.evaluator.inst().class_of;
        class_of[usize::from(a)] != class_of[usize::from(b)]
    }

    pub(crate) fn assign(&self, options: &[Arc<[GroupOption]>]) -> (Assignment, Score) {
        let slices: Vec<&[GroupOption]> = options.iter().map(|o| &**o).collect();
        assign(self.kind, self.objective, &self.evaluator.inst().work, &slices)
    }

    pub(crate) fn score(&self, rates: Rates) -> Score {
        self.objective.score(&self.evaluator.inst().work, rates)
    }

    /// Whether half of what may be spent on laying out groups is.
    fn is_half_spent(&self) -> bool {
        self.evaluator.spent() > self.effort.layout_steps / 2
    }

    fn draft(&self, groups: &[Vec<u16>]) -> Draft {
        let options: Vec<_> = groups.iter().map(|group| self.options(group)).collect();
        let (chosen, _) = self.assign(&options);
        let used = groups.iter().zip(&options).zip(chosen).filter_map(|((group, options), chosen)| {
            let option = options[usize::from(chosen?)];
            Some(DraftGroup { classes: self.classes(group).into(), option })
        });
        used.collect()
    }
}

/// A judged individual.
#[derive(Debug, Clone)]
struct Judged {
    individual: Individual,
    score: Score,
}

/// What a search found.
pub(crate) struct Found {
    /// The best plans, the best first.
    pub plans: Vec<(Score, Draft)>,
    /// Groupings that were judged.
    pub judged: u64,
    /// Generations that there were, if there was not enough left to spend for all.
    pub ended_after: Option<usize>,
}

/// Searches until nothing better is found, for so many generations at most, or until half of what may be spent on laying
/// out groups is; the rest is for the last local search.
pub(crate) fn search(context: &Context<'_>) -> Result<Found, Stopped> {
    let n = context.evaluator.inst().devices.len();
    let effort = context.effort;
    let population = effort.population.max(4);
    // The first population and the last polish count as a generation each.
    let shown = |done| show(context.watch, Work::Generations, (done, effort.generations + 2));
    shown(0)?;
    let first = first_population(context, population);
    let mut judged = first.len() as u64;
    let mut pool = ranked(first, population);
    let mut quiet = 0;
    let mut ended_after = None;
    for generation in 1..=effort.generations {
        shown(generation)?;
        if context.is_half_spent() {
            ended_after = Some(generation - 1);
            break;
        }
        let stream = |i: usize| Rng::fork(context.seed, (generation * population + i) as u64);
        let children = (0..population).into_par_iter().map(|i| child(context, &pool, &mut stream(i)));
        let children: Vec<Judged> = children.collect();
        judged += children.len() as u64;
        let before = pool[0].score;
        let mut next: Vec<Judged> = pool.drain(..effort.elites.min(pool.len())).collect();
        next.extend(children);
        pool = ranked(next, population);
        quiet = if better(&pool[0].score, &before) { 0 } else { quiet + 1 };
        if quiet >= PATIENCE[usize::from(n > SMALL)] {
            break;
        }
    }
    shown(effort.generations + 1)?;
    let mut best = polished(context, &pool[..effort.elites.clamp(1, pool.len())]);
    best.extend(pool);
    let best = ranked(best, population);
    let plans = best.into_iter().map(|j| (j.score, context.draft(&j.individual.groups())));
    Ok(Found { plans: plans.collect(), judged, ended_after })
}

/// Groupings filled greedily, and every fourth at random; fewer where laying out groups is dear.
fn first_population(context: &Context<'_>, population: usize) -> Vec<Judged> {
    let n = context.evaluator.inst().devices.len();
    let individual = |i: usize| {
        let mut rng = Rng::fork(context.seed, i as u64);
        let individual =
            if i % 4 == 3 { Individual::random(n, &mut rng) } else { greedy(context, i, &mut rng) };
        touched(context, individual, &mut rng, if i < population / 4 { touches(n) } else { 0 })
    };
    let mut all: Vec<Judged> = Vec::with_capacity(population);
    while all.len() < population && !context.is_half_spent() {
        let next = all.len()..population.min(all.len() + ABREAST);
        all.par_extend(next.into_par_iter().map(individual));
    }
    all
}

/// The best after a last local search, as long as what is left to spend allows.
fn polished(context: &Context<'_>, elites: &[Judged]) -> Vec<Judged> {
    let n = context.evaluator.inst().devices.len();
    let left = context.effort.layout_steps.saturating_sub(context.evaluator.spent());
    // About every fourth move is one, and then lays out two groups.
    let of_group = context.evaluator.work(n.div_ceil(elites[0].individual.sizes.len()));
    let affordable = left / (of_group / 2).max(1) / elites.len() as u64;
    let tries = polish(n).min(affordable as usize).max(touches(n));
    let of = |(i, judged): (usize, &Judged)| {
        let mut rng = Rng::fork(context.seed, u64::MAX - i as u64);
        touched(context, judged.individual.clone(), &mut rng, tries)
    };
    elites.par_iter().enumerate().map(of).collect()
}

fn polish(n: usize) -> usize {
    // Up to 64 devices the children's local search does most of the work.
    if n <= 64 { POLISH_AT_LEAST } else { POLISH * n }
}

fn touches(n: usize) -> usize {
    (TOUCHES * n).min(TOUCHES_AT_MOST)
}

/// By score, without twins.
fn ranked(mut pool: Vec<Judged>, keep: usize) -> Vec<Judged> {
    pool.sort_by(|a, b| compare(&a.score, &b.score));
    pool.dedup_by(|a, b| compare(&a.score, &b.score).is_eq() && a.score[0].is_finite());
    pool.truncate(keep);
    pool
}

fn child(context: &Context<'_>, pool: &[Judged], rng: &mut Rng) -> Judged {
    let (a, b) = (tournament(pool, rng), tournament(pool, rng));
    let mut individual = if rng.unit() < 0.5 {
        cross_orders(&a.individual, &b.individual, rng)
    } else {
        cross_groups(&a.individual, &b.individual, rng)
    };
    mutate(&mut individual, rng);
    let n = individual.order.len();
    let tries = if rng.unit() < TOUCHED { touches(n) } else { 0 };
    touched(context, individual, rng, tries)
}

/// The better of three; the pool is ranked.
fn tournament<'p>(pool: &'p [Judged], rng: &mut Rng) -> &'p Judged {
    let drawn = (0..3).map(|_| rng.below(pool.len())).min();
    &pool[drawn.unwrap_or(0)]
}

/// Judges an individual, after local search with so many tries.
fn touched(context: &Context<'_>, individual: Individual, rng: &mut Rng, tries: usize) -> Judged {
    let mut local = Local::new(context, individual.groups());
    if tries == 0 || context.kind == ObjectiveKind::Splitwise {
        return Judged { individual, score: local.score };
    }
    local.improve(rng, tries);
    Judged { individual: Individual::from_groups(&local.groups), score: local.score }
}

/// Closes a group as soon as it holds the model, with now and then a device more. The first few take the devices by
/// size, largest or smallest first, or in turn from both ends; others in random order.
fn greedy(context: &Context<'_>, number: usize, rng: &mut Rng) -> Individual {
    let inst = context.evaluator.inst();
    let n = inst.devices.len();
    let mut order: Vec<u16> = (0..n as u16).collect();
    rng.shuffle(&mut order);
    let size = |d: u16| inst.devices[usize::from(d)].gpu_bytes + inst.devices[usize::from(d)].cpu_bytes;
    if number < 3 {
        order.sort_by(|&a, &b| size(b).total_cmp(&size(a)).then(a.cmp(&b)));
    }
    if number == 1 {
        order.reverse();
    }
    if number == 2 {
        let ends = (0..n).map(|i| if i % 2 == 0 { order[i / 2] } else { order[n - 1 - i / 2] });
        order = ends.collect();
    }
    let more = if number < 3 { 0.0 } else { rng.between(0.0, 0.5) };
    let mut groups: Vec<Vec<u16>> = vec![Vec::new()];
    for device in order {
        let last = groups.len() - 1;
        groups[last].push(device);
        groups[last].sort_unstable();
        if !context.options(&groups[last]).is_empty() && rng.unit() >= more {
            groups.push(Vec::new());
        }
    }
    Individual::from_groups(&groups)
}
