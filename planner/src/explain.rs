//! Why a plan is as it is: what limits it, and what would help most.

use std::ops::ControlFlow;

use cluster::{DeviceId, DeviceProfile, NodeId, Plan, Role};

use crate::problem::Problem;
use crate::search::Method;
use crate::settings::{Effort, Settings};
use crate::solve::{PlanError, Solution, solve_watched};
use crate::watch::{Progress, Watch, Work};

/// Kinds of device of which one more is tried: the fastest.
const KINDS: usize = 8;

/// Where requests spend their time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Neither phase is slower than requests come.
    Neither,
    /// Prompts.
    Prefill,
    /// Generation.
    Decode,
    /// Both together, on replicas that share their time between them.
    Both,
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
    /// What would help, the most helpful first.
    pub changes: Vec<Change>,
}

/// Explains a solution; plans several times more, once for each change.
///
/// Where the search was genetic, changes are judged by a shorter one, against a plan found as shortly.
pub fn explain(
    problem: &Problem,
    settings: &Settings,
    solution: &Solution,
    watch: &dyn Watch,
) -> Result<Explanation, PlanError> {
    let mut settings = settings.clone();
    let mut before = solution.score;
    let tried = changes(problem);
    let total = tried.len();
    let inner = |done: usize| {
        let progress = Progress { work: Work::Changes, done: done as u64, total: total as u64 };
        Inner { watch, progress }
    };
    if solution.method == Method::Genetic {
        settings.effort = shorter(settings.effort);
        before = solve_watched(problem, &settings, &inner(0))?.score;
    }
    let mut changes = Vec::new();
    for (done, (what, changed)) in tried.into_iter().enumerate() {
        match solve_watched(&changed, &settings, &inner(done)) {
            Ok(Solution { score, .. }) => changes.push(Change { what, score, gain: gain(before, score) }),
            Err(PlanError::Stopped) => return Err(PlanError::Stopped),
            // Half the context may be too short for what is asked: that is no remedy.
            Err(_) => {}
        }
    }
    changes.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    Ok(Explanation {
        bottleneck: bottleneck(problem, &solution.plan),
        limits: solution.plan.replicas.iter().map(limit).collect(),
        changes,
    })
}

/// Within a search that is one of several: says how many are done, and passes on whether to go on.
struct Inner<'a> {
    watch: &'a dyn Watch,
    progress: Progress,
}

impl Watch for Inner<'_> {
    fn progress(&self, _: Progress) -> ControlFlow<()> {
        self.watch.progress(self.progress)
    }
}

fn shorter(effort: Effort) -> Effort {
    Effort { population: effort.population / 4, generations: effort.generations / 6, ..effort }
}

/// The share of `before` that is gone.
fn gain(before: f64, after: f64) -> f64 {
    if before > 0.0 { (before - after) / before } else { 0.0 }
}

