//! Why a plan is as it is: what limits it, how far the next best is behind, and what would help most.

use cluster::{DeviceId, NodeId, Plan};

use crate::problem::Problem;
use crate::settings::Settings;
use crate::solve::{Solution, solve};
use crate::table::in_short;

/// Where requests spend their time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Neither phase is slower than requests come.
    Neither,
    /// Prompts.
    Prefill,
    /// Generation.
    Decode,
}

/// A change that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// In words.
    pub what: String,
    /// The score with it, in the objective's seconds.
    pub score: f64,
    /// By how much it is better, from 0 to 1.
    pub gain: f64,
}

/// An explanation of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The phase that cannot keep up.
    pub bottleneck: Phase,
    /// Each replica with what limits it.
    pub limits: Vec<String>,
    /// The next best plan in short, and by which share of its score it is worse.
    pub next_best: Option<(String, f64)>,
    /// What would help, the most helpful first.
    pub changes: Vec<Change>,
}

/// Explains a solution; plans several times more, once for each change.
pub fn explain(problem: &Problem, settings: &Settings, solution: &Solution) -> Explanation {
    let mut changes: Vec<Change> = changes(problem)
        .into_iter()
        .filter_map(|(what, changed)| {
            let score = solve(&changed, settings).ok()?.score;
            Some(Change { what, score, gain: gain(solution.score, score) })
        })
        .collect();
    changes.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    let next_best = solution.others.iter().find(|(_, plan)| in_short(plan) != in_short(&solution.plan));
    Explanation {
        bottleneck: bottleneck(problem, &solution.plan),
        limits: solution.plan.replicas.iter().map(limit).collect(),
        next_best: next_best.map(|(score, plan)| (in_short(plan), gain(*score, solution.score))),
        changes,
    }
}

/// The share of `before` that is gone.
fn gain(before: f64, after: f64) -> f64 {
    if before > 0.0 { (before - after) / before } else { 0.0 }
}

fn bottleneck(problem: &Problem, plan: &Plan) -> Phase {
    let workload = &problem.workload;
    let interval = workload.mean_interval().0 / 1e3;
    let prefill = workload.prompt.mean / plan.prefill_rate().0;
    let decode = workload.output.mean / plan.decode_rate().0;
    if prefill.max(decode) <= interval {
        Phase::Neither
    } else if prefill > decode {
        Phase::Prefill
    } else {
        Phase::Decode
    }
}

fn limit(replica: &cluster::ReplicaPlan) -> String {
    let devices: Vec<&str> = replica.stages.iter().map(|stage| stage.device.0.as_str()).collect();
    format!("{} on {}: {}", replica.role, devices.join(", "), replica.limit)
}

/// Problems with one thing more: one more of each kind of device, links twice as fast, half the slot, a lower speed.
fn changes(problem: &Problem) -> Vec<(String, Problem)> {
    let mut changes = Vec::new();
    let mut kinds: Vec<(usize, &cluster::DeviceProfile)> = Vec::new();
    for (index, device) in problem.devices.iter().enumerate() {
        let Some(profile) = problem.profile(&device.id) else { continue };
        let alike = |other: &(usize, &cluster::DeviceProfile)| {
            problem.devices[other.0].memory == device.memory
                && (&other.1.gpu, &other.1.cpu) == (&profile.gpu, &profile.cpu)
        };
        if !kinds.iter().any(alike) {
            kinds.push((index, profile));
            changes.push((format!("one more device like {}", device.id), with_copy(problem, index)));
        }
    }
    let mut faster = problem.clone();
    let qualities = faster.links.measured.iter_mut().map(|link| &mut link.quality);
    qualities.chain(&mut faster.links.otherwise).for_each(|quality| quality.bandwidth.0 *= 2.0);
    changes.push(("links twice as fast".to_owned(), faster));
    let half = problem.workload.slot_context / 2;
    if f64::from(half) >= problem.workload.prompt.mean + problem.workload.output.mean {
        let mut smaller = problem.clone();
        smaller.workload.slot_context = half;
        changes.push((format!("a slot context of {half} tokens"), smaller));
    }
    let mut slower = problem.clone();
    slower.workload.min_rate.0 *= 0.7;
    changes.push((format!("a minimum speed of {:.1} tok/s", slower.workload.min_rate.0), slower));
    changes
}

fn with_copy(problem: &Problem, index: usize) -> Problem {
    let mut more = problem.clone();
    let (mut device, original) = (problem.devices[index].clone(), &problem.devices[index]);
    let mut name = format!("{}+", original.id);
    while problem.devices.iter().any(|d| d.id.0 == name || d.node.0 == name) {
        name.push('+');
    }
    device.id = DeviceId(name.clone());
    device.node = NodeId(name.clone());
    if let Some(profile) = problem.profile(&original.id) {
        more.profiles.push(cluster::DeviceProfile { device: device.id.clone(), ..profile.clone() });
    }
    // It is plugged in where the original is.
    let copies: Vec<_> = problem
        .links
        .measured
        .iter()
        .flat_map(|link| {
            let renamed =
                |node: &NodeId| if *node == original.node { device.node.clone() } else { node.clone() };
            let moved = cluster::Link { from: renamed(&link.from), to: renamed(&link.to), ..link.clone() };
            (moved != *link).then_some(moved)
        })
        .collect();
    more.links.measured.extend(copies);
    more.devices.push(device);
    more
}
