//! Why there is no plan, in numbers.

use std::fmt;

use cluster::{Bytes, DeviceId, Role};

use crate::chain::Chain;
use crate::evaluate::{Evaluator, Roles};
use crate::grouping::states::{States, steps};
use crate::instance::Instance;
use crate::problem::Problem;
use crate::settings::{Settings, SlotRule};
use crate::solve::PlanError;

/// A model that does not fit, even once with one slot.
#[derive(Debug, Clone, PartialEq)]
pub struct NoFit {
    /// Blocks with one slot's cache, norm and head.
    pub need: Bytes,
    /// Room for them on all devices that can talk to each other.
    pub have: Bytes,
    /// What each device has and what it could hold.
    pub devices: Vec<DeviceRoom>,
    /// Blocks of the model.
    pub blocks: u32,
    /// The largest slot context with which it would fit, if there is one.
    pub fitting_context: Option<u32>,
    /// Whether it is links that are missing, not memory.
    pub links_missing: bool,
}

/// The room of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRoom {
    /// The device.
    pub device: DeviceId,
    /// Room for blocks once compute buffers are taken off.
    pub have: Bytes,
    /// Blocks that fit.
    pub blocks: u32,
}

impl fmt::Display for NoFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.links_missing {
            write!(
                f,
                "the model fits only on devices that cannot all talk to each other: add the missing links"
            )?;
        } else {
            write!(
                f,
                "the model does not fit: it needs {} with one slot, and there is room for {}",
                self.need, self.have
            )?;
        }
        for room in &self.devices {
            write!(f, "; {}: {} for {} of {} blocks", room.device, room.have, room.blocks, self.blocks)?;
        }
        if self.links_missing {
            return Ok(());
        }
        match self.fitting_context {
            Some(context) => write!(f, "; it would fit with a slot context of {context} tokens"),
            None => write!(f, "; {} more would do", self.need.saturating_sub(self.have)),
        }
    }
}

/// Finds out what stands in the way.
pub(crate) fn why_not(problem: &Problem, settings: &Settings, inst: &Instance) -> PlanError {
    if let Some((best, on)) = fastest(problem, settings) {
        return PlanError::TooSlow { asked: problem.workload.min_rate.0, best, on };
    }
    let fit = no_fit(problem, settings, inst);
    PlanError::NoFit(fit)
}

/// The fastest single request on any group of devices, if the model fits at all.
fn fastest(problem: &Problem, settings: &Settings) -> Option<(f64, Vec<DeviceId>)> {
    let mut problem = problem.clone();
    problem.workload.max_slots = 1;
    problem.workload.min_rate.0 = f64::MIN_POSITIVE.sqrt();
    let settings = Settings { slots: SlotRule::MostTokens, ..settings.clone() };
    let inst = Instance::new(&problem, &settings).ok()?;
    let evaluator = Evaluator::new(&inst, &settings, Roles::AlsoMixed);
    let sizes: Vec<usize> = inst.classes.iter().map(Vec::len).collect();
    let groups: Vec<Vec<u16>> = if steps(&sizes) <= settings.effort.exact_steps {
        let states = States::new(&evaluator);
        (1..=states.full()).map(|state| states.classes(state)).collect()
    } else {
        ends(&inst)
    };
    let mut best: Option<(f64, Vec<usize>)> = None;
    for group in groups {
        // One replica that does both is a plan, whatever the objective.
        let devices = evaluator.representatives(&group);
        let Some(replica) = evaluator.replica(&devices, Role::Mixed, SlotRule::MostTokens) else { continue };
        let speed = 1.0 / replica.sim.tpot[1];
        if best.as_ref().is_none_or(|b| speed > b.0) {
            best = Some((speed, devices));
        }
    }
    best.map(|(speed, devices)| (speed, devices.into_iter().map(|d| inst.names[d].clone()).collect()))
}

