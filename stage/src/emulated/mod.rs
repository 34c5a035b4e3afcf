//! A device that is emulated: instead of computing it sleeps for the time that its profile says, and writes text by a fixed
//! rule. All else is as on a real one: frames, links, the engine, the order of KV operations, and what does not fit.
//!
//! Times are the device's own where they are reported: a time scale only changes how long that is here.

mod cache;
mod clock;
mod fit;
mod kv;
mod network;
mod text;

use std::ops::Range;
use std::time::{Duration, Instant};

use cluster::{
    BlockKind, DeviceProfile, LayerRange, Load, Millis, ModelShape, Phase, SlotId, StageBatch, StageParts,
    StageTimeError,
};
use llama::kv_blob::{Blob, Prepared};
use protocol::emulation::Emulation;
use protocol::frame::{Frame, KvOp, RowRun};
use protocol::worker::WorkerConfig;

use crate::chain::{Call, Chain, ChainError};
use crate::load::{LoadError, Stage};
use crate::memory::resident;
use crate::sampling::StageSampling;
use crate::shared::Loaded;

use cache::Cache;
use clock::Clock;
pub(crate) use clock::{came_at, due_ns};
pub(crate) use fit::DoesNotFit;
use kv::Kv;
pub(crate) use network::Network;
pub(crate) use text::{RuleSampler, TextRule};

/// "Loads" a stage: finds out whether it fits, and that the profile can tell its times.
pub(crate) fn load(config: &WorkerConfig, emulation: &Emulation) -> Result<Stage, LoadError> {
    let profile = emulation.profile.profile()?;
    let model = emulation.model.shape()?;
    let load = Load { slots: config.slots, n_ctx: config.n_ctx, n_ubatch: config.n_ubatch };
    let needs = fit::needs(config, &model, load, &profile);
    needs.check(&profile.device, emulation.memory.into())?;
    let end = config.slices.last().map_or(0, |slice| slice.layers.end());
    let layers = LayerRange::new(config.entry_layer(), end)?;
    let cache = Cache::new(config, layers, &model);
    let own_kv = match emulation.network {
        None => Kv::new(layers, &model),
        Some(_) => Kv::new(layers, &narrow(&model)),
    };
    let kv = own_kv.as_ref().map(|kv| kv.facts(config, layers)).ok_or(ChainError::Recurrent.to_string());
    let mut chain = Emulated::new(config, profile, parts(config, &model), cache)?;
    chain.kv = own_kv;
    let total = needs.total();
    let facts = Loaded {
        weights: total.weights.0,
        cache: total.cache.0,
        compute: total.compute.0,
        runtime: resident(),
        gpu_layers: config.slices.iter().map(|slice| slice.gpu_layers.min(slice.layers.len())).sum(),
        n_vocab: model.n_vocab,
    };
    let sampling = config.is_master().then(|| StageSampling::Rule(TextRule::new(model.n_vocab)));
    Ok(Stage { chain: Box::new(chain), facts, kv, sampling })
}

/// An emulated stage.
struct Emulated {
    profile: DeviceProfile,
    parts: StageParts,
    time_scale: f64,
    cache: Cache,
    /// None with recurrent blocks.
    kv: Option<Kv>,
    clock: Clock,
    /// When the last batch was over, by the device's time.
    ended: Instant,
    n_embd: usize,
    runs: Vec<RowRun>,
    wanted: Vec<bool>,
    /// Hidden rows of a whole batch: zeros, of the right size.
    hidden: Vec<f32>,
}

impl Emulated {
    fn new(
        config: &WorkerConfig,
        profile: DeviceProfile,
        parts: StageParts,
        cache: Cache,
    ) -> Result<Self, StageTimeError> {
        let n_embd = config.n_embd as usize;
        let rows_out = if config.is_master() { 0 } else { config.n_batch as usize };
        let emulated = Self {
            profile,
            parts,
            time_scale: config.emulation.as_ref().map_or(1.0, |emulation| emulation.time_scale),
            cache,
            kv: None,
            clock: Clock::default(),
            ended: Instant::now(),
            n_embd,
            runs: Vec::new(),
            wanted: Vec::new(),
            hidden: vec![0.0; rows_out * n_embd],
        };
        // What is missing is said before anything is served.
        let outputs = if config.is_master() { 1.0 } else { 0.0 };
        for phase in [Phase::Decode, Phase::Prefill] {
            let batch = StageBatch { phase, rows: 1.0, depth: 0.0, outputs, idle: Millis(0.0) };
            emulated.profile.compute_time(&emulated.parts, &batch)?;
        }
        Ok(emulated)
    }

