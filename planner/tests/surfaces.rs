//! The paper's configurations, doubt, explanations and drawings, through the public interface.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

mod common;

use cluster::{Millis, Role};
use common::{Shape, problem};
use planner::explain::{Phase, explain};
use planner::sim::{Bounds, ShortestCount, ShortestWork, requests, simulate};
use planner::suite::{EQUAL_BELOW, outcome, suite};
use planner::testbed::{Configuration, Testbed};
use planner::{
    CutShort, DecodeReading, Doubt, Effort, Method, ObjectiveKind, PlanError, Problem, Settings, Unwatched,
    cluster_of, compare_in_doubt, draw, predict, solve, solve_robust, table, too_large, utilisation,
};

fn testbed() -> Testbed {
    Testbed::e2llm().unwrap()
}

fn configuration(devices: &str, model: &str, dataset: &str, interval: f64) -> (Problem, Testbed) {
    let bed = testbed();
    let configuration =
        Configuration { devices: devices.into(), model: model.into(), dataset: dataset.into(), interval };
    (bed.problem(&configuration).unwrap(), bed)
}

const QWEN: &str = "qwen3-30b-a3b-q4_k_m";
const GPT: &str = "gpt-oss-20b";

#[test]
fn queue_waits_no_longer_than_the_other_objectives_on_workloads_it_has_not_seen() {
    let bed = testbed();
    for reading in [DecodeReading::Batched, DecodeReading::Serial] {
        let small = bed.configurations().into_iter().filter(|c| c.devices != "8");
        let outcomes = small.map(|c| outcome(&bed, &c, reading, &mut |_| {}).unwrap()).collect();
        let suite = suite(outcomes);
        assert_eq!(suite.configurations.len(), 24);
        assert!(suite.congested >= 18, "{}", suite.congested);
        for outcome in &suite.configurations {
            let (queue, waits) = (outcome.max_wait_s.queue.max(EQUAL_BELOW), outcome.max_wait_s);
            for other in [waits.els, waits.ft, waits.splitwise] {
                assert!(queue <= other.max(EQUAL_BELOW), "{}: {waits:?}", outcome.name);
            }
        }
        let ratio = suite.ratio_to_queue;
        assert!(ratio.els.geometric_mean > 1.3 && ratio.splitwise.geometric_mean > ratio.els.geometric_mean);
    }
}

#[test]
fn the_testbed_has_thirty_six_configurations_with_names_of_their_own() {
    let mut names: Vec<String> = testbed().configurations().iter().map(Configuration::name).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 36);
    assert!(testbed().on_devices(&[9], GPT).is_err());
    assert!(testbed().on_devices(&[1], "no such model").is_err());
    assert!(Testbed::read(b"{}").is_err());
}

#[test]
fn els_and_ft_choose_the_same_rates_where_decode_is_the_slower_phase() {
    // Finding 1: w then is the finishing time less a constant.
    let bed = testbed();
    let mut same = 0;
    for configuration in bed.configurations().iter().filter(|c| c.interval < 0.5) {
        let problem = bed.problem(configuration).unwrap();
        let plan = |kind| solve(&problem, &bed.settings(kind, DecodeReading::Serial)).unwrap().plan;
        let (els, ft) = (plan(ObjectiveKind::Els), plan(ObjectiveKind::Ft));
        same += usize::from(table::in_short(&els) == table::in_short(&ft));
    }
    assert_eq!(same, 12);
}

#[test]
fn an_eight_device_plan_of_the_paper_waits_as_long_as_the_trial_found() {
    // The table's plan for 8 devices, gpt-oss, LZByteDance, 100 ms: 67 s in the paper, 53 s in the trial's batched
    // reading.
    let (problem, bed) = configuration("8", GPT, "LZByteDance", 0.1);
    let settings = bed.settings(ObjectiveKind::Ft, DecodeReading::Batched);
    let stage = |device: &str, start: u32, gpu: u32, cpu: u32| cluster::StagePlan {
        device: cluster::DeviceId(device.into()),
        layers: cluster::LayerRange::new(start, start + gpu + cpu).unwrap(),
        gpu_blocks: gpu,
        encoding: cluster::LinkEncoding::F32,
        load: 1.0,
    };
    let replica = |role, slots, stages| cluster::ReplicaPlan {
        role,
        stages,
        slots,
        prefill_rate: Default::default(),
        decode_rate: Default::default(),
        tpot: Default::default(),
        limit: cluster::Limit::Stage(0),
    };
    let plan = cluster::Plan {
        objective: "table 34".into(),
        replicas: vec![
            replica(Role::Prefill, 1, vec![stage("Dev.1", 0, 20, 4)]),
            replica(Role::Decode, 8, vec![stage("Dev.4", 0, 15, 0), stage("Dev.2", 15, 5, 4)]),
            replica(Role::Decode, 5, vec![stage("Dev.3", 0, 24, 0)]),
            replica(Role::Decode, 2, vec![stage("Dev.5", 0, 15, 0), stage("Dev.6", 15, 9, 0)]),
            replica(Role::Decode, 30, vec![stage("Dev.7", 0, 13, 0), stage("Dev.8", 13, 11, 0)]),
        ],
        idle: Vec::new(),
        prediction: Default::default(),
    };
    let wait = predict(&problem, &settings, &plan, &[1, 2, 3, 4]).unwrap().max_wait.0 / 1e3;
    assert!((wait / 53.0 - 1.0).abs() < 0.25, "{wait}");
    assert!((wait / 67.0 - 1.0).abs() < 0.35, "{wait}");
}

