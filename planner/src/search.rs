//! Picks the search that fits a problem's size and objective, and ranks the plans it finds.

use std::fmt;
use std::sync::Arc;

use cluster::Role;
use rayon::prelude::*;

use crate::evaluate::{Draft, DraftGroup, Evaluator, GroupOption, Replica, Roles, totals};
use crate::grouping::enumerate::{Choice, Listing, Plans, all};
use crate::grouping::fronts::Fronts;
use crate::grouping::genetic::{self, Context, Found};
use crate::grouping::states::{States, affordable};
use crate::instance::Instance;
use crate::objective::{Least, Objective, Rates, Reach, Score, Trials, better, by_rates, compare};
use crate::roles::assign;
use crate::settings::{ObjectiveKind, Settings};
use crate::watch::{Stopped, Watch, Work, show};

/// Plans that are simulated side by side between two looks at what is best: fixed, so that the number of threads does
/// not change what is given up.
const ABREAST: usize = 32;
/// Up to so many devices, every plan that a bound does not rule out is simulated, however many there are.
const SIMULATE_ALL: usize = 7;

/// How a plan was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// No plan is better.
    Exact,
    /// The best by simulation of the most promising plans.
    Simulated,
    /// The best that a bounded search found.
    Genetic,
}

/// Plans, the best first.
pub(crate) struct Ranked {
    pub plans: Vec<(Score, Draft)>,
    pub method: Method,
    /// Plans, or groupings, that were judged.
    pub judged: u64,
    pub cut_short: Vec<CutShort>,
}

/// What a search left undone since it would have taken too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutShort {
    /// Only the first of the plans that might be better were simulated.
    Simulations {
        /// Plans that were.
        done: usize,
        /// Plans that were not.
        left: usize,
    },
    /// There are more plans than are looked at one by one: only those with the best rates were.
    Plans {
        /// The most that are.
        most: usize,
    },
    /// The genetic search ended before its time, since laying groups out takes long for a model with blocks that differ.
    Generations {
        /// Generations that there were.
        done: usize,
        /// Generations that there would have been.
        of: usize,
    },
}

impl fmt::Display for CutShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simulations { done, left } => {
                write!(
                    f,
                    "{left} plans that might be better were not simulated, after the {done} most promising"
                )
            }
            Self::Plans { most } => {
                write!(f, "there are more than {most} plans: only those with the best rates were simulated")
            }
            Self::Generations { done, of } => {
                write!(f, "the search ended after {done} of {of} generations, as the model's blocks differ")
            }
        }
    }
}

pub(crate) struct Search<'a> {
    pub evaluator: &'a Evaluator<'a>,
    pub settings: &'a Settings,
    pub trials: &'a Trials,
    /// Plans to return where there are so many.
    pub keep: usize,
    pub watch: &'a dyn Watch,
}

/// The roles that an objective plans with: the paper's have prefill and decode apart.
pub(crate) fn roles_of(kind: ObjectiveKind) -> Roles {
    if kind == ObjectiveKind::Queue { Roles::AlsoMixed } else { Roles::Apart }
}

