//! A problem on dense ordinals: devices and types of blocks are small integers, times are `f64` seconds, sizes `f64`
//! bytes, and every curve is already read at the points the search asks for.
//!
//! Devices are put in an order that depends on what they can do and never on their names, so that names and the order
//! of the input change nothing but names. Devices that can stand in for each other form a **class**.

mod order;
mod read;

use cluster::{Arrivals, DeviceId, LayerRange, ModelShape};

use crate::problem::{Problem, ProblemError};
use crate::settings::{BlockDetail, DecodeReading, Settings};

use order::{canonical_order, classes_of, links_of};
pub(crate) use read::chunks;
use read::{Reader, kinds_of, shares_of};

/// Tokens at which the prefill curve is tabulated; the simulator interpolates between them.
pub(crate) const PREFILL_GRID: [f64; 10] = [1., 8., 32., 64., 128., 256., 512., 1024., 2048., 4096.];

/// One processor of a device, tabulated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Processor {
    /// Seconds of one decode step of a block: `[rows][type]`, rows from 0.
    decode: Vec<f64>,
    /// Seconds of one prefill chunk of a block: `[point of PREFILL_GRID][type]`.
    prefill_grid: Vec<f64>,
    /// Seconds of the mean prompt's chunks for a block, by type.
    pub prefill: Vec<f64>,
    /// Seconds of norm and head, by rows.
    pub head: Vec<f64>,
    n_kinds: usize,
}

impl Processor {
    pub(crate) fn decode(&self, rows: usize) -> &[f64] {
        &self.decode[rows * self.n_kinds..][..self.n_kinds]
    }

    pub(crate) fn prefill_at(&self, point: usize) -> &[f64] {
        &self.prefill_grid[point * self.n_kinds..][..self.n_kinds]
    }

    /// The same processor, taking `factor` as long.
    fn slowed(&self, factor: f64) -> Self {
        let scale = |of: &[f64]| of.iter().map(|t| t * factor).collect();
        Self {
            decode: scale(&self.decode),
            prefill_grid: scale(&self.prefill_grid),
            prefill: scale(&self.prefill),
            head: scale(&self.head),
            n_kinds: self.n_kinds,
        }
    }
}

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
    pub overhead: f64,
}

impl DenseDevice {
    pub(crate) fn largest_buffer(&self) -> f64 {
        self.prefill_buffer.max(self.decode_buffer)
    }

    /// Whether norm and head are on the GPU when this device is the master: if it has room for them.
    pub(crate) fn head_on_gpu(&self, head_bytes: f64) -> bool {
        self.gpu.is_some() && (self.cpu.is_none() || self.gpu_bytes >= head_bytes + self.largest_buffer())
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
    /// Bytes of cache per token of a block, by type.
    pub kv_per_token: Vec<f64>,
    pub head_bytes: f64,
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
    /// Whether a range of blocks may be a stage, where the model has rules about that.
    pub rules: Option<ModelShape>,
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
        let order = canonical_order(problem, &reader);
        let devices: Vec<DenseDevice> = order.iter().map(|&d| reader.device(d)).collect();
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
            kv_per_token: reader.kv_per_token(),
            head_bytes: (problem.model.head_bytes + problem.model.global_bytes).0 as f64,
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
            rules: (!problem.model.range_rules.is_empty()).then(|| problem.model.clone()),
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
        self.rules.is_none() && self.may_start.iter().all(|&may| may)
    }

    /// Whether blocks `[start, end)` may be a stage.
    pub(crate) fn allows(&self, start: usize, end: usize) -> bool {
        self.may_start[start]
            && self.rules.as_ref().is_none_or(|model| {
                LayerRange::new(start as u32, end as u32).is_ok_and(|range| model.check_range(range).is_ok())
            })
    }

    /// The same problem with every device's times multiplied by a factor, and all links' too.
    pub(crate) fn perturbed(&self, device_factors: &[f64], link_factor: f64) -> Self {
        let mut other = self.clone();
        for (device, &factor) in other.devices.iter_mut().zip(device_factors) {
            device.gpu = device.gpu.as_ref().map(|p| p.slowed(factor));
            device.cpu = device.cpu.as_ref().map(|p| p.slowed(factor));
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
    let (mut prompt, mut output) = (workload.prompt.mean, workload.output.mean);
    let mut requests = f64::from(workload.requests);
    if let Arrivals::Trace(entries) = &workload.arrivals {
        let n = entries.len() as f64;
        prompt = entries.iter().map(|entry| f64::from(entry.prompt)).sum::<f64>() / n;
        output = entries.iter().map(|entry| f64::from(entry.output)).sum::<f64>() / n;
        requests = n;
    }
    Work {
        prompt,
        output,
        interval: workload.mean_interval().0 / 1e3,
        requests,
        max_tpot: 1.0 / workload.min_rate.0,
        max_slots: workload.max_slots as usize,
    }
}

fn may_start(cut_points: Option<&[u32]>, n_blocks: usize) -> Vec<bool> {
    (0..n_blocks as u32)
        .map(|block| block == 0 || cut_points.is_none_or(|cuts| cuts.contains(&block)))
        .collect()
}