#[test]
fn counting_requests_instead_of_work_makes_waits_longer() {
    // Finding 3, on two prefill replicas of which one is eight times as fast.
    let (problem, bed) = configuration("8", QWEN, "IELTS", 0.1);
    let settings = bed.settings(ObjectiveKind::Queue, DecodeReading::Batched);
    let solution = solve(&problem, &settings).unwrap();
    let cluster = cluster_of(&problem, &settings, &solution.plan).unwrap();
    let requests = requests(&problem.workload, 5);
    let wait = |report: Option<planner::sim::Report>| report.unwrap().summary(1.0 / 7.0).max_wait;
    let by_work = wait(simulate(&cluster, &requests, &mut ShortestWork, Bounds::default()));
    let by_count = wait(simulate(&cluster, &requests, &mut ShortestCount, Bounds::default()));
    assert!(by_count > by_work, "{by_count} against {by_work}");
}

#[test]
fn a_robust_plan_is_hardly_ever_worse_than_els_when_speeds_are_off() {
    let (problem, bed) = configuration("6", GPT, "IELTS", 1.0);
    let settings = bed.settings(ObjectiveKind::Queue, DecodeReading::Batched);
    let robust = solve_robust(&problem, &settings, &Doubt::default(), &Unwatched).unwrap();
    let els = solve(&problem, &bed.settings(ObjectiveKind::Els, DecodeReading::Batched)).unwrap();
    // Other draws than those it was chosen by, speeds alone.
    let other = Settings { seed: 77, ..settings };
    let doubt = Doubt { draws: 200, links: 0.0, lengths: 0.0, ..Doubt::default() };
    let waits = compare_in_doubt(&problem, &other, &doubt, &[&robust.plan, &els.plan]).unwrap();
    let worse = waits.iter().filter(|w| w[0].score > 1.02 * w[1].score).count();
    assert!(worse <= 4, "{worse} of 200");
}

#[test]
fn an_explanation_names_the_bottleneck_the_next_best_and_what_helps() {
    let (problem, bed) = configuration("4", GPT, "LZByteDance", 0.1);
    let settings = bed.settings(ObjectiveKind::Els, DecodeReading::Batched);
    let solution = solve(&problem, &settings).unwrap();
    let explanation = explain(&problem, &settings, &solution, &Unwatched).unwrap();
    assert_eq!(explanation.bottleneck, Phase::Decode);
    assert_eq!(explanation.limits.len(), solution.plan.replicas.len());
    let (next, score, behind) = solution.next_best().unwrap();
    assert!(behind >= 0.0 && score >= solution.score && *next != solution.plan);
    for kind in ["one more device", "links", "a slot context", "a minimum speed"] {
        assert!(explanation.changes.iter().any(|c| c.what.starts_with(kind)), "{:?}", explanation.changes);
    }
    // A device more helps most here, and no device makes it worse.
    assert!(explanation.changes[0].what.starts_with("one more device"), "{:?}", explanation.changes);
    assert!(explanation.changes[0].gain > 0.1);
    assert!(explanation.changes.iter().all(|c| !c.what.starts_with("one more") || c.gain >= -1e-9));
}

#[test]
fn a_prediction_agrees_with_the_plan_it_came_with() {
    let (problem, bed) = configuration("6", QWEN, "LZByteDance", 1.0);
    let settings = bed.settings(ObjectiveKind::Queue, DecodeReading::Batched);
    let solution = solve(&problem, &settings).unwrap();
    let again = predict(&problem, &settings, &solution.plan, &settings.simulated_seeds).unwrap();
    assert!((again.max_wait.0 - solution.plan.prediction.max_wait.0).abs() < 1e-6);
}

