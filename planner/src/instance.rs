//! A problem on dense ordinals: devices and types of blocks are small integers, times are `f64` seconds, sizes `f64`
//! bytes, and every curve is already read at the points the search asks for.
//!
//! Devices are put in an order that depends on what they can do and never on their names, so that names and the order
//! of the input change nothing but names. Devices that can stand in for each other form a **class**.

mod order;
mod processor;
mod read;

use cluster::{ColdCall, DeviceId, LayerRange, Millis, ModelShape};

use crate::partition::Master;
use crate::problem::{Problem, ProblemError};
use crate::settings::{BlockDetail, DecodeReading, Settings};

use order::{canonical_order, classes_of, links_of};
pub(crate) use processor::{
    ByVisit, DEPTH_GRID, PREFILL_GRID, Processor, Visit, at_depth, at_tokens, chunks,
};
pub(crate) use read::Handed;
use read::{Reader, kinds_of, shares_of, window_of};

/// A device.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DenseDevice {
    pub gpu: Option<Processor>,
    pub cpu: Option<Processor>,
    /// Bytes for weights, cache and buffers on the GPU (all memory where it is unified).
    pub gpu_bytes: f64,
    /// The same on the CPU's side; zero where memory is unified.
    pub cpu_bytes: f64,
    pub prefill_buffer: f64,
    pub decode_buffer: f64,
    /// What a stage's process takes besides weights and cache, where its costs were measured; the buffers above otherwise.
    pub process: Option<ProcessMemory>,
    pub overhead: f64,
    /// Seconds of looking token embeddings up, if it is the first stage.
    pub embedding: Option<ByVisit>,
    /// What a call takes longer, by the time from one call's end to the next one's without that: what is left of it is the
    /// gap.
    pub cold: Option<ColdCall>,
}

/// Bytes of a stage's process besides weights and cache, by slots: of the master, and of any other stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProcessMemory {
    /// Compute buffers, beside the blocks.
    pub compute: [Vec<f64>; 2],
    /// Code, runtime and vocabulary, in the host's memory.
    pub runtime: [Vec<f64>; 2],
    /// Whether the GPU's memory is the host's.
    pub unified: bool,
}

/// What a stage must have room for besides blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffers {
    Prefill,
    Decode,
    Both,
}

/// Bytes for blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Room {
    pub gpu: f64,
    pub cpu: f64,
}

impl DenseDevice {
    fn buffer(&self, buffers: Buffers) -> f64 {
        match buffers {
            Buffers::Prefill => self.prefill_buffer,
            Buffers::Decode => self.decode_buffer,
            Buffers::Both => self.prefill_buffer.max(self.decode_buffer),
        }
    }

    /// Bytes that a stage takes beside its blocks, and in the host's memory.
    fn besides(&self, buffers: Buffers, master: Master, slots: usize) -> (f64, f64) {
        let Some(process) = &self.process else { return (self.buffer(buffers), 0.0) };
        let which = usize::from(master == Master::No);
        let at = |by_slots: &[f64]| by_slots[slots.min(by_slots.len() - 1)];
        let (compute, runtime) = (at(&process.compute[which]), at(&process.runtime[which]));
        if process.unified { (compute + runtime, 0.0) } else { (compute, runtime) }
    }

    /// Whether norm and head are on the GPU when this device is the master: if it has room for them.
    pub(crate) fn head_on_gpu(&self, head_bytes: f64) -> bool {
        let (besides, _) = self.besides(Buffers::Both, Master::Yes, 1);
        self.gpu.is_some() && (self.cpu.is_none() || self.gpu_bytes >= head_bytes + besides)
    }

    /// The processor that computes norm and head when this device is the master.
    pub(crate) fn head_processor(&self, head_bytes: f64) -> Option<&Processor> {
        if self.head_on_gpu(head_bytes) { self.gpu.as_ref() } else { self.cpu.as_ref() }
    }

    /// Seconds that a call takes longer if the next is that much later than a warm one would end.
    pub(crate) fn cold_call(&self, slack: f64) -> f64 {
        let after = |cold: &ColdCall| cold.after(Millis(slack.max(0.0) * 1e3)).0 / 1e3;
        self.cold.as_ref().map_or(0.0, after)
    }

