//! The planner's times and the genetic search's quality: `cargo bench -p planner [-- NAME]`.
//!
//! No statistics: what is asked is whether a plan takes milliseconds, seconds or minutes.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use cluster::{Millis, Role};
use common::{Shape, problem};
use planner::sim::{Bounds, Handover, Request, ShortestWork, SimCluster, SimReplica, simulate};
use planner::suite::{EQUAL_BELOW, outcome, suite};
use planner::testbed::Testbed;
use planner::{
    DecodeReading, Doubt, Effort, InDoubt, ObjectiveKind, Problem, Rng, Settings, SlotRule, Unwatched,
    compare_in_doubt, solve, solve_robust,
};

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let benches: [(&str, fn()); 9] = [
        ("exact", exact),
        ("queue", queue),
        ("genetic", genetic),
        ("partition", partition),
        ("simulator", simulator),
        ("quality", quality),
        ("scale", scale),
        ("suite", paper_suite),
        ("robust", robust),
    ];
    for (name, bench) in benches {
        if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
            bench();
        }
    }
}

/// Seconds of the fastest of some runs.
fn fastest(runs: usize, mut run: impl FnMut()) -> f64 {
    let one = |_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..runs).map(one).fold(f64::INFINITY, f64::min)
}

fn report(name: &str, seconds: f64, limit: f64) {
    println!("{name:52} {:10.2} ms (limit {:.0} ms)", seconds * 1e3, limit * 1e3);
}

fn settings(objective: ObjectiveKind) -> Settings {
    Settings { objective, ..Settings::default() }
}

fn plan(problem: &Problem, settings: &Settings) -> f64 {
    solve(problem, settings).map_or(f64::INFINITY, |s| s.score)
}

fn exact() {
    for (n, limit) in [(8, 0.030), (10, 0.3), (12, 1.0), (14, 30.0)] {
        let problem = problem(Shape::of(n), 5);
        let seconds = fastest(3, || {
            plan(&problem, &settings(ObjectiveKind::Els));
        });
        report(&format!("exact, els, {n} different devices"), seconds, limit);
    }
}

fn queue() {
    let bed = testbed();
    for reading in [DecodeReading::Batched, DecodeReading::Serial] {
        let (mut worst, mut sum, mut n) = (0.0_f64, 0.0, 0.0);
        for configuration in bed.configurations().iter().filter(|c| c.devices == "8") {
            let problem = bed.problem(configuration).unwrap();
            let settings = bed.settings(ObjectiveKind::Queue, reading);
            let seconds = fastest(2, || {
                plan(&problem, &settings);
            });
            worst = worst.max(seconds);
            sum += seconds;
            n += 1.0;
        }
        report(&format!("queue, 8 devices of the test bed, {reading:?}, mean"), sum / n, 1.0);
        report(&format!("queue, 8 devices of the test bed, {reading:?}, worst"), worst, 1.0);
    }
    let random = (0..8).map(|seed| {
        let problem = problem(Shape::of(8), 600 + seed);
        fastest(1, || {
            plan(&problem, &Settings { slots: SlotRule::Either, ..settings(ObjectiveKind::Queue) });
        })
    });
    report("queue, 8 different devices, worst of 8 clusters", random.fold(0.0, f64::max), 1.0);
}

fn genetic() {
    for (n, types, limit) in [(16, 0, 5.0), (64, 0, 5.0), (64, 6, 5.0), (256, 8, 60.0), (256, 0, 60.0)] {
        let mut problem = problem(Shape { types, ..Shape::of(n) }, 3);
        // A rate nothing keeps up with, so that there is something to gain.
        problem.workload.arrivals = cluster::Arrivals::Every(Millis(1.0));
        let mut gap = f64::NAN;
        let seconds = fastest(1, || {
            let solution = solve(&problem, &settings(ObjectiveKind::Els)).unwrap();
            gap = solution.score / solution.bound.unwrap_or(f64::NAN);
        });
        let kinds = if types == 0 { "different".to_owned() } else { format!("of {types} types") };
        report(&format!("genetic, els, {n} devices {kinds}"), seconds, limit);
        println!("{:52} {gap:10.3} times a bound that no plan reaches", "");
    }
}

