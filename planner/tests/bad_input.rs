//! What is said about input that cannot be planned.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

mod common;

use cluster::{Arrivals, Bytes, DeviceMemory, Millis, TokensPerSecond, TraceEntry};
use common::{LinkKind, Shape, problem};
use planner::{ObjectiveKind, PlanError, Problem, ProblemError, Settings, solve, solve_robust};

fn error(problem: &Problem) -> PlanError {
    solve(problem, &Settings { objective: ObjectiveKind::Els, ..Settings::default() }).unwrap_err()
}

fn faults(problem: &Problem) -> Vec<String> {
    match error(problem) {
        PlanError::Problem(faults) => faults.iter().map(ToString::to_string).collect(),
        other => panic!("{other}"),
    }
}

fn good() -> Problem {
    let mut problem = problem(Shape::of(3), 1);
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(20_000_000_000) };
    }
    problem
}

#[test]
fn a_model_that_fits_nowhere_is_said_in_numbers_per_device() {
    let mut problem = good();
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(1_500_000_000) };
    }
    let PlanError::NoFit(fit) = error(&problem) else { panic!() };
    assert!(fit.need > fit.have);
    assert_eq!(fit.devices.len(), 3);
    assert!(fit.devices.iter().all(|room| room.blocks == 3), "{fit:?}");
    let said = fit.to_string();
    assert!(
        said.contains("needs 7.") && said.contains("device-000") && said.contains("more on device-"),
        "{said}"
    );
}

#[test]
fn a_smaller_context_that_would_fit_is_named() {
    let mut problem = good();
    problem.workload.slot_context = 131_072;
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(4_000_000_000) };
    }
    let PlanError::NoFit(fit) = error(&problem) else { panic!() };
    let context = fit.fitting_context.unwrap();
    problem.workload.slot_context = context;
    assert!(solve(&problem, &Settings::default()).is_ok());
    problem.workload.slot_context = context * 2;
    assert!(solve(&problem, &Settings::default()).is_err());
}

#[test]
fn devices_that_cannot_talk_are_not_chained() {
    let mut problem = good();
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(5_000_000_000) };
    }
    assert!(solve(&problem, &Settings::default()).is_ok());
    problem.links.otherwise = None;
    let PlanError::NoFit(fit) = error(&problem) else { panic!() };
    // Three hosts: six ways.
    assert_eq!(fit.missing_links.len(), 6);
    assert!(fit.to_string().contains("missing links"), "{fit}");
}

#[test]
fn a_missing_link_is_worked_around() {
    let mut problem = problem(Shape { links: LinkKind::Random, ..Shape::of(4) }, 3);
    problem.links.otherwise = None;
    let cut = problem.links.measured.remove(0);
    let solution =
        solve(&problem, &Settings { objective: ObjectiveKind::Els, ..Settings::default() }).unwrap();
    for replica in &solution.plan.replicas {
        let nodes: Vec<_> = replica
            .stages
            .iter()
            .map(|s| problem.devices.iter().find(|d| d.id == s.device).unwrap().node.clone())
            .collect();
        for (i, from) in nodes.iter().enumerate() {
            let to = &nodes[(i + 1) % nodes.len()];
            assert!(nodes.len() == 1 || !(*from == cut.from && *to == cut.to), "{replica:?}");
        }
    }
}

#[test]
fn a_speed_nobody_reaches_is_answered_with_the_best_there_is() {
    let mut problem = good();
    problem.workload.min_rate = TokensPerSecond(100_000.0);
    let PlanError::TooSlow { asked, best, on } = error(&problem) else { panic!() };
    assert_eq!(asked, 100_000.0);
    assert!(best > 1.0 && best < asked && !on.is_empty());
    // What is said to be possible is possible, and hardly more.
    problem.workload.min_rate = TokensPerSecond(best * 0.999);
    assert!(solve(&problem, &Settings::default()).is_ok());
    problem.workload.min_rate = TokensPerSecond(best * 1.05);
    assert!(solve(&problem, &Settings::default()).is_err());
}

#[test]
fn profiles_of_different_models_or_versions_are_not_mixed() {
    let mut problem = good();
    problem.profiles[1].model = "another".into();
    problem.profiles[2].runtime = "older".into();
    let faults = faults(&problem);
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].contains("another") && faults[1].contains("older"), "{faults:?}");
}

#[test]
fn every_fault_is_reported_at_once() {
    let mut problem = good();
    problem.profiles.remove(0);
    problem.devices[1].id = problem.devices[2].id.clone();
    if let Some(quality) = &mut problem.links.otherwise {
        quality.bandwidth.0 = 0.0;
        quality.one_way_latency = Millis(-1.0);
    }
    problem.workload.min_rate = TokensPerSecond(f64::NAN);
    problem.workload.arrivals = Arrivals::Poisson(Millis(0.0));
    assert!(faults(&problem).len() >= 6, "{:?}", faults(&problem));
}