    /// Sleeps for the batch, and says how long the device was computing.
    fn pass_time(&mut self, call: &Call) -> Result<Duration, StageTimeError> {
        let batch = StageBatch {
            phase: call.phase,
            rows: f64::from(call.rows),
            depth: call.depth,
            outputs: f64::from(call.outputs),
            // Idle for so long here is idle for longer there, where time runs faster here.
            idle: Millis(Millis::from(call.idle).0 / self.time_scale),
        };
        let compute = self.profile.compute_time(&self.parts, &batch)?;
        let all = self.profile.stage_time(&self.parts, &batch)?;
        self.ended = self.clock.work(call.arrived, self.here(all));
        Ok(self.here(compute).div_f64(self.time_scale))
    }

    /// How long a time of the device takes here. A profile may hold absurd times; a step has a deadline long before a year.
    fn here(&self, time: Millis) -> Duration {
        const LONGEST_SECONDS: f64 = 1e7;
        Duration::from_secs_f64((time.0 / 1e3 * self.time_scale).clamp(0.0, LONGEST_SECONDS))
    }
}

/// Caches of which no more travels than shows that they do.
fn narrow(model: &ModelShape) -> ModelShape {
    let mut model = model.clone();
    for block in &mut model.blocks {
        block.kv_elements_per_token = block.kv_elements_per_token.min(2);
    }
    model
}

/// What the stage holds: of each slice the last blocks on the GPU.
fn parts(config: &WorkerConfig, model: &ModelShape) -> StageParts {
    let (mut cpu, mut gpu): (Vec<BlockKind>, Vec<BlockKind>) = (Vec::new(), Vec::new());
    for slice in &config.slices {
        let first_on_gpu = slice.layers.end().saturating_sub(slice.gpu_layers);
        for layer in slice.layers.start()..slice.layers.end() {
            let Some(block) = model.blocks.get(layer as usize) else { continue };
            if layer < first_on_gpu { cpu.push(block.kind) } else { gpu.push(block.kind) }
        }
    }
    let (embeds, in_chain) = (config.stage == 0, config.n_stages > 1);
    StageParts { embeds, in_chain, ..StageParts::new(&cpu, &gpu) }
}

impl Chain for Emulated {
    fn clear(&mut self) {
        self.cache.clear();
    }

    fn apply(&mut self, op: KvOp) -> Result<(), ChainError> {
        self.cache.apply(op)
    }

    fn export(&mut self, slot: SlotId) -> Result<Blob, ChainError> {
        let tokens = self.cache.held(slot);
        let kv = self.kv.as_ref().ok_or(ChainError::Recurrent)?;
        if tokens == 0 { Err(ChainError::Empty { slot }) } else { Ok(kv.blob(tokens)) }
    }

    fn import(&mut self, slot: SlotId, blobs: &[Prepared]) -> Result<(), ChainError> {
        self.cache.replace(slot, blobs.first().map_or(0, Prepared::tokens));
        Ok(())
    }

    fn begin(&mut self) {
        self.runs.clear();
        self.wanted.clear();
    }

    fn add(&mut self, frame: &Frame) -> Range<usize> {
        let start = self.wanted.len();
        self.runs.extend(&frame.runs);
        self.wanted.resize(start + frame.n_rows(), false);
        start..self.wanted.len()
    }

    fn want(&mut self, row: usize) {
        if let Some(wanted) = self.wanted.get_mut(row) {
            *wanted = true;
        }
    }

    fn run(&mut self, call: &Call) -> Result<Duration, ChainError> {
        for run in &self.runs {
            self.cache.extend(*run)?;
        }
        Ok(self.pass_time(call)?)
    }

    fn ended(&self) -> Instant {
        self.ended
    }

    fn hidden(&self, rows: Range<usize>) -> &[f32] {
        self.hidden.get(..rows.len() * self.n_embd).unwrap_or(&[])
    }

    fn logits(&self, row: usize) -> Option<&[f32]> {
        let wanted = self.wanted.get(row).copied().unwrap_or(false);
        wanted.then_some(&[])
    }
}
