//! Whether an emulated stage fits into its device: weights, caches and compute buffers, in each memory.

use cluster::{
    Bytes, DeviceId, DeviceMemory, DeviceProfile, LayerRange, Load, ModelShape, ProcessorKind, cache_request,
};
use protocol::worker::WorkerConfig;
use thiserror::Error;

/// A stage needs more than its emulated device has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "out of memory: the emulated device {device} has {} bytes of {memory}, and the stage needs {} there (weights {}, \
     cache {}, compute buffers {})",
    has.0, need.total().0, need.weights.0, need.cache.0, need.compute.0
)]
pub(crate) struct DoesNotFit {
    device: DeviceId,
    memory: &'static str,
    has: Bytes,
    need: Need,
}

/// Bytes of one memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) weights: Bytes,
    pub(super) cache: Bytes,
    pub(super) compute: Bytes,
}

impl Need {
    fn total(&self) -> Bytes {
        self.weights + self.cache + self.compute
    }

    fn with(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            cache: self.cache + other.cache,
            compute: self.compute + other.compute,
        }
    }
}

/// What both processors need.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    gpu: Need,
    cpu: Need,
}

/// What a stage needs, by the planner's rules: the head where the last blocks are, and on each processor that computes the
/// larger of the profile's buffers.
pub(super) fn needs(config: &WorkerConfig, model: &ModelShape, load: Load, profile: &DeviceProfile) -> Needs {
    let mut needs = Needs::default();
    for slice in &config.slices {
        let (start, end) = (slice.layers.start(), slice.layers.end());
        let first_on_gpu = end.saturating_sub(slice.gpu_layers).max(start);
        for (need, range) in [
            (&mut needs.cpu, LayerRange::new(start, first_on_gpu)),
            (&mut needs.gpu, LayerRange::new(first_on_gpu, end)),
        ] {
            let Ok(range) = range else { continue };
            need.weights += model.block_bytes(range);
            need.cache += model.cache_bytes(range, cache_request(load));
        }
    }
    let head = super::parts(config, model).head();
    let at_the_end = if config.is_master() { model.head_bytes } else { Bytes::ZERO };
    let (first, other) = match head {
        ProcessorKind::Gpu => (&mut needs.gpu, &mut needs.cpu),
        ProcessorKind::Cpu => (&mut needs.cpu, &mut needs.gpu),
    };
    first.weights += at_the_end + model.global_bytes;
    let buffer = profile.buffers.prefill.max(profile.buffers.decode);
    first.compute = buffer;
    if other.weights > Bytes::ZERO {
        other.compute = buffer;
    }
    needs
}

impl Needs {
    pub(super) fn total(&self) -> Need {
        self.gpu.with(self.cpu)
    }

    pub(super) fn check(&self, device: &DeviceId, memory: DeviceMemory) -> Result<(), DoesNotFit> {
        let fits = |memory, need: Need, has: Bytes| {
            let device = device.clone();
            if need.total() <= has { Ok(()) } else { Err(DoesNotFit { device, memory, has, need }) }
        };
        match memory {
            DeviceMemory::Unified { total } => fits("memory", self.total(), total),
            DeviceMemory::Discrete { vram, ram } => {
                fits("VRAM", self.gpu, vram)?;
                fits("RAM", self.cpu, ram)
            }
        }
    }
}
