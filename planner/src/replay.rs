//! A given plan under a workload: for predictions, and for comparing plans with each other.

use cluster::{Plan, Prediction, ReplicaPlan, Role, StagePlan};

use crate::chain::{Chain, forward_hops};
use crate::diagnose::holds;
use crate::evaluate::{Replica, replica};
use crate::instance::Instance;
use crate::objective::{Trials, sim_cluster};
use crate::problem::Problem;
use crate::settings::Settings;
use crate::sim::{ReplicaUse, Report, SimCluster, requests};
use crate::solve::{PlanError, prediction};

/// The plan's replicas, for the simulator.
pub fn cluster_of(problem: &Problem, settings: &Settings, plan: &Plan) -> Result<SimCluster, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let replicas = replicas_of(&inst, plan)?;
    let references: Vec<&Replica> = replicas.iter().collect();
    Ok(sim_cluster(&inst, &references))
}

/// What requests go through under the plan, the mean over workloads drawn from `seeds`.
pub fn predict(
    problem: &Problem,
    settings: &Settings,
    plan: &Plan,
    seeds: &[u64],
) -> Result<Prediction, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let replicas = replicas_of(&inst, plan)?;
    let references: Vec<&Replica> = replicas.iter().collect();
    let drawn = seeds.iter().map(|&seed| requests(&problem.workload, seed));
    let trials = Trials::new(drawn.collect(), inst.work.max_tpot);
    let summary = trials.summary(&inst, &references);
    summary.as_ref().map(prediction).ok_or_else(|| mismatch("no replica prefills, or none decodes"))
}

/// How fast a replica is in either phase, whatever it is used for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimSpeed {
    /// Prompt tokens a second, at the workload's mean prompt.
    pub prompt_tokens_per_second: f64,
    /// Seconds per token with one request.
    pub tpot_alone: f64,
    /// The same with every slot busy.
    pub tpot_full: f64,
}

/// How fast the plan's replicas are in either phase.
pub fn speeds_of(problem: &Problem, settings: &Settings, plan: &Plan) -> Result<Vec<SimSpeed>, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let replicas = plan.replicas.iter().map(|one| ReplicaPlan { role: Role::Mixed, ..one.clone() });
    let mixed = Plan { replicas: replicas.collect(), ..plan.clone() };
    let of = |replica: Replica| SimSpeed {
        prompt_tokens_per_second: inst.work.prompt / replica.sim.prefill.of(inst.work.prompt).slowest,
        tpot_alone: replica.sim.tpot(1),
        tpot_full: replica.sim.tpot(replica.sim.slots),
    };
    Ok(replicas_of(&inst, &mixed)?.into_iter().map(of).collect())
}

/// How busy one stage and the link out of it were.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageUse {
    /// Share of the time in which the stage computed.
    pub stage: f64,
    /// Share of the time in which its link carried hidden rows; zero for the master.
    pub link: f64,
}

/// How busy each stage and link of each replica was in a simulation of the plan.
pub fn utilisation(
    problem: &Problem,
    settings: &Settings,
    plan: &Plan,
    report: &Report,
) -> Result<Vec<Vec<StageUse>>, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let replicas = replicas_of(&inst, plan)?;
    let of = |(replica, used): (&Replica, &ReplicaUse)| {
        let places = 0..replica.chain.devices.len();
        places.map(|place| stage_use(&inst, replica, used, (place, report.end))).collect()
    };
    Ok(replicas.iter().zip(&report.replicas).map(of).collect())
}

fn stage_use(inst: &Instance, replica: &Replica, used: &ReplicaUse, (place, end): (usize, f64)) -> StageUse {
    let chain = &replica.chain;
    let slowest = replica.sim.prefill.of(inst.work.prompt).slowest;
    let link = |rows: f64| {
        let pair = chain.devices.get(place..place + 2);
        pair.map_or(0.0, |pair| forward_hops(inst, pair, chain.encoding, rows).slowest)
    };
    let mut busy = StageUse {
        stage: used.prefilling * chain.prefill_stage(inst, place) / slowest,
        link: used.prefilling * link(inst.work.prompt) / slowest,
    };
    for (n, seconds) in used.decoding.iter().enumerate().skip(1).filter(|(_, seconds)| **seconds > 0.0) {
        let (tpot, g) = chain.time_per_token(inst, n);
        let rows = if inst.serial { 1 } else { n.div_ceil(g) };
        let steps = seconds / tpot * g as f64;
        busy.stage += steps * chain.decode_stage(inst, place, rows);
        busy.link += steps * link(rows as f64);
    }
    let share = |seconds: f64| if end > 0.0 { (seconds / end).min(1.0) } else { 0.0 };
    StageUse { stage: share(busy.stage), link: share(busy.link) }
}

