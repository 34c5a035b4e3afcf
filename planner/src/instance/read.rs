//! Reads a problem's curves and sizes at the points that the search needs. It knows nothing of searching.

use cluster::{Attention, BlockKind, BlockShape, DeviceMemory, ModelShape, ProcessorProfile};

use super::{DenseDevice, PREFILL_GRID, Processor};
use crate::problem::Problem;
use crate::settings::{DecodeReading, KvLayout, Settings};

/// A type of block: what makes two blocks cost the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DenseKind {
    kind: BlockKind,
    weight: f64,
    kv_elements: f64,
    state: f64,
}

pub(super) fn kinds_of(model: &ModelShape) -> (Vec<DenseKind>, Vec<u16>) {
    let mut kinds: Vec<DenseKind> = Vec::new();
    let kind_of = model.blocks.iter().map(|block| {
        let kind = dense_kind(block);
        let known = kinds.iter().position(|k| *k == kind);
        known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }) as u16
    });
    let kind_of = kind_of.collect();
    (kinds, kind_of)
}

pub(super) fn dense_kind(block: &BlockShape) -> DenseKind {
    DenseKind {
        kind: block.kind,
        weight: block.weight_bytes.0 as f64,
        kv_elements: block.kv_elements_per_token as f64,
        state: block.state_bytes_per_slot.0 as f64,
    }
}

/// The share of each type among the blocks.
pub(super) fn shares_of(kind_of: &[u16], n_kinds: usize) -> Vec<f64> {
    let mut shares = vec![0.0; n_kinds];
    for &kind in kind_of {
        shares[usize::from(kind)] += 1.0 / kind_of.len() as f64;
    }
    shares
}

/// Reads curves and sizes at the points the search needs.
pub(super) struct Reader<'a> {
    pub problem: &'a Problem,
    pub settings: &'a Settings,
    pub kinds: &'a [DenseKind],
    pub shares: Option<&'a [f64]>,
}

impl Reader<'_> {
    /// One value for each type, or their mean where blocks are averaged.
    fn by_kind(&self, of: impl Fn(&DenseKind) -> f64) -> Vec<f64> {
        match self.shares {
            None => self.kinds.iter().map(of).collect(),
            Some(shares) => vec![self.kinds.iter().zip(shares).map(|(kind, share)| of(kind) * share).sum()],
        }
    }

    pub(super) fn needs(&self) -> Vec<Vec<f64>> {
        let workload = &self.problem.workload;
        let context = f64::from(workload.slot_context);
        (0..=workload.max_slots)
            .map(|slots| {
                let slots = f64::from(slots);
                self.by_kind(|kind| {
                    let tokens = cached_tokens(kind.kind.attention, slots, context, self.settings.kv_layout);
                    kind.weight
                        + tokens * kind.kv_elements * self.settings.kv_element_bytes
                        + kind.state * slots
                })
            })
            .collect()
    }

    pub(super) fn kv_per_token(&self) -> Vec<f64> {
        self.by_kind(|kind| kind.kv_elements * self.settings.kv_element_bytes)
    }

    pub(super) fn device(&self, device: usize) -> DenseDevice {
        let device = &self.problem.devices[device];
        // `check` has made sure that every device has a profile.
        let profile = self.problem.profile(&device.id);
        let processor = |of: Option<&ProcessorProfile>| of.map(|p| self.processor(p));
        let (gpu_bytes, cpu_bytes) = match device.memory {
            DeviceMemory::Discrete { vram, ram } => (vram.0 as f64, ram.0 as f64),
            DeviceMemory::Unified { total } => (total.0 as f64, 0.0),
        };
        let buffers = profile.map(|p| p.buffers).unwrap_or_default();
        let gpu = processor(profile.and_then(|p| p.gpu.as_ref()));
        let cpu = processor(profile.and_then(|p| p.cpu.as_ref()));
        // A host whose one memory has no GPU to use it computes on the CPU.
        let (gpu_bytes, cpu_bytes) = match (gpu.is_some(), cpu.is_some()) {
            (false, true) => (0.0, gpu_bytes + cpu_bytes),
            (true, false) => (gpu_bytes, 0.0),
            _ => (gpu_bytes, cpu_bytes),
        };
        DenseDevice {
            gpu,
            cpu,
            gpu_bytes,
            cpu_bytes,
            prefill_buffer: buffers.prefill.0 as f64,
            decode_buffer: buffers.decode.0 as f64,
            overhead: profile.map_or(0.0, |p| p.hop_overhead.0 / 1e3),
        }
    }

    fn processor(&self, profile: &ProcessorProfile) -> Processor {
        let workload = &self.problem.workload;
        let max_slots = workload.max_slots as usize;
        let depth = match self.settings.reading {
            DecodeReading::Serial => f64::from(workload.slot_context),
            DecodeReading::Batched => workload.prompt.mean + workload.output.mean / 2.0,
        };
        let time = |kind: &DenseKind, prefill: bool, rows: f64, depth: f64| {
            profile.block(kind.kind).map_or(f64::INFINITY, |curves| {
                let surface = if prefill { &curves.prefill } else { &curves.decode };
                surface.at(rows, depth).0 / 1e3
            })
        };
        let decode = (0..=max_slots)
            .flat_map(|rows| self.by_kind(|kind| time(kind, false, rows.max(1) as f64, depth)))
            .collect();
        let prefill_grid = PREFILL_GRID
            .iter()
            .flat_map(|&tokens| self.by_kind(|kind| time(kind, true, tokens, 0.0)))
            .collect();
        let chunks = chunks(workload.prompt.mean, f64::from(self.settings.prefill_chunk.max(1)));
        let prefill = self.by_kind(|kind| {
            let (full, rest) = chunks;
            let chunk = f64::from(self.settings.prefill_chunk.max(1));
            let of_full = if full > 0.0 { full * time(kind, true, chunk, 0.0) } else { 0.0 };
            of_full + if rest > 0.0 { time(kind, true, rest, 0.0) } else { 0.0 }
        });
        let head = (0..=max_slots).map(|rows| profile.head.at(rows.max(1) as f64, 0.0).0 / 1e3).collect();
        Processor {
            decode,
            prefill_grid,
            prefill,
            head,
            n_kinds: self.shares.map_or(self.kinds.len(), |_| 1),
        }
    }
}

/// Whole chunks of a prompt, and the tokens left over.
pub(crate) fn chunks(tokens: f64, chunk: f64) -> (f64, f64) {
    let full = (tokens / chunk).floor();
    (full, tokens - full * chunk)
}

/// Tokens that the caches of all slots hold.
pub(super) fn cached_tokens(attention: Attention, slots: f64, context: f64, layout: KvLayout) -> f64 {
    match (attention, layout) {
        (Attention::Full, _) => slots * context,
        (Attention::Recurrent, _) => 0.0,
        (Attention::SlidingWindow { window }, KvLayout::PerSlot { n_ubatch }) => {
            let cells = window.saturating_add(n_ubatch).div_ceil(256).saturating_mul(256);
            slots * f64::from(cells).min(context)
        }
        (Attention::SlidingWindow { window }, KvLayout::Unified { n_ubatch }) => {
            (f64::from(window) * slots + f64::from(n_ubatch)).min(slots * context)
        }
    }
}