/// One chain of 16 devices, 80 blocks of two types: the dynamic program itself.
fn partition() {
    let shape = Shape { blocks: 80, two_kinds: common::TwoKinds::Yes, ..Shape::of(16) };
    let problem = problem(shape, 1);
    let seconds = planner::bench::partition_seconds(&problem, &Settings::default(), &|run| fastest(20, run));
    report("dynamic program, 16 devices, 80 blocks", seconds, 0.002);
}

fn simulator() {
    let tpot = |slots: usize| (0..=slots).map(|n| 0.02 * (1.0 + 0.1 * n as f64)).collect();
    let replicas = vec![
        SimReplica::simple(Role::Prefill, 1, 0.001, vec![0.1; 2]),
        SimReplica::simple(Role::Prefill, 1, 0.001, vec![0.1; 2]),
        SimReplica::simple(Role::Decode, 16, 0.001, tpot(16)),
        SimReplica::simple(Role::Decode, 16, 0.001, tpot(16)),
        SimReplica::simple(Role::Mixed, 8, 0.001, tpot(8)),
    ];
    let cluster = SimCluster::new(replicas, vec![Handover::linear(1e-5, 1e-3); 25]);
    let mut rng = Rng::new(1);
    let mut at = 0.0;
    let requests: Vec<Request> = (0..200_000)
        .map(|_| {
            at += rng.exponential() * 0.3;
            Request {
                at,
                prompt: rng.log_normal(400.0, 0.4),
                output: 1.0 + rng.log_normal(150.0, 0.5).round(),
            }
        })
        .collect();
    let mut events = 0;
    let seconds = fastest(3, || {
        events = simulate(&cluster, &requests, &mut ShortestWork, Bounds::default()).unwrap().events;
    });
    println!("{:52} {:10.2} million events/s (limit 1)", "simulator", events as f64 / seconds / 1e6);
}

/// The genetic search against the exact one.
fn quality() {
    let genetic = Effort { exact_steps: 0, ..Effort::default() };
    for n in [10, 12] {
        let (mut optima, mut gaps, mut worst, mut cases) = (0, 0.0, 0.0_f64, 0);
        let mut seconds = 0.0;
        for seed in 0..100 {
            let mut problem = problem(Shape::of(n), 1000 + seed);
            // A rate nothing keeps up with, so that scores differ.
            problem.workload.arrivals = cluster::Arrivals::Every(Millis(1.0));
            let settings = settings(ObjectiveKind::Els);
            let best = plan(&problem, &settings);
            if !best.is_finite() {
                continue;
            }
            let start = Instant::now();
            let found = plan(&problem, &Settings { effort: genetic, ..settings });
            seconds += start.elapsed().as_secs_f64();
            cases += 1;
            optima += i32::from(found <= best * (1.0 + 1e-9));
            gaps += found / best - 1.0;
            worst = worst.max(found / best - 1.0);
        }
        println!(
            "genetic against exact, {n} devices: optimum in {optima} of {cases}, mean gap {:.4} %, worst {:.3} %, {:.2} s each",
            gaps / f64::from(cases) * 100.0,
            worst * 100.0,
            seconds / f64::from(cases)
        );
    }
}