/// Of very many devices, the largest few together: from one up to a dozen.
fn ends(inst: &Instance) -> Vec<Vec<u16>> {
    let mut devices: Vec<usize> = (0..inst.devices.len()).collect();
    devices.sort_by(|&a, &b| room(inst, b).total_cmp(&room(inst, a)).then(a.cmp(&b)));
    (1..=devices.len().min(12))
        .map(|n| {
            let mut classes: Vec<u16> = devices[..n].iter().map(|&d| inst.class_of[d] as u16).collect();
            classes.sort_unstable();
            classes
        })
        .collect()
}

/// Bytes for blocks on a device that decodes.
fn room(inst: &Instance, device: usize) -> f64 {
    let device = &inst.devices[device];
    let gpu = if device.gpu.is_some() { (device.gpu_bytes - device.decode_buffer).max(0.0) } else { 0.0 };
    let cpu = if device.cpu.is_some() { device.cpu_bytes } else { 0.0 };
    let cpu = if device.gpu.is_some() { cpu } else { (cpu - device.decode_buffer).max(0.0) };
    gpu + cpu
}

fn no_fit(problem: &Problem, settings: &Settings, inst: &Instance) -> NoFit {
    let need: f64 =
        inst.kind_of.iter().map(|&kind| inst.need(1)[usize::from(kind)]).sum::<f64>() + inst.head_bytes;
    let largest = inst.need(1).iter().copied().fold(0.0, f64::max);
    let all: f64 = (0..inst.devices.len()).map(|d| room(inst, d)).sum();
    let devices = (0..inst.devices.len()).map(|d| DeviceRoom {
        device: inst.names[d].clone(),
        have: Bytes(room(inst, d) as u64),
        blocks: (room(inst, d) / largest) as u32,
    });
    NoFit {
        need: Bytes(need as u64),
        have: Bytes(all as u64),
        devices: devices.collect(),
        blocks: inst.n_blocks() as u32,
        fitting_context: fitting_context(problem, settings),
        links_missing: inst.some_cannot_talk() && connected(problem, settings),
    }
}

/// Whether the model would fit if all devices could talk.
fn connected(problem: &Problem, settings: &Settings) -> bool {
    let mut joined = problem.clone();
    joined.links = cluster::Links::uniform(cluster::LinkQuality {
        bandwidth: cluster::BytesPerSecond::from_mbit(1000.0),
        one_way_latency: cluster::Millis(0.1),
    });
    fastest(&joined, settings).is_some()
}

/// The largest power-of-two context with which a plan's memory would do.
fn fitting_context(problem: &Problem, settings: &Settings) -> Option<u32> {
    let mut smaller = problem.clone();
    let shortest = (problem.workload.prompt.mean + problem.workload.output.mean).ceil() as u32;
    let mut context = problem.workload.slot_context.checked_next_power_of_two()? / 2;
    while context >= shortest.max(1) {
        smaller.workload.slot_context = context;
        if fastest(&smaller, settings).is_some() {
            return Some(context);
        }
        context /= 2;
    }
    None
}

/// Whether a chain's partition has room for so many slots.
pub(crate) fn holds(inst: &Instance, chain: &Chain, slots: usize) -> bool {
    if slots > inst.work.max_slots {
        return false;
    }
    let need = inst.need(slots);
    chain.ranges().into_iter().enumerate().all(|(place, (start, end))| {
        let device = &inst.devices[chain.devices[place]];
        let cpu_end = start + chain.blocks[place].1 as usize;
        let bytes = |from: usize, to: usize| {
            inst.kind_of[from..to].iter().map(|&k| need[usize::from(k)]).sum::<f64>()
        };
        let master = if place + 1 == chain.len() { inst.head_bytes } else { 0.0 };
        let on_gpu = device.head_on_gpu(inst.head_bytes);
        let gpu_free = device.gpu_bytes - device.decode_buffer - if on_gpu { master } else { 0.0 };
        let cpu_free = device.cpu_bytes - if on_gpu { 0.0 } else { master };
        let gpu = bytes(cpu_end, end);
        (gpu == 0.0 || gpu <= gpu_free) && bytes(start, cpu_end) <= cpu_free
    })
}
