//! What can be relied on, whatever the cluster (`README.md` lists it).
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

mod common;

use cluster::{
    Arrivals, Attention, Bytes, DeviceId, DeviceMemory, Limit, LinkEncoding, Load, Millis, NodeId, Plan,
    RangeRule, ReplicaPlan, Role, StageLoad, TokensPerSecond, stage_memory,
};
use common::{Detail, LinkKind, Shape, TwoKinds, problem};
use planner::{EncodingRule, KvLayout, ObjectiveKind, PlanError, Problem, Rng, Settings, solve};
use proptest::prelude::*;

fn settings(objective: ObjectiveKind) -> Settings {
    Settings { objective, simulated_seeds: vec![1], ..Settings::default() }
}

fn shape(seed: u64) -> Shape {
    let mut rng = Rng::new(seed);
    Shape {
        types: rng.below(3),
        two_kinds: if rng.unit() < 0.3 { TwoKinds::Yes } else { TwoKinds::No },
        links: if rng.unit() < 0.3 { LinkKind::Random } else { LinkKind::Uniform },
        detail: [Detail::Full, Detail::Cold, Detail::Plain, Detail::Plain][rng.below(4)],
        ..Shape::of(1 + rng.below(5))
    }
}

fn objective(seed: u64) -> ObjectiveKind {
    ObjectiveKind::ALL[(seed % 4) as usize]
}

