//! Reads a problem's curves and sizes at the points that the search needs. It knows nothing of searching.

use cluster::{
    Attention, BlockKind, BlockShape, Bytes, CONTEXT_STEP, ColdCall, DeviceMemory, LayerRange, Load,
    MemoryCosts, Millis, ModelShape, ProcessorProfile, StageLoad, Surface, stage_memory,
};

use super::{ByVisit, DEPTH_GRID, DenseDevice, PREFILL_GRID, ProcessMemory, Processor, chunks};
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
        let steps = workload.slot_context.div_ceil(CONTEXT_STEP);
        let context = f64::from(steps.saturating_mul(CONTEXT_STEP));
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

    pub(super) fn handed(&self) -> Vec<Handed> {
        let bytes = |kind: &DenseKind| kind.kv_elements * self.settings.kv_element_bytes;
        let windowed = |kind: &DenseKind| matches!(kind.kind.attention, Attention::SlidingWindow { .. });
        let all = self.by_kind(|kind| if windowed(kind) { 0.0 } else { bytes(kind) });
        let within = self.by_kind(|kind| if windowed(kind) { bytes(kind) } else { 0.0 });
        let state = self.by_kind(|kind| kind.state);
        let parts = all.into_iter().zip(within).zip(state);
        parts
            .map(|((per_token, per_token_in_window), fixed)| Handed { per_token, per_token_in_window, fixed })
            .collect()
    }

    pub(super) fn device(&self, device: usize) -> DenseDevice {
        let device = &self.problem.devices[device];
        // `check` has made sure that every device has a profile.
        let profile = self.problem.profile(&device.id);
        let processor = |of: Option<&ProcessorProfile>| of.map(|p| self.processor(p));
        let buffers = profile.map(|p| p.buffers).unwrap_or_default();
        let gpu = processor(profile.and_then(|p| p.gpu.as_ref()));
        let cpu = processor(profile.and_then(|p| p.cpu.as_ref()));
        let (gpu_bytes, cpu_bytes) = match device.memory {
            DeviceMemory::Discrete { vram, ram } => (vram.0 as f64, ram.0 as f64),
            // A host whose one memory has no GPU to use it computes on the CPU.
            DeviceMemory::Unified { total } if gpu.is_none() => (0.0, total.0 as f64),
            DeviceMemory::Unified { total } => (total.0 as f64, 0.0),
        };
        DenseDevice {
            gpu_bytes: if gpu.is_some() { gpu_bytes } else { 0.0 },
            cpu_bytes: if cpu.is_some() { cpu_bytes } else { 0.0 },
            gpu,
            cpu,
            prefill_buffer: buffers.prefill.0 as f64,
            decode_buffer: buffers.decode.0 as f64,
            process: profile.and_then(|p| p.memory).map(|costs| {
                let unified = matches!(device.memory, DeviceMemory::Unified { .. });
                self.process(&costs, unified)
            }),
            overhead: profile.map_or(0.0, |p| p.hop_overhead.0 / 1e3),
            embedding: profile.and_then(|p| p.embedding.as_ref()).map(|curve| self.by_visit(curve)),
            cold: profile.and_then(|p| p.cold_call.as_ref()).and_then(by_slack),
        }
    }

    /// The memory of a stage's process, by the formula that the agent checks with before it loads: the most that any stage of
    /// its kind takes, wherever it begins and ends.
    fn process(&self, costs: &MemoryCosts, unified: bool) -> ProcessMemory {
        let (model, workload) = (&self.problem.model, &self.problem.workload);
        let n_ubatch = match self.settings.kv_layout {
            KvLayout::PerSlot { n_ubatch } | KvLayout::Unified { n_ubatch } => n_ubatch,
        };
        let memory = |layers: LayerRange, slots: u32| {
            // All blocks on a GPU: what is asked for is what a stage takes besides them.
            let stage = StageLoad { layers, weights: Bytes::ZERO, gpu_layers: layers.len() };
            let load = Load { slots, n_ctx: workload.slot_context, n_ubatch };
            let memory = stage_memory(model, &stage, load, costs);
            (memory.compute.0 as f64, memory.runtime.0 as f64)
        };
        let most = |ranges: &[(u32, u32)]| -> (Vec<f64>, Vec<f64>) {
            let ranges: Vec<LayerRange> =
                ranges.iter().filter_map(|&(start, end)| LayerRange::new(start, end).ok()).collect();
            let of = |slots: u32| {
                let all = ranges.iter().map(|&layers| memory(layers, slots.max(1)));
                all.fold((0.0, 0.0), |a: (f64, f64), b| (a.0.max(b.0), a.1.max(b.1)))
            };
            (0..=workload.max_slots).map(of).unzip()
        };
        // Whole, with a stage before it, or with the last block alone; and the first stage, or one between two others.
        let n = model.n_layer();
        let master = most(&[(0, n), (1, n), (n.saturating_sub(1), n)]);
        let other = most(&[(0, n.saturating_sub(1)), (1, n.saturating_sub(1))]);
        ProcessMemory { compute: [master.0, other.0], runtime: [master.1, other.1], unified }
    }

    fn processor(&self, profile: &ProcessorProfile) -> Processor {
        let workload = &self.problem.workload;
        let max_slots = workload.max_slots as usize;
        let depth = match self.settings.reading {
            DecodeReading::Serial => f64::from(workload.slot_context),
            DecodeReading::Batched => workload.mean_prompt() + workload.mean_output() / 2.0,
        };
        let decode = |kind: &DenseKind, rows: f64| {
            profile.block(kind.kind).map_or(f64::INFINITY, |curves| curves.decode.at(rows, depth).0 / 1e3)
        };
        let prefill = |kind: &DenseKind, tokens: f64, depth: f64| {
            profile.block(kind.kind).map_or(f64::INFINITY, |curves| curves.prefill.at(tokens, depth).0 / 1e3)
        };
        let chunk = self.chunk();
        let (full, rest) = chunks(workload.mean_prompt(), chunk);
        let prompt = |kind: &DenseKind| {
            let whole: f64 = (0..full as u32).map(|i| prefill(kind, chunk, f64::from(i) * chunk)).sum();
            whole + if rest > 0.0 { prefill(kind, rest, full * chunk) } else { 0.0 }
        };
        let deeper =
            |point: f64| self.by_kind(|k| (prefill(k, chunk, point) - prefill(k, chunk, 0.0)) / chunk);
        let by_depth = profile.blocks.iter().any(|curves| curves.prefill.depths().len() > 1);
        Processor {
            decode: (0..=max_slots)
                .flat_map(|rows| self.by_kind(|kind| decode(kind, rows.max(1) as f64)))
                .collect(),
            prefill_grid: PREFILL_GRID
                .iter()
                .flat_map(|&tokens| self.by_kind(|kind| prefill(kind, tokens, 0.0)))
                .collect(),
            prefill: self.by_kind(prompt),
            deeper: if by_depth { DEPTH_GRID.iter().flat_map(|&d| deeper(d)).collect() } else { Vec::new() },
            head: (0..=max_slots).map(|rows| profile.head.at(rows.max(1) as f64, 0.0).0 / 1e3).collect(),
            call: profile.call.as_ref().map(|curve| self.by_visit(curve)),
            n_kinds: self.shares.map_or(self.kinds.len(), |_| 1),
        }
    }

    /// Tokens of a prefill chunk.
    fn chunk(&self) -> f64 {
        f64::from(self.settings.prefill_chunk.max(1))
    }

    /// A curve by rows alone.
    fn by_visit(&self, curve: &Surface) -> ByVisit {
        let workload = &self.problem.workload;
        let at = |rows: f64| curve.at(rows, 0.0).0 / 1e3;
        let (full, rest) = chunks(workload.mean_prompt(), self.chunk());
        ByVisit {
            decode: (0..=workload.max_slots).map(|rows| at(f64::from(rows.max(1)))).collect(),
            prompt: full * at(self.chunk()) + if rest > 0.0 { at(rest) } else { 0.0 },
            chunk: PREFILL_GRID.iter().map(|&tokens| at(tokens)).collect(),
        }
    }
}

