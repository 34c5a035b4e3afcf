//! Why there is no plan, in numbers.

use std::fmt;

use cluster::{Bytes, DeviceId, DeviceMemory, NodeId, Role};

use crate::chain::Chain;
use crate::evaluate::{Evaluator, Replica, Roles};
use crate::grouping::states::{States, affordable};
use crate::instance::{Buffers, Instance};
use crate::layout::Layouter;
use crate::partition::Master;
use crate::problem::Problem;
use crate::settings::{Settings, SlotRule};
use crate::solve::PlanError;
use crate::watch::{Stopped, Watch};

/// A model that does not fit, even once with one slot.
#[derive(Debug, Clone, PartialEq)]
pub struct NoFit {
    /// Blocks with one slot's cache, norm and head.
    pub need: Bytes,
    /// Room for them on all devices.
    pub have: Bytes,
    /// What each device has and what it could hold.
    pub devices: Vec<DeviceRoom>,
    /// Blocks of the model.
    pub blocks: u32,
    /// The largest block with one slot's cache: what a device must have room for to be of use.
    pub largest_block: Bytes,
    /// The largest slot context with which it would fit, if there is one.
    pub fitting_context: Option<u32>,
    /// The least memory that one device would need more, and which, if that is enough.
    pub more_memory: Option<(DeviceId, Bytes)>,
    /// Hosts that cannot talk to each other, one way, where it is links that are missing and not memory.
    pub missing_links: Vec<(NodeId, NodeId)>,
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
        if self.missing_links.is_empty() {
            write!(
                f,
                "the model does not fit: it needs {} with one slot, its largest block {} of that, and there is room for \
                 {}",
                self.need, self.largest_block, self.have
            )?;
        } else {
            let named = self.missing_links.iter().take(NAMED);
            let pairs: Vec<String> = named.map(|(from, to)| format!("{from} to {to}")).collect();
            let more = self.missing_links.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            write!(
                f,
                "the model fits only on devices that cannot all talk to each other: add the missing links ({}{more})",
                pairs.join(", ")
            )?;
        }
        for room in self.devices.iter().take(NAMED) {
            write!(f, "; {} has {}, for {} of {} blocks", room.device, room.have, room.blocks, self.blocks)?;
        }
        if self.devices.len() > NAMED {
            write!(f, "; {} more devices", self.devices.len() - NAMED)?;
        }
        if !self.missing_links.is_empty() {
            return Ok(());
        }
        if let Some(context) = self.fitting_context {
            write!(f, "; it would fit with a slot context of {context} tokens")?;
        }
        if let Some((device, bytes)) = &self.more_memory {
            write!(f, "; it would fit with {bytes} more on {device}")?;
        }
        if self.fitting_context.is_none() && self.more_memory.is_none() {
            write!(f, "; add devices, or take a smaller quantisation")?;
        }
        Ok(())
    }
}

/// Devices and pairs that a message names before it only counts them.
const NAMED: usize = 12;

/// Devices beyond which it is not looked for how much more memory on one would do: one of so many is no remedy.
const MANY: usize = 64;

/// Finds out what stands in the way.
pub(crate) fn why_not(
    problem: &Problem,
    settings: &Settings,
    (inst, watch): (&Instance, &dyn Watch),
) -> PlanError {
    match fastest(problem, settings, watch) {
        Err(Stopped) => PlanError::Stopped,
        Ok(Some((best, on))) => PlanError::TooSlow { asked: problem.workload.min_rate.0, best, on },
        Ok(None) => PlanError::NoFit(Box::new(no_fit(problem, settings, inst))),
    }
}