/// Score and plan, or none where there is no plan.
fn planned(problem: &Problem, settings: &Settings) -> Option<(f64, Plan)> {
    match solve(problem, settings) {
        Ok(solution) => Some((solution.score, solution.plan)),
        Err(PlanError::NoFit(_) | PlanError::TooSlow { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Bytes of a stage on GPU and CPU, counted from the model's description alone.
fn stage_bytes(problem: &Problem, plan: &Plan, replica: usize, stage: usize) -> (f64, f64) {
    let of = &plan.replicas[replica];
    let range = of.stages[stage].layers;
    let (mut gpu, mut cpu) = (0.0, 0.0);
    let KvLayout::PerSlot { n_ubatch } = Settings::default().kv_layout else { panic!() };
    for index in range.start()..range.end() {
        let block = &problem.model.blocks[index as usize];
        let context = f64::from(problem.workload.slot_context);
        let tokens = match block.kind.attention {
            Attention::SlidingWindow { window } => {
                f64::from((window + n_ubatch).div_ceil(256) * 256).min(context)
            }
            Attention::Full => context,
            Attention::Recurrent => 0.0,
        };
        let cache = tokens * block.kv_elements_per_token as f64 * 2.0 + block.state_bytes_per_slot.0 as f64;
        let bytes = block.weight_bytes.0 as f64 + f64::from(of.slots) * cache;
        let on_gpu = index >= range.end() - of.stages[stage].gpu_blocks;
        *(if on_gpu { &mut gpu } else { &mut cpu }) += bytes;
    }
    (gpu, cpu)
}

/// Bytes that the process of a stage takes beside its blocks, and on its host.
fn process_bytes(problem: &Problem, replica: &ReplicaPlan, stage: usize) -> (f64, f64) {
    let profile = problem.profile(&replica.stages[stage].device).unwrap();
    if let Some(costs) = profile.memory {
        let KvLayout::PerSlot { n_ubatch } = Settings::default().kv_layout else { panic!() };
        let load = Load { slots: replica.slots, n_ctx: problem.workload.slot_context, n_ubatch };
        let layers = replica.stages[stage].layers;
        let stage = StageLoad { layers, weights: Bytes::ZERO, gpu_layers: 0 };
        let memory = stage_memory(&problem.model, &stage, load, &costs);
        return (memory.compute.0 as f64, memory.runtime.0 as f64);
    }
    let buffer = match replica.role {
        Role::Decode => profile.buffers.decode,
        Role::Prefill => profile.buffers.prefill,
        Role::Mixed => profile.buffers.prefill.max(profile.buffers.decode),
    };
    (buffer.0 as f64, 0.0)
}

fn assert_sound(problem: &Problem, plan: &Plan) -> Result<(), TestCaseError> {
    let mut used: Vec<&DeviceId> = plan.idle.iter().collect();
    for (r, replica) in plan.replicas.iter().enumerate() {
        let mut next = 0;
        for (s, stage) in replica.stages.iter().enumerate() {
            used.push(&stage.device);
            prop_assert_eq!(stage.layers.start(), next);
            next = stage.layers.end();
            prop_assert!(stage.gpu_blocks <= stage.layers.len());
            prop_assert!(stage.load > 0.0 && stage.load <= 1.0 + 1e-9, "load {}", stage.load);
            let device = problem.devices.iter().find(|d| d.id == stage.device).unwrap();
            let (buffer, runtime) = process_bytes(problem, replica, s);
            let head = if s + 1 == replica.stages.len() { problem.model.head_bytes.0 as f64 } else { 0.0 };
            let (gpu, cpu) = stage_bytes(problem, plan, r, s);
            let (vram, ram) = match device.memory {
                DeviceMemory::Discrete { vram, ram } => (vram.0 as f64, ram.0 as f64),
                DeviceMemory::Unified { total } => (total.0 as f64, 0.0),
            };
            // The head is on the GPU where it fits there; buffers and what every stage holds are where blocks are.
            let unified = matches!(device.memory, DeviceMemory::Unified { .. });
            let (besides, on_host) = if unified { (buffer + runtime, 0.0) } else { (buffer, runtime) };
            let besides = besides + problem.model.global_bytes.0 as f64;
            let on_gpu = vram - besides - gpu >= head;
            let gpu = if gpu > 0.0 { gpu + besides } else { 0.0 } + if on_gpu { head } else { 0.0 };
            let cpu = cpu + on_host + if gpu > 0.0 { 0.0 } else { besides } + if on_gpu { 0.0 } else { head };
            prop_assert!(gpu <= vram, "{} needs {gpu} of {vram}", device.id);
            // A host without RAM for blocks has some for the process.
            prop_assert!(cpu <= ram || cpu == on_host, "{} needs {cpu} of {ram}", device.id);
        }
        prop_assert_eq!(next, problem.model.n_layer());
        if replica.role != Role::Prefill {
            let asked = 1e3 / problem.workload.min_rate.0;
            prop_assert!(replica.tpot.0 <= asked * (1.0 + 1e-6), "{:?} above {asked} ms", replica.tpot);
            prop_assert!((1..=problem.workload.max_slots).contains(&replica.slots));
        }
    }
    used.sort();
    let mut all: Vec<&DeviceId> = problem.devices.iter().map(|d| &d.id).collect();
    all.sort();
    prop_assert_eq!(used, all, "every device is used once or idle");
    prop_assert!(plan.replicas.iter().any(|r| r.role != Role::Decode));
    prop_assert!(plan.replicas.iter().any(|r| r.role != Role::Prefill));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn replicas_hold_every_block_once_within_memory_and_keep_the_speed_asked_for(seed: u64) {
        let problem = problem(shape(seed), seed);
        if let Some((_, plan)) = planned(&problem, &settings(objective(seed))) {
            assert_sound(&problem, &plan)?;
        }
    }

    #[test]
    fn names_and_the_order_of_devices_change_nothing_but_names(seed: u64) {
        let problem = problem(shape(seed), seed);
        let settings = settings(objective(seed >> 2));
        let mut renamed = problem.clone();
        let new = |name: &str| format!("{}-{name}", name.chars().rev().collect::<String>());
        for (device, profile) in renamed.devices.iter_mut().zip(&mut renamed.profiles) {
            device.id = DeviceId(new(&device.id.0));
            device.node = NodeId(new(&device.node.0));
            profile.device = device.id.clone();
        }
        for link in &mut renamed.links.measured {
            link.from = NodeId(new(&link.from.0));
            link.to = NodeId(new(&link.to.0));
        }
        Rng::new(seed).shuffle(&mut renamed.devices);
        Rng::new(seed + 1).shuffle(&mut renamed.profiles);
        let (a, b) = (planned(&problem, &settings), planned(&renamed, &settings));
        prop_assert_eq!(a.is_some(), b.is_some());
        if let (Some((score, plan)), Some((other_score, other))) = (a, b) {
            prop_assert_eq!(score, other_score);
            // Devices that are alike may stand in for each other, so shapes are compared, not names.
            let shapes = |plan: &Plan| -> Vec<String> {
                let of = |r: &ReplicaPlan| {
                    let stages = r.stages.iter().map(|s| (s.layers, s.gpu_blocks)).collect::<Vec<_>>();
                    format!("{} {} {stages:?}", r.role, r.slots)
                };
                let mut shapes: Vec<String> = plan.replicas.iter().map(of).collect();
                shapes.sort();
                shapes
            };
            prop_assert_eq!(shapes(&plan), shapes(&other));
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_plan(seed: u64) {
        let shape = Shape { devices: 4 + (seed % 3) as usize, ..shape(seed) };
        let problem = problem(shape, seed);
        let mut settings = settings(objective(seed >> 3));
        if seed % 2 == 0 {
            settings.effort.exact_steps = 0;
            settings.effort.population = 16;
            settings.effort.generations = 8;
        }
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| planned(&problem, &settings))
        };
        let one = on(1);
        prop_assert_eq!(&one, &on(2));
        prop_assert_eq!(&one, &on(5));
    }

    #[test]
    fn more_of_anything_never_makes_a_plan_worse(seed: u64, what in 0_usize..4) {
        let shape = shape(seed);
        // Partitions are chosen for warm calls, so where calls are cold only a device more is sure to help.
        let detail = if what != 0 && shape.detail == Detail::Cold { Detail::Full } else { shape.detail };
        let uniform = Shape { two_kinds: TwoKinds::No, links: LinkKind::Uniform, detail, ..shape };
        let problem = problem(uniform, seed);
        let more = with_more(&problem, what);
        // Splitwise makes the strongest prefill, so more memory may take a replica from decoding: only a device that can
        // stay idle never hurts it.
        let objectives = [ObjectiveKind::Els, ObjectiveKind::Ft, ObjectiveKind::Splitwise];
        for objective in objectives.into_iter().take(if what == 0 { 3 } else { 2 }) {
            let settings = settings(objective);
            let Some((before, plan)) = planned(&problem, &settings) else { continue };
            // A single replica does both phases and is not laid out for both at once: README, "not modelled".
            if plan.replicas.len() < 2 {
                continue;
            }
            let (after, _) = planned(&more, &settings).expect("still has a plan");
            prop_assert!(after <= before * (1.0 + 1e-5), "{objective:?}: {after} after {before}");
        }
    }

    #[test]
    fn no_plan_beats_the_bound(seed: u64) {
        let problem = problem(shape(seed), seed);
        for objective in [ObjectiveKind::Els, ObjectiveKind::Ft, ObjectiveKind::Splitwise] {
            if let Ok(solution) = solve(&problem, &settings(objective)) {
                let bound = solution.bound.unwrap();
                prop_assert!(bound <= solution.score * (1.0 + 1e-9), "{objective:?}: {bound} {}", solution.score);
            }
        }
    }

    #[test]
    fn one_more_device_never_makes_waiting_longer(seed: u64) {
        let shape = Shape { devices: 1 + (seed % 4) as usize, ..shape(seed) };
        let problem = problem(shape, seed);
        let settings = settings(ObjectiveKind::Queue);
        if let Some((before, _)) = planned(&problem, &settings) {
            let (after, _) = planned(&with_more(&problem, 0), &settings).expect("still has a plan");
            prop_assert!(after <= before * (1.0 + 1e-9), "{after} after {before}");
        }
    }

    #[test]
    fn a_smaller_encoding_is_used_only_where_it_gains(seed: u64) {
        let mut problem = problem(Shape { links: LinkKind::Uniform, ..shape(seed) }, seed);
        if let Some(quality) = &mut problem.links.otherwise {
            quality.bandwidth.0 = 1e5 * 10_f64.powf(Rng::new(seed).between(0.0, 4.0));
        }
        let auto = Settings { encoding: EncodingRule::WhereItBinds, ..settings(ObjectiveKind::Els) };
        let exact = settings(ObjectiveKind::Els);
        if let (Some((with, plan)), Some((without, _))) = (planned(&problem, &auto), planned(&problem, &exact)) {
            // Within the 1 % that exactness may cost.
            prop_assert!(with <= without * 1.011 + 1e-9, "{with} instead of {without}");
            let one_device = plan.replicas.iter().filter(|r| r.stages.len() == 1);
            prop_assert!(one_device.flat_map(|r| &r.stages).all(|s| s.encoding == LinkEncoding::F32));
        }
    }
}

/// A device, a slot's worth of memory on each device, bandwidth, or all of it.
fn with_more(problem: &Problem, what: usize) -> Problem {
    let mut more = problem.clone();
    if what == 0 || what == 3 {
        let (mut device, mut profile) = (more.devices[0].clone(), more.profiles[0].clone());
        device.id = DeviceId("one-more".into());
        device.node = NodeId("one-more".into());
        profile.device = device.id.clone();
        more.devices.push(device);
        more.profiles.push(profile);
    }
    if what == 1 || what == 3 {
        let slot = Bytes(u64::from(more.workload.slot_context) * 2048 * u64::from(more.model.n_layer()));
        for device in &mut more.devices {
            device.memory = match device.memory {
                DeviceMemory::Discrete { vram, ram } => DeviceMemory::Discrete { vram: vram + slot, ram },
                DeviceMemory::Unified { total } => DeviceMemory::Unified { total: total + slot },
            };
        }
    }
    if what == 2 || what == 3 {
        if let Some(quality) = &mut more.links.otherwise {
            quality.bandwidth.0 *= 1.7;
        }
        for link in &mut more.links.measured {
            link.quality.bandwidth.0 *= 1.7;
        }
    }
    more
}

#[test]
fn a_model_is_not_split_where_one_device_is_better() {
    // Two devices that each hold the model, on a link that would cost more than it gains.
    let mut problem = problem(Shape { types: 1, ..Shape::of(2) }, 1);
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(40_000_000_000) };
    }
    if let Some(quality) = &mut problem.links.otherwise {
        quality.one_way_latency = Millis(200.0);
    }
    for objective in ObjectiveKind::ALL {
        let (_, plan) = planned(&problem, &settings(objective)).unwrap();
        assert!(plan.replicas.iter().all(|r| r.stages.len() == 1), "{objective:?}: {plan:?}");
    }
}

#[test]
fn cut_points_are_kept_to() {
    let mut cut = settings(ObjectiveKind::Els);
    cut.cut_points = Some(vec![6, 12, 18]);
    for seed in 0..10 {
        let problem = problem(Shape::of(4), seed);
        if let Some((_, plan)) = planned(&problem, &cut) {
            let starts = plan.replicas.iter().flat_map(|r| &r.stages).map(|s| s.layers.start());
            assert!(starts.into_iter().all(|start| start % 6 == 0));
        }
    }
}

#[test]
fn ranges_that_the_model_forbids_are_never_stages() {
    let rules = [
        RangeRule::StartMultiple { step: 4 },
        RangeRule::SlidingBlock,
        RangeRule::ForbiddenLength { length: 9 },
        RangeRule::BothMemories,
        RangeRule::WholeOnly,
    ];
    let mut stages = 0;
    for (rule, seed) in rules.into_iter().flat_map(|rule| (0..8).map(move |seed| (rule, seed))) {
        let shape = Shape { two_kinds: TwoKinds::Yes, detail: Detail::Full, ..Shape::of(4) };
        let mut problem = problem(shape, seed);
        problem.model.range_rules = vec![rule];
        if let Some((_, plan)) = planned(&problem, &settings(ObjectiveKind::Els)) {
            for stage in plan.replicas.iter().flat_map(|replica| &replica.stages) {
                assert_eq!(problem.model.check_range(stage.layers), Ok(()));
                stages += 1;
            }
        }
    }
    assert!(stages > 50, "{stages}");
}

#[test]
fn what_limits_a_replica_is_said() {
    let mut seen = Vec::new();
    for seed in 0..30 {
        let mut problem = problem(Shape::of(4), seed);
        if seed % 3 == 0 {
            problem.workload.min_rate = TokensPerSecond(20.0);
        }
        if seed % 3 == 1 {
            problem.workload.max_slots = 4;
        }
        problem.workload.arrivals = Arrivals::Every(Millis(1.0));
        if let Some((_, plan)) = planned(&problem, &settings(ObjectiveKind::Els)) {
            seen.extend(plan.replicas.iter().map(|r| std::mem::discriminant(&r.limit)));
        }
    }
    // No device holds the model, and rows travel slowly.
    let mut problem = problem(Shape::of(6), 4);
    for device in &mut problem.devices {
        device.memory = DeviceMemory::Unified { total: Bytes(4_500_000_000) };
    }
    problem.workload.min_rate = TokensPerSecond(0.1);
    if let Some(quality) = &mut problem.links.otherwise {
        quality.bandwidth.0 = 1e5;
    }
    let (_, plan) = planned(&problem, &settings(ObjectiveKind::Els)).unwrap();
    seen.extend(plan.replicas.iter().map(|r| std::mem::discriminant(&r.limit)));
    for limit in [Limit::Stage(0), Limit::Link(0), Limit::Memory, Limit::Qos, Limit::SlotCap] {
        assert!(seen.contains(&std::mem::discriminant(&limit)), "{limit:?} never limits");
    }
}