/// The genetic search on copies of a cluster whose best plan is known, and with more effort where nothing is known.
fn scale() {
    let ft = settings(ObjectiveKind::Ft);
    for copies in [2, 8, 32] {
        let (mut sum, mut worst, mut cases) = (0.0, 0.0_f64, 0.0);
        for seed in 0..5 {
            let small = problem(Shape::of(8), 500 + seed);
            let best = plan(&small, &ft);
            if !best.is_finite() {
                continue;
            }
            // As many replicas of the best plan as copies finish in that share of its time; there may be better plans.
            let ratio = plan(&copied(&small, copies), &ft) * copies as f64 / best;
            (sum, worst, cases) = (sum + ratio, worst.max(ratio), cases + 1.0);
        }
        println!(
            "genetic, {copies} copies of 8 devices, against copies of the best plan: {:.4}, at worst {worst:.4}",
            sum / cases
        );
    }
    let more = Effort { population: 256, generations: 200, elites: 24, ..Effort::default() };
    for n in [32, 64] {
        let problem = problem(Shape::of(n), 7);
        let (less, more) = (plan(&problem, &ft), plan(&problem, &Settings { effort: more, ..ft.clone() }));
        println!("genetic, {n} different devices, against over ten times the effort: {:.4}", less / more);
    }
}

/// The cluster, so many times.
fn copied(problem: &Problem, copies: usize) -> Problem {
    let mut all = problem.clone();
    for copy in 1..copies {
        for (device, profile) in problem.devices.iter().zip(&problem.profiles) {
            let (mut device, mut profile) = (device.clone(), profile.clone());
            device.id.0 = format!("{}-{copy}", device.id);
            device.node.0 = format!("{}-{copy}", device.node);
            profile.device = device.id.clone();
            all.devices.push(device);
            all.profiles.push(profile);
        }
    }
    all
}

/// The paper's 36 configurations under the four objectives.
fn paper_suite() {
    let bed = testbed();
    for reading in [DecodeReading::Batched, DecodeReading::Serial] {
        let start = Instant::now();
        let outcomes =
            bed.configurations().iter().map(|c| outcome(&bed, c, reading, &mut |_| {}).unwrap()).collect();
        let suite = suite(outcomes);
        println!(
            "{reading:?} decode, {:.1} s: longest wait in s, els / ft / splitwise / queue",
            start.elapsed().as_secs_f64()
        );
        for outcome in &suite.configurations {
            let waits = outcome.max_wait_s;
            println!(
                "  {:52} {:8.2} {:8.2} {:8.2} {:8.2}",
                outcome.name, waits.els, waits.ft, waits.splitwise, waits.queue
            );
        }
        println!("  {} congested; {:?}", suite.congested, suite.ratio_to_queue);
    }
}

/// How often a robust plan is over 2 % worse than `els`'s, with device speeds wrong by up to 15 % in 1,000 draws.
fn robust() {
    let bed = testbed();
    let doubt = Doubt { draws: 1000, links: 0.0, lengths: 0.0, ..Doubt::default() };
    let (mut by_score, mut by_wait, mut all) = ((0, 0), (0, 0), 0);
    for configuration in bed.configurations() {
        let problem = bed.problem(&configuration).unwrap();
        let settings = bed.settings(ObjectiveKind::Queue, DecodeReading::Batched);
        let robust = solve_robust(&problem, &settings, &Doubt::default(), &Unwatched).unwrap().plan;
        let els = solve(&problem, &bed.settings(ObjectiveKind::Els, DecodeReading::Batched)).unwrap().plan;
        let other = Settings { seed: 99, ..settings };
        let draws = compare_in_doubt(&problem, &other, &doubt, &[&robust, &els]).unwrap();
        let score = draws.iter().filter(|d| d[0].score > 1.02 * d[1].score).count();
        let wait = |d: &InDoubt| d.max_wait.max(EQUAL_BELOW);
        let wait = draws.iter().filter(|d| wait(&d[0]) > 1.02 * wait(&d[1])).count();
        if score + wait > 0 {
            println!("  {}: {score} by score, {wait} by longest wait", configuration.name());
        }
        by_score = (by_score.0 + score, by_score.1.max(score));
        by_wait = (by_wait.0 + wait, by_wait.1.max(wait));
        all += draws.len();
    }
    println!(
        "robust over 2 % worse than els, of {all} draws, and at most of 1000 in one configuration (limit 20):"
    );
    println!("  by score {by_score:?}, by longest wait {by_wait:?}");
}

fn testbed() -> Testbed {
    Testbed::e2llm().unwrap()
}