/// A cold-call correction by the gap and itself together. A call that is longer leaves less of a gap; where both together do
/// not grow with the gap, the shorter gap counts.
fn by_slack(cold: &ColdCall) -> Option<ColdCall> {
    let (mut slacks, mut extra): (Vec<Millis>, Vec<Millis>) = (Vec::new(), Vec::new());
    for (gap, &more) in cold.gaps().iter().zip(cold.extra()) {
        let slack = Millis(gap.0 + more.0);
        if slacks.last().is_none_or(|last| slack.0 > last.0) {
            slacks.push(slack);
            extra.push(more);
        }
    }
    ColdCall::new(slacks, extra).ok()
}

/// Tokens of the largest sliding window of any block.
pub(super) fn window_of(model: &ModelShape) -> f64 {
    let windows = model.blocks.iter().filter_map(|block| match block.kind.attention {
        Attention::SlidingWindow { window } => Some(window),
        Attention::Full | Attention::Recurrent => None,
    });
    windows.max().map_or(0.0, f64::from)
}

/// Bytes of a block's cache on its way to another replica.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Handed {
    pub per_token: f64,
    /// For each token in the sliding window; those before it are not sent.
    pub per_token_in_window: f64,
    /// Recurrent state, whatever the length.
    pub fixed: f64,
}

/// Tokens that the caches of all slots hold.
pub(super) fn cached_tokens(attention: Attention, slots: f64, context: f64, layout: KvLayout) -> f64 {
    match (attention, layout) {
        (Attention::Full, _) => slots * context,
        (Attention::Recurrent, _) => 0.0,
        (Attention::SlidingWindow { window }, KvLayout::PerSlot { n_ubatch }) => {
            let cells = window.saturating_add(n_ubatch).div_ceil(CONTEXT_STEP).saturating_mul(CONTEXT_STEP);
            slots * f64::from(cells).min(context)
        }
        (Attention::SlidingWindow { window }, KvLayout::Unified { n_ubatch }) => {
            (f64::from(window) * slots + f64::from(n_ubatch)).min(slots * context)
        }
    }
}
