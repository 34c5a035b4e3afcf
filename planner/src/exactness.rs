//! The exact searches against every plan there is, listed by other code: all ways to put devices into groups, each group
//! idle or in any of its roles.

use crate::evaluate::{Draft, DraftGroup, Evaluator, totals};
use crate::instance::Instance;
use crate::objective::{Els, Rates, Score, WORST, better, by_rates};
use crate::problem::Problem;
use crate::roles::assign;
use crate::search::{Search, roles_of};
use crate::settings::{ObjectiveKind, Settings};
use crate::solve::trials;
use crate::watch::Unwatched;

#[path = "../tests/common/mod.rs"]
pub(crate) mod common;

use common::{Detail, LinkKind, Shape, TwoKinds};

/// All groupings of `n` devices, as lists of groups.
fn groupings(n: usize) -> Vec<Vec<Vec<usize>>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for smaller in groupings(n - 1) {
        for at in 0..=smaller.len() {
            let mut grouping = smaller.clone();
            if at == smaller.len() {
                grouping.push(vec![n - 1]);
            } else {
                grouping[at].push(n - 1);
            }
            all.push(grouping);
        }
    }
    all
}

/// Every plan on a grouping.
fn plans(evaluator: &Evaluator<'_>, grouping: &[Vec<usize>]) -> Vec<Draft> {
    let mut plans = vec![Draft::new()];
    for group in grouping {
        let mut classes: Vec<u16> = group.iter().map(|&d| evaluator.inst().class_of[d] as u16).collect();
        classes.sort_unstable();
        let mut next = plans.clone();
        for option in evaluator.options(&classes).iter() {
            for plan in &plans {
                let mut plan = plan.clone();
                plan.push(DraftGroup { classes: classes.clone().into(), option: *option });
                next.push(plan);
            }
        }
        plans = next;
    }
    plans
}

fn rates(draft: &[DraftGroup]) -> Rates {
    let (ps, ds) = totals(draft);
    Rates { ps, ds, slots: 0.0 }
}

fn best_by_listing(problem: &Problem, settings: &Settings) -> Score {
    let inst = Instance::new(problem, settings).unwrap();
    let evaluator = Evaluator::new(&inst, settings, roles_of(settings.objective));
    let trials = trials(problem, settings);
    let search = Search { evaluator: &evaluator, settings, trials: &trials, keep: 1, watch: &Unwatched };
    let mut best = WORST;
    for grouping in groupings(inst.devices.len()) {
        if settings.objective == ObjectiveKind::Splitwise {
            // Any of the groups may be idle; the others take the roles of the rule.
            for used in 0..1_u32 << grouping.len() {
                let options: Vec<_> = (0..grouping.len())
                    .filter(|g| used & (1 << g) != 0)
                    .map(|g| {
                        let mut classes: Vec<u16> =
                            grouping[g].iter().map(|&d| inst.class_of[d] as u16).collect();
                        classes.sort_unstable();
                        evaluator.options(&classes)
                    })
                    .collect();
                let slices: Vec<_> = options.iter().map(|o| &**o).collect();
                let (_, score) = assign(ObjectiveKind::Splitwise, &Els, &inst.work, &slices);
                best = if better(&score, &best) { score } else { best };
            }
            continue;
        }
        for plan in plans(&evaluator, &grouping) {
            let score = match settings.objective {
                ObjectiveKind::Queue => [search.simulate(&plan, (f64::INFINITY, &[])), 0.0, 0.0],
                kind => by_rates(kind).score(&inst.work, rates(&plan)),
            };
            best = if better(&score, &best) { score } else { best };
        }
    }
    best
}

fn best_by_search(problem: &Problem, settings: &Settings) -> Score {
    let inst = Instance::new(problem, settings).unwrap();
    let evaluator = Evaluator::new(&inst, settings, roles_of(settings.objective));
    let trials = trials(problem, settings);
    let search = Search { evaluator: &evaluator, settings, trials: &trials, keep: 1, watch: &Unwatched };
    search.run().unwrap().plans.first().map_or(WORST, |plan| plan.0)
}

fn assert_exact(shape: Shape, seeds: std::ops::Range<u64>, objective: ObjectiveKind) {
    for seed in seeds {
        let mut problem = common::problem(shape, seed);
        problem.workload.requests = 20;
        let settings = Settings { objective, simulated_seeds: vec![1], ..Settings::default() };
        let (found, expected) = (best_by_search(&problem, &settings), best_by_listing(&problem, &settings));
        // Where only one replica fits, the search goes on to what the listing does not list.
        if expected[0].is_finite() {
            let near = (found[0] - expected[0]).abs() <= 1e-9 * expected[0].abs();
            assert!(near, "{objective:?}, {shape:?}, seed {seed}: {found:?} instead of {expected:?}");
        }
    }
}

#[test]
fn els_and_ft_find_the_best_of_all_plans() {
    for devices in 1..=7 {
        for types in [0, 2] {
            for detail in [Detail::Plain, Detail::Full, Detail::Cold] {
                let shape = Shape { types, detail, ..Shape::of(devices) };
                assert_exact(shape, 0..2, ObjectiveKind::Els);
                assert_exact(shape, 10..12, ObjectiveKind::Ft);
            }
        }
    }
}

#[test]
fn splitwise_finds_the_best_of_all_groupings() {
    for devices in 1..=7 {
        assert_exact(Shape::of(devices), 20..23, ObjectiveKind::Splitwise);
        assert_exact(Shape { types: 2, ..Shape::of(devices) }, 23..25, ObjectiveKind::Splitwise);
    }
}

#[test]
fn queue_finds_the_best_of_all_plans() {
    for devices in 1..=5 {
        assert_exact(Shape::of(devices), 30..33, ObjectiveKind::Queue);
    }
    for devices in 6..=7 {
        assert_exact(Shape { types: 2, blocks: 48, ..Shape::of(devices) }, 33..35, ObjectiveKind::Queue);
    }
}

#[test]
fn different_blocks_and_links_are_searched_exactly_too() {
    for devices in 2..=5 {
        let shape = Shape {
            blocks: 12,
            two_kinds: TwoKinds::Yes,
            links: LinkKind::Random,
            detail: Detail::Full,
            types: 0,
            devices,
        };
        assert_exact(shape, 40..42, ObjectiveKind::Els);
    }
}