    /// Seconds of looking embeddings up.
    pub(crate) fn embedding(&self, visit: Visit) -> f64 {
        self.embedding.as_ref().map_or(0.0, |embedding| embedding.at(visit))
    }
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Work {
    pub prompt: f64,
    pub output: f64,
    pub interval: f64,
    pub requests: f64,
    /// The longest time per output token that keeps the speed asked for.
    pub max_tpot: f64,
    pub max_slots: usize,
}

/// The whole problem, ready for searching.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    /// Type of each block.
    pub kind_of: Vec<u16>,
    /// Whether all blocks have one type.
    pub uniform: bool,
    /// Bytes of a block and of its cache: `[slots][type]`, slots from 0.
    need: Vec<Vec<f64>>,
    /// What a cache weighs when it is handed over, by type of block.
    pub handed: Vec<Handed>,
    /// Tokens that a slot has room for.
    pub context: f64,
    /// Tokens of the largest sliding window.
    pub window: f64,
    pub head_bytes: f64,
    /// Bytes of what every stage holds besides its blocks.
    pub global_bytes: f64,
    /// Bytes of one hidden row as f32.
    pub row_bytes: f64,
    pub devices: Vec<DenseDevice>,
    pub names: Vec<DeviceId>,
    /// Class of each device, and devices of each class.
    pub class_of: Vec<usize>,
    pub classes: Vec<Vec<usize>>,
    /// Seconds per byte and latency from device to device; infinite where they cannot talk.
    links: Vec<(f64, f64)>,
    /// Set where every pair has the same link.
    pub uniform_links: bool,
    /// Blocks per second of the fastest type on the faster processor: `[device][rows]`.
    block_rates: Vec<f64>,
    pub work: Work,
    pub serial: bool,
    pub prefill_chunk: f64,
    /// Whether a stage may begin at a block.
    pub may_start: Vec<bool>,
    /// Whether blocks `[start, end)` may be a stage, by `start · (blocks + 1) + end`, where the model has rules about
    /// that.
    ranges: Option<Vec<bool>>,
}

impl Instance {
    /// Checks a problem and makes it dense.
    pub(crate) fn new(problem: &Problem, settings: &Settings) -> Result<Self, Vec<ProblemError>> {
        let errors = problem.check();
        if !errors.is_empty() {
            return Err(errors);
        }
        let (kinds, kind_of) = kinds_of(&problem.model);
        let averaged = settings.blocks == BlockDetail::Averaged && kinds.len() > 1;
        let shares = averaged.then(|| shares_of(&kind_of, kinds.len()));
        let reader = Reader { problem, settings, kinds: &kinds, shares: shares.as_deref() };
        let read: Vec<DenseDevice> = (0..problem.devices.len()).map(|d| reader.device(d)).collect();
        let order = canonical_order(problem, &read);
        let devices: Vec<DenseDevice> = order.iter().map(|&d| read[d].clone()).collect();
        let links = links_of(problem, &order);
        let n = devices.len();
        let uniform_links = (0..n * n).all(|i| i % (n + 1) == 0 || links[i] == links[1]);
        let class_of = classes_of(&devices, &links, uniform_links);
        let mut classes = vec![Vec::new(); class_of.iter().max().map_or(0, |&c| c + 1)];
        for (device, &class) in class_of.iter().enumerate() {
            classes[class].push(device);
        }
        let n_blocks = kind_of.len();
        let kind_of = if averaged { vec![0; n_blocks] } else { kind_of };
        Ok(Self {
            uniform: averaged || kinds.len() == 1,
            block_rates: devices
                .iter()
                .flat_map(|d| block_rates(d, problem.workload.max_slots as usize))
                .collect(),
            kind_of,
            need: reader.needs(),
            handed: reader.handed(),
            context: f64::from(problem.workload.slot_context),
            window: window_of(&problem.model),
            head_bytes: problem.model.head_bytes.0 as f64,
            global_bytes: problem.model.global_bytes.0 as f64,
            row_bytes: f64::from(problem.model.n_embd) * 4.0,
            names: order.iter().map(|&d| problem.devices[d].id.clone()).collect(),
            devices,
            class_of,
            classes,
            links,
            uniform_links,
            work: work_of(problem),
            serial: settings.reading == DecodeReading::Serial,
            prefill_chunk: f64::from(settings.prefill_chunk.max(1)),
            may_start: may_start(settings.cut_points.as_deref(), n_blocks),
            ranges: (!problem.model.range_rules.is_empty()).then(|| ranges_of(&problem.model)),
        })
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.kind_of.len()
    }