#[test]
fn rates_of_zero_or_infinity_are_refused() {
    for interval in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        let mut problem = good();
        problem.workload.arrivals = Arrivals::Every(Millis(interval));
        assert_eq!(faults(&problem).len(), 1, "{interval}");
    }
    for mean in [0.0, f64::INFINITY, f64::NAN, -3.0] {
        let mut problem = good();
        problem.workload.output.mean = mean;
        assert!(!faults(&problem).is_empty(), "{mean}");
    }
}

#[test]
fn prompts_that_no_slot_has_room_for_are_refused() {
    let mut problem = good();
    problem.workload.prompt.mean = 9000.0;
    assert!(faults(&problem)[0].contains("slot context"), "{:?}", faults(&problem));
}

#[test]
fn a_trace_must_rise_and_hold_tokens() {
    let mut problem = good();
    let entry = |at, prompt| TraceEntry { at: Millis(at), prompt, output: 5 };
    problem.workload.arrivals = Arrivals::Trace(vec![entry(5.0, 1), entry(1.0, 1), entry(9.0, 0)]);
    assert_eq!(faults(&problem).len(), 2);
    problem.workload.arrivals = Arrivals::Trace(Vec::new());
    assert_eq!(faults(&problem).len(), 1);
    problem.workload.arrivals = Arrivals::Trace((0..20).map(|i| entry(f64::from(i) * 50.0, 100)).collect());
    assert!(solve(&problem, &Settings::default()).is_ok());
}

#[test]
fn a_cluster_without_devices_or_a_model_without_blocks_is_refused() {
    let mut problem = good();
    problem.devices.clear();
    problem.profiles.clear();
    problem.model.blocks.clear();
    let PlanError::Problem(faults) = error(&problem) else { panic!() };
    assert!(faults.contains(&ProblemError::NoDevices) && faults.contains(&ProblemError::NoBlocks));
}

#[test]
fn a_model_with_fewer_blocks_than_devices_is_never_cut_finer_than_its_blocks() {
    let mut problem = problem(Shape { blocks: 2, ..Shape::of(5) }, 2);
    for device in &mut problem.devices {
        // Room for one block and little more.
        device.memory = DeviceMemory::Unified { total: Bytes(1_200_000_000) };
    }
    let solution =
        solve(&problem, &Settings { objective: ObjectiveKind::Els, ..Settings::default() }).unwrap();
    assert!(solution.plan.replicas.iter().all(|r| r.stages.len() <= 2));
}

#[test]
fn a_robust_plan_of_a_bad_problem_is_refused_too() {
    let mut problem = good();
    problem.devices.clear();
    assert!(
        solve_robust(&problem, &Settings::default(), &planner::Doubt::default(), &planner::Unwatched)
            .is_err()
    );
}

#[test]
fn sizes_that_no_search_could_hold_are_refused_by_number() {
    let mut problem = good();
    problem.workload.max_slots = u32::MAX;
    problem.workload.requests = u32::MAX;
    problem.workload.slot_context = u32::MAX;
    problem.model.blocks = vec![problem.model.blocks[0]; 5000];
    let faults = faults(&problem);
    assert_eq!(faults.len(), 4, "{faults:?}");
    assert!(faults.iter().all(|fault| fault.contains("at most")) && faults[0].contains("5000"), "{faults:?}");
}

#[test]
fn curves_that_no_device_has_are_refused_before_planning() {
    use cluster::{Surface, SurfaceError};
    for ms in [0.0, -0.5, f64::NAN] {
        let refused = Surface::flat(vec![1, 8], vec![Millis(1.0), Millis(ms)]);
        assert!(matches!(refused, Err(SurfaceError::BadTime { .. })), "{ms}");
    }
    let mut problem = good();
    problem.profiles[0].hop_overhead = Millis(-1.0);
    assert!(faults(&problem)[0].contains("-1"), "{:?}", faults(&problem));
}

#[test]
fn a_search_that_is_stopped_says_so() {
    struct Stop;
    impl planner::Watch for Stop {
        fn progress(&self, _: planner::Progress) -> std::ops::ControlFlow<()> {
            std::ops::ControlFlow::Break(())
        }
    }
    for objective in ObjectiveKind::ALL {
        let settings = Settings { objective, ..Settings::default() };
        assert_eq!(planner::solve_watched(&good(), &settings, &Stop), Err(PlanError::Stopped));
    }
    let many = problem(Shape { types: 3, ..Shape::of(60) }, 1);
    assert_eq!(planner::solve_watched(&many, &Settings::default(), &Stop), Err(PlanError::Stopped));
}

#[test]
fn the_memory_that_is_said_to_be_enough_is_enough() {
    let mut problem = good();
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(2_500_000_000) };
    }
    let PlanError::NoFit(fit) = error(&problem) else { panic!() };
    let (name, more) = fit.more_memory.unwrap();
    let mut grown = |by: Bytes| {
        for device in problem.devices.iter_mut().filter(|device| device.id == name) {
            device.memory = DeviceMemory::Unified { total: Bytes(2_500_000_000) + by };
        }
        solve(&problem, &Settings { objective: ObjectiveKind::Els, ..Settings::default() }).is_ok()
    };
    assert!(grown(more));
    assert!(!grown(more.saturating_sub(Bytes::from_mib(17))));
}