#[test]
fn the_busiest_stage_of_a_loaded_replica_is_busy_nearly_all_the_time() {
    let (problem, bed) = configuration("4", GPT, "LZByteDance", 0.1);
    let settings = bed.settings(ObjectiveKind::Els, DecodeReading::Batched);
    let plan = solve(&problem, &settings).unwrap().plan;
    let cluster = cluster_of(&problem, &settings, &plan).unwrap();
    let all = requests(&problem.workload, 1);
    let report = simulate(&cluster, &all, &mut ShortestWork, Bounds::default()).unwrap();
    let used = utilisation(&problem, &settings, &plan, &report).unwrap();
    let busiest = used.iter().flatten().map(|stage| stage.stage).fold(0.0, f64::max);
    assert!(busiest > 0.7 && busiest <= 1.0, "{used:?}");
    for (replica, used) in plan.replicas.iter().zip(&used) {
        assert_eq!(replica.stages.len(), used.len());
        assert!(used.iter().rev().skip(1).all(|stage| stage.link > 0.0) && used[used.len() - 1].link == 0.0);
    }
}

#[test]
fn a_plan_of_another_cluster_or_model_is_refused_with_what_differs() {
    let (problem, bed) = configuration("6", QWEN, "LZByteDance", 1.0);
    let settings = bed.settings(ObjectiveKind::Els, DecodeReading::Batched);
    let plan = solve(&problem, &settings).unwrap().plan;
    let refusal = |problem: &Problem, change: &dyn Fn(&mut cluster::Plan)| {
        let mut changed = plan.clone();
        change(&mut changed);
        let error = predict(problem, &settings, &changed, &[1]).unwrap_err();
        assert!(matches!(error, PlanError::Mismatch(_)), "{error}");
        error.to_string()
    };
    let said = refusal(&problem, &|plan| plan.replicas[0].stages[0].device.0 = "nobody".into());
    assert!(said.contains("no device nobody"), "{said}");
    let said = refusal(&problem, &|plan| {
        let again = plan.replicas[0].clone();
        plan.replicas.push(again);
    });
    assert!(said.contains("twice"), "{said}");
    let said = refusal(&problem, &|plan| plan.replicas[0].stages[0].gpu_blocks = 99);
    assert!(said.contains("99 on the GPU"), "{said}");
    let said = refusal(&problem, &|plan| plan.replicas[0].slots = 0);
    assert!(said.contains("0 slots"), "{said}");
    let mut shorter = problem.clone();
    shorter.model.blocks.truncate(40);
    let said = refusal(&shorter, &|_| {});
    assert!(said.contains("40"), "{said}");
    let mut apart = problem.clone();
    apart.links.otherwise = None;
    let said = refusal(&apart, &|_| {});
    assert!(said.contains("no link from"), "{said}");
}

#[test]
fn a_plan_that_needs_more_memory_than_there_is_is_told_apart() {
    let (mut problem, bed) = configuration("6", QWEN, "LZByteDance", 1.0);
    let settings = bed.settings(ObjectiveKind::Els, DecodeReading::Batched);
    let plan = solve(&problem, &settings).unwrap().plan;
    assert_eq!(too_large(&problem, &settings, &plan), Ok(vec![]));
    problem.workload.slot_context *= 8;
    assert!(!too_large(&problem, &settings, &plan).unwrap().is_empty());
}

#[test]
fn a_table_has_a_row_for_each_stage_and_one_star_for_each_replica() {
    let (problem, bed) = configuration("8", QWEN, "LZByteDance", 0.1);
    let plan = solve(&problem, &bed.settings(ObjectiveKind::Els, DecodeReading::Batched)).unwrap().plan;
    let rows = table::rows(&plan);
    let stages: usize = plan.replicas.iter().map(|r| r.stages.len()).sum();
    assert_eq!(rows.len(), stages);
    assert_eq!(rows.iter().filter(|row| row[1].ends_with('*')).count(), plan.replicas.len());
    assert_eq!(rows.iter().filter(|row| !row[0].is_empty()).count(), plan.replicas.len());
}

#[test]
fn a_drawing_shows_every_device_and_is_well_formed() {
    let (problem, bed) = configuration("8", QWEN, "LZByteDance", 0.1);
    let mut plan = solve(&problem, &bed.settings(ObjectiveKind::Queue, DecodeReading::Batched)).unwrap().plan;
    plan.replicas[0].stages[0].device.0 = "a<b & \"c\"".into();
    let svg = draw::svg(&plan, "Qwen3 <30B>");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    for stage in plan.replicas.iter().flat_map(|r| &r.stages).skip(1) {
        assert!(svg.contains(&stage.device.0), "{}", stage.device);
    }
    assert!(svg.contains("a&lt;b &amp; &quot;c&quot;") && !svg.contains("<30B>"));
    assert_eq!(svg.matches('★').count(), plan.replicas.len());
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
}