/// Which phase is slower than requests come, if replicas that do both divide their time as is best.
fn bottleneck(problem: &Problem, plan: &Plan) -> Phase {
    let workload = &problem.workload;
    // Requests per second, of replicas that do one and of replicas that do both.
    let (mut apart, mut shared) = ([0.0; 2], [0.0; 2]);
    for replica in &plan.replicas {
        let rates = if replica.role == Role::Mixed { &mut shared } else { &mut apart };
        rates[0] += replica.prefill_rate.0 / workload.mean_prompt();
        rates[1] += replica.decode_rate.0 / workload.mean_output();
    }
    let ([prefill, decode], [also_prefill, also_decode]) = (apart, shared);
    let sum = also_prefill + also_decode;
    let share = if sum > 0.0 { (decode + also_decode - prefill) / sum } else { 0.0 };
    let share = share.clamp(0.0, 1.0);
    let (prefill, decode) = (prefill + share * also_prefill, decode + (1.0 - share) * also_decode);
    let enough = 1e3 / workload.mean_interval().0;
    if prefill.min(decode) >= enough {
        Phase::Neither
    } else if share > 0.0 && share < 1.0 {
        Phase::Both
    } else if prefill < decode {
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
    let mut kinds: Vec<(usize, &DeviceProfile)> = Vec::new();
    for (index, device) in problem.devices.iter().enumerate() {
        let Some(profile) = problem.profile(&device.id) else { continue };
        let alike = |other: &(usize, &DeviceProfile)| {
            problem.devices[other.0].memory == device.memory
                && (&other.1.gpu, &other.1.cpu) == (&profile.gpu, &profile.cpu)
        };
        if !kinds.iter().any(alike) {
            kinds.push((index, profile));
        }
    }
    kinds.sort_by(|a, b| decode_ms(a.1).total_cmp(&decode_ms(b.1)));
    let copies = kinds.into_iter().take(KINDS);
    let mut changes: Vec<(String, Problem)> = copies
        .map(|(index, profile)| {
            (format!("one more device like {}", profile.device), with_copy(problem, index))
        })
        .collect();
    let mut faster = problem.clone();
    let qualities = faster.links.measured.iter_mut().map(|link| &mut link.quality);
    qualities.chain(&mut faster.links.otherwise).for_each(|quality| quality.bandwidth.0 *= 2.0);
    changes.push(("links twice as fast".to_owned(), faster));
    let half = problem.workload.slot_context / 2;
    if f64::from(half) >= problem.workload.mean_prompt() + problem.workload.mean_output() {
        let mut smaller = problem.clone();
        smaller.workload.slot_context = half;
        changes.push((format!("a slot context of {half} tokens"), smaller));
    }
    let mut slower = problem.clone();
    slower.workload.min_rate.0 *= 0.7;
    changes.push((format!("a minimum speed of {:.1} tok/s", slower.workload.min_rate.0), slower));
    changes
}

/// Time of one row on the faster processor.
fn decode_ms(profile: &DeviceProfile) -> f64 {
    let processors = profile.gpu.iter().chain(&profile.cpu);
    let blocks = processors.flat_map(|processor| &processor.blocks);
    blocks.map(|curves| curves.decode.at(1.0, 0.0).0).fold(f64::INFINITY, f64::min)
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
        more.profiles.push(DeviceProfile { device: device.id.clone(), ..profile.clone() });
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

#[cfg(test)]
mod tests {
    use cluster::{Arrivals, Limit, Millis, Prediction, ReplicaPlan, TokensPerSecond};

    use super::*;
    use crate::exactness::common::{self, Shape};

    #[test]
    fn the_slower_phase_is_found_even_where_replicas_do_both() {
        let mut problem = common::problem(Shape::of(1), 1);
        problem.workload.prompt.mean = 100.0;
        problem.workload.output.mean = 10.0;
        let replica = |role, prompts_per_second: f64, answers_per_second: f64| ReplicaPlan {
            role,
            stages: Vec::new(),
            slots: 1,
            prefill_rate: TokensPerSecond(prompts_per_second * 100.0),
            decode_rate: TokensPerSecond(answers_per_second * 10.0),
            tpot: Millis(0.0),
            limit: Limit::Memory,
        };
        let cases = [
            (vec![replica(Role::Prefill, 2.0, 0.0), replica(Role::Decode, 0.0, 2.0)], Phase::Neither),
            (vec![replica(Role::Prefill, 2.0, 0.0), replica(Role::Decode, 0.0, 0.5)], Phase::Decode),
            (vec![replica(Role::Prefill, 0.5, 0.0), replica(Role::Decode, 0.0, 2.0)], Phase::Prefill),
            // A third of its time for prompts, the rest for answers: 0.67 of each per second.
            (vec![replica(Role::Mixed, 2.0, 1.0)], Phase::Both),
            (vec![replica(Role::Mixed, 3.0, 1.6)], Phase::Neither),
            (vec![replica(Role::Prefill, 2.0, 0.0), replica(Role::Mixed, 2.0, 0.9)], Phase::Decode),
        ];
        problem.workload.arrivals = Arrivals::Every(Millis(1000.0));
        for (replicas, expected) in cases {
            let plan = Plan {
                objective: String::new(),
                replicas,
                idle: Vec::new(),
                prediction: Prediction::default(),
            };
            assert_eq!(bottleneck(&problem, &plan), expected, "{plan:?}");
        }
    }
}