impl Search<'_> {
    pub(crate) fn run(&self) -> Result<Ranked, Stopped> {
        if !affordable(self.evaluator, &self.settings.effort) {
            return self.genetic();
        }
        let states = States::new(self.evaluator, self.watch)?;
        let found = match self.settings.objective {
            ObjectiveKind::Els | ObjectiveKind::Ft => Some(self.on_front(&states)?),
            ObjectiveKind::Splitwise => self.strongest_prefill(&states),
            ObjectiveKind::Queue => Some(self.simulated(&states)?),
        };
        let mut ranked = match found {
            Some(ranked) => ranked,
            None => self.genetic()?,
        };
        if !ranked.plans.first().is_some_and(|best| best.0[0].is_finite()) {
            self.single_mixed(&states, &mut ranked);
        }
        Ok(ranked)
    }

    fn inst(&self) -> &Instance {
        self.evaluator.inst()
    }

    fn objective(&self) -> &'static dyn Objective {
        by_rates(self.settings.objective)
    }

    fn score(&self, draft: &[DraftGroup]) -> Score {
        let (ps, ds) = totals(draft);
        let slots =
            draft.iter().filter(|g| g.option.role != Role::Prefill).map(|g| f64::from(g.option.slots)).sum();
        self.objective().score(&self.inst().work, Rates { ps, ds, slots })
    }

    /// Objectives on rates have their best plan on the front.
    fn on_front(&self, states: &States) -> Result<Ranked, Stopped> {
        let fronts = Fronts::new(states, self.watch)?;
        let drafts = fronts.last().iter().map(|point| fronts.draft(states, point));
        let plans = drafts.map(|draft| (self.score(&draft), draft)).collect();
        let (judged, plans) = (fronts.last().len() as u64, self.ranked(plans));
        Ok(Ranked { judged, plans, method: Method::Exact, cut_short: Vec::new() })
    }

    /// Splitwise's roles follow from the grouping, so every grouping is looked at, if there are not too many.
    fn strongest_prefill(&self, states: &States) -> Option<Ranked> {
        let listed = all(states, Listing::Groupings, self.settings.effort.enumerated_plans)?;
        let work = &self.inst().work;
        let judge = |index: usize| {
            let options: Vec<&[GroupOption]> =
                listed.get(index).iter().map(|&(group, _)| &*states.options[group as usize]).collect();
            let (chosen, score) = assign(ObjectiveKind::Splitwise, self.objective(), work, &options);
            (score, index, chosen)
        };
        let mut judged: Vec<_> = (0..listed.len()).into_par_iter().map(judge).collect();
        judged.sort_by(|a, b| compare(&a.0, &b.0));
        judged.truncate(self.keep);
        let plans = judged.into_iter().map(|(score, index, chosen)| {
            let groups = listed.get(index).iter().zip(chosen);
            (
                score,
                groups.filter_map(|(&(group, _), option)| option.map(|o| states.group(group, o))).collect(),
            )
        });
        let (plans, judged) = (plans.collect(), listed.len() as u64);
        Some(Ranked { plans, method: Method::Exact, judged, cut_short: Vec::new() })
    }

    /// Every plan is simulated that a bound does not rule out; where there are too many, the most promising after those on
    /// the front of rates, among which are the best plans of the paper's objectives.
    fn simulated(&self, states: &States) -> Result<Ranked, Stopped> {
        let listed = all(states, Listing::Options, self.settings.effort.enumerated_plans);
        let front = if listed.is_some() && self.simulates_all() {
            Vec::new()
        } else {
            let fronts = Fronts::new(states, self.watch)?;
            fronts.last().iter().map(|point| fronts.draft(states, point)).collect()
        };
        let mut judged = front.len() as u64;
        let mut best = self.simulate_best(front)?;
        let cut_short = match &listed {
            Some(listed) => {
                judged += listed.len() as u64;
                self.branch_and_bound(states, listed, &mut best)?
            }
            None => Some(CutShort::Plans { most: self.settings.effort.enumerated_plans }),
        };
        let method = if cut_short.is_none() { Method::Exact } else { Method::Simulated };
        let plans = best.entries.into_iter().map(|(score, draft)| ([score, 0.0, 0.0], draft));
        Ok(Ranked { plans: plans.collect(), method, judged, cut_short: cut_short.into_iter().collect() })
    }

    /// Whether the cluster is so small that no number of plans is too many.
    fn simulates_all(&self) -> bool {
        self.inst().devices.len() <= SIMULATE_ALL
    }

    /// Simulates the best plans by the fluid estimate and ranks them by what came out.
    fn simulate_best(&self, drafts: Vec<Draft>) -> Result<Best, Stopped> {
        let mut estimated: Vec<(Score, Draft)> =
            drafts.into_iter().filter(|d| !d.is_empty()).map(|draft| (self.score(&draft), draft)).collect();
        estimated.sort_by(|a, b| compare(&a.0, &b.0));
        estimated.truncate(self.settings.effort.simulated_plans);
        let mut best = Best::new(self.keep);
        for chunk in (0..estimated.len()).collect::<Vec<_>>().chunks(ABREAST) {
            show(self.watch, Work::Simulations, (chunk[0], estimated.len()))?;
            let limit = best.limit();
            let score = |&i: &usize| self.simulate(&estimated[i].1, (limit, &[]));
            let scores: Vec<f64> = chunk.par_iter().map(score).collect();
            chunk.iter().zip(scores).for_each(|(&i, score)| best.insert(score, &estimated[i].1));
        }
        Ok(best)
    }

    /// Simulates listed plans in the order of an estimate, but for those that a bound says cannot be among the best, and
    /// for those that are too many.
    fn branch_and_bound(
        &self,
        states: &States,
        listed: &Plans,
        best: &mut Best,
    ) -> Result<Option<CutShort>, Stopped> {
        let reaches = self.reaches(states);
        let work = &self.inst().work;
        let least = |plan: &[Choice]| -> Option<Vec<Least>> {
            let reach = plan.iter().map(|&(group, option)| reaches[group as usize][usize::from(option)]);
            self.trials.least(&reach.collect::<Option<Vec<Reach>>>()?)
        };
        let estimate = |index: usize| -> Option<(f64, f64, u32)> {
            let plan = listed.get(index);
            let of_trials = least(plan)?;
            let bound = of_trials.iter().map(|least| least.score).sum::<f64>() / of_trials.len() as f64;
            // The fluid estimate knows what waits, the bound what an idle cluster gives.
            let fluid = self.objective().score(work, rates_of(states, plan))[0];
            bound.is_finite().then_some((fluid + bound, bound, index as u32))
        };
        let mut order: Vec<(f64, f64, u32)> =
            (0..listed.len()).into_par_iter().with_min_len(256).filter_map(estimate).collect();
        order.par_sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
        let most = self.settings.effort.simulated_plans.min(order.len());
        let total = if self.simulates_all() { order.len() } else { most };
        let mut done = 0;
        let mut next = order.iter();
        loop {
            show(self.watch, Work::Simulations, (done, total))?;
            let limit = best.limit();
            let chunk: Vec<usize> =
                next.by_ref().filter(|o| o.1 < limit).take(ABREAST).map(|o| o.2 as usize).collect();
            if chunk.is_empty() {
                return Ok(None);
            }
            if done + chunk.len() > total {
                let left = chunk.len() + next.filter(|o| o.1 < limit).count();
                return Ok(Some(CutShort::Simulations { done, left }));
            }
            done += chunk.len();
            let simulate = |&i: &usize| {
                let least = least(listed.get(i)).unwrap_or_default();
                self.simulate(&draft_of(states, listed.get(i)), (limit, &least))
            };
            let scores: Vec<f64> = chunk.par_iter().map(simulate).collect();
            for (&i, score) in chunk.iter().zip(scores) {
                if score < best.limit() {
                    best.insert(score, &draft_of(states, listed.get(i)));
                }
            }
        }
    }

    /// What each option of each group can do at most.
    fn reaches(&self, states: &States) -> Vec<Vec<Option<Reach>>> {
        let of_state = |state: u32| {
            let devices = self.evaluator.representatives(&states.classes(state));
            let options = states.options[state as usize].iter();
            let reach = |option: &GroupOption| {
                self.evaluator.replica(&devices, option.role, option.rule).map(|r| self.trials.reach(&r.sim))
            };
            options.map(reach).collect()
        };
        (0..states.options.len() as u32).into_par_iter().map(of_state).collect()
    }

    /// The simulated score of a plan, infinite where it is not below the limit; with it what each trial gives at least.
    pub(crate) fn simulate(&self, draft: &[DraftGroup], limit: (f64, &[Least])) -> f64 {
        let Some(replicas) = self.evaluator.realise(draft) else { return f64::INFINITY };
        let replicas: Vec<&Replica> = replicas.iter().map(Arc::as_ref).collect();
        self.trials.score(self.inst(), &replicas, limit)
    }

    fn genetic(&self) -> Result<Ranked, Stopped> {
        let context = Context {
            evaluator: self.evaluator,
            kind: self.settings.objective,
            objective: self.objective(),
            seed: self.settings.seed,
            effort: self.settings.effort,
            watch: self.watch,
        };
        let Found { plans, judged, ended_after } = genetic::search(&context)?;
        let of = self.settings.effort.generations;
        let cut_short = ended_after.map(|done| CutShort::Generations { done, of }).into_iter().collect();
        let mut plans = self.ranked(plans);
        if self.settings.objective == ObjectiveKind::Queue {
            let best = self.simulate_best(plans.into_iter().map(|(_, draft)| draft).collect())?;
            plans = best.entries.into_iter().map(|(score, draft)| ([score, 0.0, 0.0], draft)).collect();
        }
        Ok(Ranked { plans, method: Method::Genetic, judged, cut_short })
    }

    /// Where only one replica fits it does both, whatever the objective.
    fn single_mixed(&self, states: &States, ranked: &mut Ranked) {
        let groups = (1..states.options.len() as u32).filter(|&s| !states.options[s as usize].is_empty());
        let plans = groups.filter_map(|state| {
            let classes = states.classes(state);
            let option = self.evaluator.mixed(&self.evaluator.representatives(&classes))?;
            let draft = vec![DraftGroup { classes: classes.into(), option }];
            Some((self.score(&draft), draft))
        });
        ranked.plans = self.ranked(plans.collect());
    }

    fn ranked(&self, mut plans: Vec<(Score, Draft)>) -> Vec<(Score, Draft)> {
        plans.sort_by(|a, b| compare(&a.0, &b.0));
        plans.truncate(self.keep);
        plans
    }
}