#[test]
fn a_thousand_devices_are_planned_and_what_was_done_is_said() {
    let problem = problem(Shape { types: 5, ..Shape::of(1000) }, 1);
    let effort = Effort { population: 8, generations: 2, elites: 2, ..Effort::default() };
    let settings =
        Settings { objective: ObjectiveKind::Els, effort, simulated_seeds: vec![1], ..Settings::default() };
    let solution = solve(&problem, &settings).unwrap();
    assert_eq!(solution.method, Method::Genetic);
    assert!(solution.judged >= 8);
    let used: usize = solution.plan.replicas.iter().map(|r| r.stages.len()).sum();
    assert_eq!(used + solution.plan.idle.len(), 1000);
    assert!(used > 500, "{used}");
}

#[test]
fn a_search_that_was_cut_short_says_what_it_left_undone() {
    let shape = Shape { two_kinds: common::TwoKinds::Yes, ..Shape::of(20) };
    let problem = problem(shape, 3);
    let els = |effort: Effort| {
        let settings = Settings { objective: ObjectiveKind::Els, effort, ..Settings::default() };
        solve(&problem, &settings).unwrap()
    };
    let effort = Effort { population: 16, generations: 4, elites: 2, ..Effort::default() };
    assert_eq!(els(effort).cut_short, []);
    let short = els(Effort { layout_steps: 1_000, ..effort });
    assert_eq!(short.cut_short, [CutShort::Generations { done: 0, of: 4 }]);
    assert!(short.cut_short[0].to_string().contains("0 of 4 generations"), "{}", short.cut_short[0]);

    let (problem, bed) = configuration("8", GPT, "LZByteDance", 1.0);
    let queue = |effort: Effort| {
        let settings = bed.settings(ObjectiveKind::Queue, DecodeReading::Batched);
        solve(&problem, &Settings { effort, simulated_seeds: vec![1], ..settings }).unwrap()
    };
    let few = queue(Effort { simulated_plans: 64, ..Effort::default() });
    assert_eq!(few.method, Method::Simulated);
    assert!(
        matches!(few.cut_short[..], [CutShort::Simulations { done: 64, left }] if left > 1000),
        "{:?}",
        few.cut_short
    );
    let none = queue(Effort { enumerated_plans: 100, simulated_plans: 64, ..Effort::default() });
    assert_eq!(none.cut_short, [CutShort::Plans { most: 100 }]);
}

#[test]
fn a_thousand_devices_are_planned_for_blocks_that_differ_too() {
    let problem = problem(Shape { two_kinds: common::TwoKinds::Yes, ..Shape::of(1000) }, 1);
    let effort = Effort { layout_steps: 50_000, ..Effort::default() };
    let settings =
        Settings { objective: ObjectiveKind::Els, effort, simulated_seeds: vec![1], ..Settings::default() };
    let solution = solve(&problem, &settings).unwrap();
    assert!(matches!(solution.cut_short[..], [CutShort::Generations { .. }]), "{:?}", solution.cut_short);
    let used: usize = solution.plan.replicas.iter().map(|r| r.stages.len()).sum();
    assert!(used > 500 && used + solution.plan.idle.len() == 1000, "{used}");
}

#[test]
fn a_slow_link_gets_smaller_rows_only_where_that_is_allowed() {
    let mut problem = problem(Shape::of(3), 4);
    for device in &mut problem.devices {
        device.memory = cluster::DeviceMemory::Unified { total: cluster::Bytes(4_500_000_000) };
    }
    if let Some(quality) = &mut problem.links.otherwise {
        quality.bandwidth = cluster::BytesPerSecond::from_mbit(5.0);
        quality.one_way_latency = Millis(0.2);
    }
    let exact = Settings { objective: ObjectiveKind::Els, ..Settings::default() };
    let free = Settings { encoding: planner::EncodingRule::WhereItBinds, ..exact.clone() };
    let encodings = |settings: &Settings| -> Vec<cluster::LinkEncoding> {
        let plan = solve(&problem, settings).unwrap().plan;
        plan.replicas.iter().flat_map(|r| &r.stages).map(|s| s.encoding).collect()
    };
    assert!(encodings(&exact).iter().all(|e| *e == cluster::LinkEncoding::F32));
    assert!(encodings(&free).contains(&cluster::LinkEncoding::Q8_0), "{:?}", encodings(&free));
}