/// The plan's replicas, by number, that need more memory than their devices have.
pub fn too_large(problem: &Problem, settings: &Settings, plan: &Plan) -> Result<Vec<usize>, PlanError> {
    let inst = Instance::new(problem, settings).map_err(PlanError::Problem)?;
    let replicas = replicas_of(&inst, plan)?;
    let too_large = replicas.iter().enumerate().filter(|(_, r)| !holds(&inst, r, r.chain.slots));
    Ok(too_large.map(|(number, _)| number).collect())
}

/// The plan's replicas with the times of the instance's curves.
pub(crate) fn replicas_of(inst: &Instance, plan: &Plan) -> Result<Vec<Replica>, PlanError> {
    let mut used = vec![false; inst.devices.len()];
    let of = |of: &ReplicaPlan| Ok(replica(inst, of.role, chain_of(inst, of, &mut used)?));
    plan.replicas.iter().map(of).collect()
}

fn chain_of(inst: &Instance, of: &ReplicaPlan, used: &mut [bool]) -> Result<Chain, PlanError> {
    let mut chain = Chain {
        devices: Vec::new(),
        blocks: Vec::new(),
        slots: of.slots as usize,
        encoding: of.stages.first().map(|stage| stage.encoding).unwrap_or_default(),
    };
    let mut next = 0;
    for stage in &of.stages {
        let device = inst.names.iter().position(|name| *name == stage.device);
        let device = device.ok_or_else(|| mismatch(format!("there is no device {}", stage.device)))?;
        if std::mem::replace(&mut used[device], true) {
            return Err(mismatch(format!("it uses device {} twice", stage.device)));
        }
        check_stage(inst, stage, (device, next))?;
        next = stage.layers.end();
        chain.devices.push(device);
        chain.blocks.push((stage.gpu_blocks, stage.cpu_blocks()));
    }
    if next as usize != inst.n_blocks() {
        return Err(mismatch(format!("a replica has {next} blocks, the model {}", inst.n_blocks())));
    }
    if chain.slots == 0 || chain.slots > inst.work.max_slots {
        return Err(mismatch(format!(
            "a replica has {} slots: the workload allows 1 to {}",
            chain.slots, inst.work.max_slots
        )));
    }
    let ring = chain.devices.iter().zip(chain.devices.iter().cycle().skip(1));
    match ring.filter(|(from, to)| from != to).find(|(from, to)| inst.link(**from, **to).0.is_infinite()) {
        None => Ok(chain),
        Some((&from, &to)) => {
            Err(mismatch(format!("there is no link from {} to {}", inst.names[from], inst.names[to])))
        }
    }
}

fn check_stage(inst: &Instance, stage: &StagePlan, (device, next): (usize, u32)) -> Result<(), PlanError> {
    let of_stage =
        |what: String| Err(mismatch(format!("blocks {} on {} {what}", stage.layers, stage.device)));
    let (start, end) = (stage.layers.start() as usize, stage.layers.end() as usize);
    if stage.layers.start() != next {
        return of_stage(format!("do not begin at {next}, where the stage before ends"));
    }
    if end > inst.n_blocks() {
        return of_stage(format!("are more than the model's {}", inst.n_blocks()));
    }
    if !inst.allows(start, end) {
        return of_stage("cannot be a stage of this model".to_owned());
    }
    if stage.gpu_blocks > stage.layers.len() {
        return of_stage(format!("cannot have {} on the GPU", stage.gpu_blocks));
    }
    let runs = &inst.devices[device];
    let missing =
        (stage.gpu_blocks > 0 && runs.gpu.is_none()) || (stage.cpu_blocks() > 0 && runs.cpu.is_none());
    if missing { of_stage("are on a processor that has no profile".to_owned()) } else { Ok(()) }
}

fn mismatch(what: impl Into<String>) -> PlanError {
    PlanError::Mismatch(what.into())
}