/// The fastest single request on any group of devices, if the model fits at all.
fn fastest(
    problem: &Problem,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<Option<(f64, Vec<DeviceId>)>, Stopped> {
    let mut problem = problem.clone();
    problem.workload.max_slots = 1;
    problem.workload.min_rate.0 = f64::MIN_POSITIVE.sqrt();
    let settings = Settings { slots: SlotRule::MostTokens, ..settings.clone() };
    let Ok(inst) = Instance::new(&problem, &settings) else { return Ok(None) };
    let evaluator = Evaluator::new(&inst, &settings, Roles::AlsoMixed);
    let groups: Vec<Vec<u16>> = if affordable(&evaluator, &settings.effort) {
        let states = States::new(&evaluator, watch)?;
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
    let named = |devices: Vec<usize>| devices.into_iter().map(|d| inst.names[d].clone()).collect();
    Ok(best.map(|(speed, devices)| (speed, named(devices))))
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

/// Bytes for blocks with one slot on a device that decodes.
fn room(inst: &Instance, device: usize) -> f64 {
    let room = inst.room(device, Buffers::Decode, Master::No, 1);
    room.gpu.max(0.0) + room.cpu.max(0.0)
}

fn no_fit(problem: &Problem, settings: &Settings, inst: &Instance) -> NoFit {
    let blocks: f64 = inst.kind_of.iter().map(|&kind| inst.need(1)[usize::from(kind)]).sum();
    let largest = inst.need(1).iter().copied().fold(0.0, f64::max);
    let all: f64 = (0..inst.devices.len()).map(|d| room(inst, d)).sum();
    let devices = (0..inst.devices.len()).map(|d| DeviceRoom {
        device: inst.names[d].clone(),
        have: Bytes(room(inst, d) as u64),
        blocks: (room(inst, d) / largest) as u32,
    });
    let missing_links = if connected(problem, settings) { missing_links(problem) } else { Vec::new() };
    NoFit {
        need: Bytes((blocks + inst.head_bytes) as u64),
        have: Bytes(all as u64),
        devices: devices.collect(),
        blocks: inst.n_blocks() as u32,
        largest_block: Bytes(largest as u64),
        fitting_context: fitting_context(problem, settings),
        more_memory: more_memory(problem, settings, inst),
        missing_links,
    }
}

/// Whether the model fits with one slot on the largest few devices: as good as all groups for saying so, since a larger
/// device can stand in for a smaller one.
fn fits(problem: &Problem, settings: &Settings) -> bool {
    let mut problem = problem.clone();
    problem.workload.max_slots = 1;
    problem.workload.min_rate.0 = f64::MIN_POSITIVE.sqrt();
    let Ok(inst) = Instance::new(&problem, settings) else { return false };
    let evaluator = Evaluator::new(&inst, settings, Roles::AlsoMixed);
    let layouter = Layouter { inst: &inst, encoding: settings.encoding };
    ends(&inst).into_iter().any(|group| {
        let devices = evaluator.representatives(&group);
        layouter.decode(&devices, SlotRule::MostTokens, Buffers::Both).is_some()
    })
}

/// Whether the model would fit if all devices could talk.
fn connected(problem: &Problem, settings: &Settings) -> bool {
    let mut joined = problem.clone();
    joined.links = cluster::Links::uniform(cluster::LinkQuality {
        bandwidth: cluster::BytesPerSecond::from_mbit(1000.0),
        one_way_latency: cluster::Millis(0.1),
    });
    fits(&joined, settings)
}

fn missing_links(problem: &Problem) -> Vec<(NodeId, NodeId)> {
    let mut nodes: Vec<&NodeId> = problem.devices.iter().map(|device| &device.node).collect();
    nodes.sort();
    nodes.dedup();
    let pairs = nodes.iter().flat_map(|from| nodes.iter().map(move |to| (*from, *to)));
    let missing = pairs.filter(|(from, to)| from != to && problem.links.between(from, to).is_none());
    missing.map(|(from, to)| (from.clone(), to.clone())).collect()
}

/// The largest power-of-two context with which a plan's memory would do.
fn fitting_context(problem: &Problem, settings: &Settings) -> Option<u32> {
    let mut smaller = problem.clone();
    let shortest = (problem.workload.mean_prompt() + problem.workload.mean_output()).ceil() as u32;
    let mut context = problem.workload.slot_context.checked_next_power_of_two()? / 2;
    while context >= shortest.max(1) {
        smaller.workload.slot_context = context;
        if fits(&smaller, settings) {
            return Some(context);
        }
        context /= 2;
    }
    None
}

/// The device whose memory would have to grow least, of the largest few, and by how much.
fn more_memory(problem: &Problem, settings: &Settings, inst: &Instance) -> Option<(DeviceId, Bytes)> {
    if inst.devices.len() > MANY {
        return None;
    }
    // To the next 16 MiB: nobody buys memory more finely.
    let step = Bytes::from_mib(16);
    let largest = ends(inst).pop()?.len();
    let mut devices: Vec<usize> = (0..inst.devices.len()).collect();
    devices.sort_by(|&a, &b| room(inst, b).total_cmp(&room(inst, a)).then(a.cmp(&b)));
    let needed = inst.kind_of.iter().map(|&kind| inst.need(1)[usize::from(kind)]).sum::<f64>();
    let most = ((needed + inst.head_bytes + 1e9) / step.0 as f64).ceil() as u64;
    let mut best: Option<(DeviceId, u64)> = None;
    for name in devices[..largest].iter().map(|&d| &inst.names[d]) {
        let with = |steps: u64| fits(&grown(problem, name, step * steps), settings);
        let limit = best.as_ref().map_or(most, |(_, steps)| steps - 1);
        if !with(limit) {
            continue;
        }
        let (mut low, mut high) = (0, limit);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if with(middle) { high = middle } else { low = middle }
        }
        best = Some((name.clone(), high));
    }
    best.map(|(name, steps)| (name, step * steps))
}

/// The problem with more memory on one device: on its GPU, if it has one.
fn grown(problem: &Problem, name: &DeviceId, by: Bytes) -> Problem {
    let mut grown = problem.clone();
    let has_gpu = problem.profile(name).is_some_and(|profile| profile.gpu.is_some());
    for device in grown.devices.iter_mut().filter(|device| device.id == *name) {
        device.memory = match device.memory {
            DeviceMemory::Discrete { vram, ram } if has_gpu => {
                DeviceMemory::Discrete { vram: vram + by, ram }
            }
            DeviceMemory::Discrete { vram, ram } => DeviceMemory::Discrete { vram, ram: ram + by },
            DeviceMemory::Unified { total } => DeviceMemory::Unified { total: total + by },
        };
    }
    grown
}

/// Whether a replica's partition has room for so many slots.
pub(crate) fn holds(inst: &Instance, replica: &Replica, slots: usize) -> bool {
    let buffers = match replica.role {
        Role::Prefill => Buffers::Prefill,
        Role::Decode => Buffers::Decode,
        Role::Mixed => Buffers::Both,
    };
    has_room(inst, (&replica.chain, buffers), slots)
}

/// The same of a chain.
pub(crate) fn has_room(inst: &Instance, (chain, buffers): (&Chain, Buffers), slots: usize) -> bool {
    if slots > inst.work.max_slots {
        return false;
    }
    let need = inst.need(slots);
    chain.ranges().into_iter().enumerate().all(|(place, (start, end))| {
        let master = if place + 1 == chain.len() { Master::Yes } else { Master::No };
        let room = inst.room(chain.devices[place], buffers, master, slots);
        let cpu_end = start + chain.blocks[place].1 as usize;
        let bytes = |from: usize, to: usize| {
            inst.kind_of[from..to].iter().map(|&k| need[usize::from(k)]).sum::<f64>()
        };
        let (gpu, cpu) = (bytes(cpu_end, end), bytes(start, cpu_end));
        (gpu == 0.0 || gpu <= room.gpu) && (cpu == 0.0 || cpu <= room.cpu)
    })
}