fn rates_of(states: &States, plan: &[Choice]) -> Rates {
    plan.iter().fold(Rates::default(), |rates, &(group, option)| {
        let of = &states.options[group as usize][usize::from(option)];
        let slots = if of.role == Role::Prefill { 0.0 } else { f64::from(of.slots) };
        Rates { ps: rates.ps + of.ps, ds: rates.ds + of.ds, slots: rates.slots + slots }
    })
}

fn draft_of(states: &States, plan: &[Choice]) -> Draft {
    plan.iter().map(|&(group, option)| states.group(group, option)).collect()
}

/// The best few of a stream of scored plans, each once; the first among equals.
struct Best {
    keep: usize,
    entries: Vec<(f64, Draft)>,
}

impl Best {
    fn new(keep: usize) -> Self {
        Self { keep: keep.max(1), entries: Vec::new() }
    }

    /// What a plan must be below to get in.
    fn limit(&self) -> f64 {
        if self.entries.len() < self.keep { f64::INFINITY } else { self.entries[self.entries.len() - 1].0 }
    }

    fn insert(&mut self, score: f64, draft: &Draft) {
        if !score.is_finite() || score >= self.limit() {
            return;
        }
        // The order of a plan's groups means nothing.
        let mut draft = draft.clone();
        let key = |group: &DraftGroup| (group.classes.clone(), group.option.role, group.option.slots);
        draft.sort_by_key(key);
        if self.entries.iter().any(|entry| entry.1 == draft) {
            return;
        }
        let at = self.entries.partition_point(|entry| entry.0 <= score);
        self.entries.insert(at, (score, draft));
        self.entries.truncate(self.keep);
    }
}

/// Whether a score is of a plan that serves anything.
pub(crate) fn serves(score: &Score) -> bool {
    better(score, &[f64::MAX; 3])
}
