//! A stage in two steps: the order, which the replica decides, and the worker's configuration, to which the stage's host adds
//! what only it knows. Of a stage on this host, both steps are taken here.

use std::net::SocketAddr;
use std::path::PathBuf;

use cluster::{LayerRange, Load, ModelHash, ModelShape};
use gguf::cut::{CutOptions, Uncertified};
use protocol::emulation::Emulation;
use protocol::node::StageOrder;
use protocol::tls::TlsIdentity;
use protocol::worker::{self, SliceConfig, WorkerConfig};

use super::WorkerSettings;
use crate::memory::MemoryCheck;

/// A step in flight for longer makes the master give the replica up. A frame takes seconds on the slowest hosts, and
/// frozen workers are noticed by their heartbeat long before; this is for a stage that answers but makes no progress.
const STEP_DEADLINE_SECS: u32 = 120;

/// What the orders of all stages of a replica have in common.
#[derive(Debug, Clone)]
pub(crate) struct ReplicaOrder {
    /// How hosts call the model, and how they know it.
    pub(crate) model: String,
    pub(crate) model_hash: ModelHash,
    pub(crate) n_stages: u32,
    pub(crate) load: Load,
    pub(crate) prefill_chunk: u32,
    pub(crate) settings: WorkerSettings,
    pub(crate) options: CutOptions,
    pub(crate) memory_check: MemoryCheck,
}

/// A stage's place in a replica.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagePlace {
    pub(crate) stage: u32,
    pub(crate) layers: LayerRange,
    pub(crate) gpu_layers: u32,
    /// Stages on its host, of all replicas.
    pub(crate) stages_here: u32,
}

/// What a stage's host adds to its order.
#[derive(Debug, Clone)]
pub(crate) struct OnHost {
    pub(crate) slice: PathBuf,
    pub(crate) embedding: PathBuf,
    pub(crate) listen: SocketAddr,
    pub(crate) tls: TlsIdentity,
    /// The device that the worker stands for instead of computing.
    pub(crate) emulation: Option<Emulation>,
    /// The file whose lock stages take that share the host's cores.
    pub(crate) turns: PathBuf,
}

impl ReplicaOrder {
    /// The order of one stage.
    pub(crate) fn stage(&self, place: StagePlace) -> StageOrder {
        let StagePlace { stage, layers, gpu_layers, stages_here } = place;
        StageOrder {
            model: self.model.clone(),
            model_hash: self.model_hash,
            stage,
            n_stages: self.n_stages,
            layers,
            gpu_layers,
            slots: self.load.slots,
            n_ctx: self.load.n_ctx,
            n_batch: self.load.n_ubatch,
            threads: self.settings.threads,
            stages_here,
            micro_batches: self.settings.micro_batches,
            queue_limit: self.settings.queue_limit,
            prefill_chunk: self.prefill_chunk,
            step_deadline_secs: STEP_DEADLINE_SECS,
            allow_uncertified: self.options.uncertified == Uncertified::Allow,
            ignore_memory: self.memory_check == MemoryCheck::Warn,
            supply: None,
            keep_secs: u32::try_from(self.settings.keep.as_secs()).unwrap_or(u32::MAX),
        }
    }
}

/// CPU threads of a stage: what was ordered, or this host's cores, all in turn with its other stages. Stages that leave the
/// CPU little to do get a share of the cores, so that GPUs need not wait for each other.
pub(crate) fn threads(order: &StageOrder) -> u32 {
    let stages = if takes_turns(order) { 1 } else { order.stages_here };
    order.threads.unwrap_or_else(|| crate::default_threads(stages))
}

fn takes_turns(order: &StageOrder) -> bool {
    order.threads.is_none() && order.stages_here > 1 && order.gpu_layers < order.layers.len()
}

/// What the worker of an ordered stage is told.
pub(crate) fn worker_config(order: &StageOrder, shape: &ModelShape, host: OnHost) -> WorkerConfig {
    WorkerConfig {
        version: worker::VERSION,
        stage: order.stage,
        n_stages: order.n_stages,
        n_layer: shape.n_layer(),
        n_embd: shape.n_embd,
        model_hash: order.model_hash.0,
        slices: vec![SliceConfig { path: host.slice, layers: order.layers, gpu_layers: order.gpu_layers }],
        embedding: (order.stage == 0).then_some(host.embedding),
        slots: order.slots,
        n_ctx: order.n_ctx,
        n_batch: order.n_batch,
        n_ubatch: order.n_batch,
        threads: threads(order),
        turns: (takes_turns(order) && host.emulation.is_none()).then_some(host.turns),
        micro_batches: order.micro_batches,
        queue_limit: order.queue_limit,
        prefill_chunk: order.prefill_chunk,
        extra_buffers: true,
        recurrent: shape.has_recurrent_state(),
        smallest_window: shape.smallest_window(),
        step_deadline_secs: order.step_deadline_secs,
        listen: host.listen,
        tls: host.tls,
        emulation: host.emulation.map(Box::new),
    }
}