    /// Bytes of a block with the caches of so many slots, by type.
    pub(crate) fn need(&self, slots: usize) -> &[f64] {
        &self.need[slots.min(self.need.len() - 1)]
    }

    /// Blocks per second of a device at its fastest, in decode steps of so many rows.
    pub(crate) fn block_rate(&self, device: usize, rows: usize) -> f64 {
        self.block_rates[device * (self.work.max_slots + 1) + rows]
    }

    /// Seconds per byte and latency of a link.
    pub(crate) fn link(&self, from: usize, to: usize) -> (f64, f64) {
        self.links[from * self.devices.len() + to]
    }

    /// Whether any two devices have no link.
    pub(crate) fn some_cannot_talk(&self) -> bool {
        self.links.iter().any(|link| link.0.is_infinite())
    }

    /// Whether stages may be cut anywhere.
    pub(crate) fn free_cuts(&self) -> bool {
        self.ranges.is_none() && self.may_start.iter().all(|&may| may)
    }

    /// Whether blocks `[start, end)` may be a stage.
    pub(crate) fn allows(&self, start: usize, end: usize) -> bool {
        let at = start * (self.n_blocks() + 1) + end;
        self.may_start[start] && self.ranges.as_ref().is_none_or(|ranges| ranges[at])
    }

    /// Bytes for blocks on a device that has so many slots, once all else is taken off. A GPU without room for a single
    /// block is not used, so that compute buffers are on the CPU.
    pub(crate) fn room(&self, device: usize, buffers: Buffers, master: Master, slots: usize) -> Room {
        let device = &self.devices[device];
        let (besides, on_host) = device.besides(buffers, master, slots);
        let besides = besides + self.global_bytes;
        let head = if master == Master::Yes { self.head_bytes } else { 0.0 };
        let (on_gpu, on_cpu) = if device.head_on_gpu(self.head_bytes) { (head, 0.0) } else { (0.0, head) };
        let gpu = device.gpu_bytes - besides - on_gpu;
        let smallest = self.need(slots).iter().copied().fold(f64::INFINITY, f64::min);
        if device.gpu.is_some() && (gpu >= smallest || device.cpu.is_none()) {
            Room { gpu, cpu: device.cpu_bytes - on_host - on_cpu }
        } else {
            Room { gpu: -1.0, cpu: device.cpu_bytes - besides - on_host - on_cpu }
        }
    }

    /// The same problem with every device's times multiplied by a factor, and all links' too.
    pub(crate) fn perturbed(&self, device_factors: &[f64], link_factor: f64) -> Self {
        let mut other = self.clone();
        for (device, &factor) in other.devices.iter_mut().zip(device_factors) {
            device.gpu = device.gpu.as_ref().map(|p| p.slowed(factor));
            device.cpu = device.cpu.as_ref().map(|p| p.slowed(factor));
            device.embedding = device.embedding.as_ref().map(|e| e.scaled(factor));
        }
        other.block_rates = other.devices.iter().flat_map(|d| block_rates(d, other.work.max_slots)).collect();
        for link in &mut other.links {
            link.0 *= link_factor;
        }
        other
    }
}

fn block_rates(device: &DenseDevice, max_slots: usize) -> Vec<f64> {
    let fastest = |rows: usize| {
        let processors = device.gpu.iter().chain(&device.cpu);
        let costs = processors.flat_map(|p| p.decode(rows)).copied();
        1.0 / costs.fold(f64::INFINITY, f64::min)
    };
    (0..=max_slots).map(fastest).collect()
}

fn work_of(problem: &Problem) -> Work {
    let workload = &problem.workload;
    Work {
        prompt: workload.mean_prompt(),
        output: workload.mean_output(),
        interval: workload.mean_interval().0 / 1e3,
        requests: workload.n_requests() as f64,
        max_tpot: 1.0 / workload.min_rate.0,
        max_slots: workload.max_slots as usize,
    }
}

fn may_start(cut_points: Option<&[u32]>, n_blocks: usize) -> Vec<bool> {
    (0..n_blocks as u32)
        .map(|block| block == 0 || cut_points.is_none_or(|cuts| cuts.contains(&block)))
        .collect()
}

fn ranges_of(model: &ModelShape) -> Vec<bool> {
    let n = model.n_layer();
    let pairs = (0..=n).flat_map(|start| (0..=n).map(move |end| (start, end)));
    let may = |(start, end)| LayerRange::new(start, end).is_ok_and(|r| model.check_range(r).is_ok());
    pairs.map(may).collect()
}
