//! How well the parts foretell the whole: a reduced model and the whole one, measured in turn within one run, so that whatever else
//! the host does meets both; and the whole's times as they follow from the parts, through the same curves as a profile's.

use std::time::Duration;

use cluster::{
    BlockKind, Bytes, ComputeBuffers, DeviceId, DeviceProfile, LayerRange, MemoryCosts, Millis, Phase,
    StageBatch, StageParts, StageTimeError,
};
use node::ModelFile;
use node::agent::WorkerCommand;
use protocol::plan_files::MeasuredPartEntry;
use serde::Serialize;
use thiserror::Error;

use crate::agenda::{Files, Ground, Planned};
use crate::curves::{self, CurvesError, flat};
use crate::host::last_level_cache;
use crate::memory;
use crate::profile::{Observer, Settings, Step};
use crate::reduction::Reduction;
use crate::sampling::{Item, Point, is_noisy, sample};
use crate::session::{Session, SessionError, SessionSpec};
use crate::statistics::median;
use crate::wire::{Command, ContextSpec, Gives, Processor};

/// Rows of decode steps.
const BATCHES: [u32; 3] = [1, 4, 8];

/// Depths of decode steps.
const DEPTHS: [u32; 2] = [0, 1024];

/// Tokens of prefill chunks.
const CHUNKS: [u32; 2] = [256, 512];

/// Rows that fill the whole model's caches at once.
const FILL: u32 = 256;

/// Why there is no comparison.
#[derive(Debug, Error)]
pub enum AccuracyError {
    /// The parts make no profile.
    #[error(transparent)]
    Curves(#[from] CurvesError),
    /// The profile lacks something.
    #[error(transparent)]
    Time(#[from] StageTimeError),
    /// Something could not be measured.
    #[error("{what}: {reason}")]
    Failed {
        /// What.
        what: String,
        /// Why.
        reason: String,
    },
    /// The user stopped it.
    #[error("interrupted")]
    Interrupted,
}

/// A model, the parts that stand for it, and how they are run.
pub struct BenchRequest<'a> {
    /// The model.
    pub model: &'a ModelFile,
    /// Which parts stand for it.
    pub reduction: &'a Reduction,
    /// These parts as files.
    pub files: &'a Files,
    /// This program as a worker.
    pub command: &'a WorkerCommand,
    /// How everything is run.
    pub settings: &'a Settings,
}

/// The comparison.
#[derive(Debug, Clone, Serialize)]
pub struct Accuracy {
    /// Median of the points' errors.
    pub median_error: f64,
    /// The largest of them.
    pub worst_error: f64,
    /// The most memory that a process with parts held.
    pub peak_resident_bytes: u64,
    /// The most memory that the process with the whole model held.
    pub whole_peak_resident_bytes: u64,
    /// Each call of the whole model.
    pub points: Vec<AccuracyPoint>,
}

/// One call of the whole model.
#[derive(Debug, Clone, Serialize)]
pub struct AccuracyPoint {
    /// The kind of work.
    pub phase: Phase,
    /// Rows.
    pub rows: u32,
    /// Tokens in each cache before.
    pub depth: u32,
    /// As it follows from the parts.
    pub predicted_ms: f64,
    /// As measured.
    pub measured_ms: f64,
    /// `|predicted / measured − 1|`.
    pub error: f64,
    /// Runs that the measured time is the median of.
    pub samples: usize,
    /// Whether these runs differed much.
    pub noisy: bool,
}

/// Measures both in turn, on the CPU.
pub fn accuracy(request: &BenchRequest<'_>, observer: &mut Observer<'_>) -> Result<Accuracy, AccuracyError> {
    let ground = ground(request);
    let (mut sessions, mut items) = (Vec::new(), Vec::new());
    for planned in parts(&ground) {
        let Planned { spec, items: of_session, .. } = planned;
        let number = sessions.len();
        items.extend(of_session.into_iter().map(|item| item.in_session(number)));
        sessions.push(Session::new(request.command, spec));
    }
    let whole_session = sessions.len();
    sessions.push(Session::new(request.command, whole(request, &ground)));
    items.extend(whole_items(request.model, whole_session));
    // What is compared is measured side by side.
    items.sort_by_key(|item| {
        (item.point.part == MeasuredPartEntry::Prefill, item.point.rows, item.point.depth)
    });
    let flow = sample(&mut sessions, &mut items, request.settings.budget, &mut |done, total| {
        observer(&Step { what: "parts and whole in turn".to_owned(), done, total })
    });
    if flow.is_break() {
        return Err(AccuracyError::Interrupted);
    }
    if let Some((item, reason)) = items.iter().find_map(|item| Some((item, item.failure.clone()?))) {
        return Err(AccuracyError::Failed { what: item.point.to_string(), reason });
    }
    let (of_whole, of_parts): (Vec<Item>, Vec<Item>) =
        items.into_iter().partition(|item| item.session == whole_session);
    let points = compare(request, &of_parts, &of_whole)?;
    let errors: Vec<f64> = points.iter().map(|point| point.error).collect();
    let peak = |sessions: &[Session<'_>]| sessions.iter().map(Session::peak).max().unwrap_or(0);
    Ok(Accuracy {
        median_error: median(&errors),
        worst_error: errors.iter().copied().fold(0.0, f64::max),
        peak_resident_bytes: peak(&sessions[..whole_session]),
        whole_peak_resident_bytes: peak(&sessions[whole_session..]),
        points,
    })
}

/// What stages of the model take besides weights and cache, measured on the CPU.
pub fn memory_costs(request: &BenchRequest<'_>) -> Result<MemoryCosts, AccuracyError> {
    let measured = memory::measure(request.command, &ground(request));
    let failed =
        |error: SessionError| AccuracyError::Failed { what: "memory".to_owned(), reason: error.to_string() };
    Ok(measured.map_err(failed)?.costs)
}

fn ground<'a>(request: &BenchRequest<'a>) -> Ground<'a> {
    Ground {
        shape: request.model.shape(),
        reduction: request.reduction,
        files: request.files,
        processor: Processor::Cpu,
        threads: request.settings.threads,
        n_ctx: request.settings.n_ctx,
        costs: MemoryCosts::assumed(request.model.shape()),
        // The whole model is loaded beside the parts: memory is no concern here.
        limit: Bytes(u64::MAX),
        last_level_cache: last_level_cache(),
    }
}

fn parts(ground: &Ground<'_>) -> Vec<Planned> {
    let mut parts: Vec<Planned> =
        DEPTHS.iter().flat_map(|depth| ground.decode(*depth, &BATCHES, 0.0)).collect();
    parts.push(ground.head(&BATCHES));
    parts.extend(ground.prefill(0, &CHUNKS));
    parts.push(ground.look_ups(&[&BATCHES[..], &CHUNKS].concat()));
    parts
}

/// The whole model in a context for each depth, and one for prompts.
fn whole(request: &BenchRequest<'_>, ground: &Ground<'_>) -> SessionSpec {
    let slots = BATCHES.into_iter().max().unwrap_or(1);
    let longest = CHUNKS.into_iter().max().unwrap_or(1);
    let decode = ContextSpec {
        context: 0,
        slice: 0,
        gives: Gives::Logits,
        slots,
        n_ctx: 256,
        n_ubatch: slots,
        depth: 0,
        looks_up: true,
    };
    let mut contexts: Vec<ContextSpec> = DEPTHS
        .iter()
        .enumerate()
        .map(|(context, &depth)| ContextSpec { context, depth, n_ctx: depth + 256, n_ubatch: FILL, ..decode })
        .collect();
    let prefill =
        ContextSpec { context: DEPTHS.len(), slots: 1, n_ctx: longest + 1, n_ubatch: longest, ..decode };
    contexts.push(prefill);
    // Between two of its steps, the whole model streams through the caches by itself.
    let setup = ground.setup(Bytes::ZERO);
    SessionSpec { setup, slices: vec![request.model.path().to_owned()], contexts }
}

fn whole_items(model: &ModelFile, session: usize) -> Vec<Item> {
    let layers = LayerRange::new(0, model.shape().n_layer()).ok();
    let point = |part, rows, depth| Point { part, layers, rows, depth };
    let mut items = Vec::new();
    for rows in BATCHES {
        for (context, depth) in DEPTHS.into_iter().enumerate() {
            let point = point(MeasuredPartEntry::Decode, rows, depth);
            items.push(Item::new(point, session, Command::Decode { context, rows }));
        }
    }
    for rows in CHUNKS {
        let point = point(MeasuredPartEntry::Prefill, rows, 0);
        items.push(Item::new(point, session, Command::Prefill { context: DEPTHS.len(), rows }));
    }
    items
}

fn compare(
    request: &BenchRequest<'_>,
    parts: &[Item],
    whole: &[Item],
) -> Result<Vec<AccuracyPoint>, AccuracyError> {
    let shape = request.model.shape();
    let medians: Vec<(Point, f64)> = parts.iter().map(|item| (item.point, median(&item.samples))).collect();
    let profile = DeviceProfile {
        device: DeviceId("cpu".to_owned()),
        model: request.model.name(),
        runtime: llama::version().to_owned(),
        gpu: None,
        cpu: Some(curves::processor_profile(shape, request.reduction, &medians)?),
        hop_overhead: Millis(0.0),
        buffers: ComputeBuffers::default(),
        embedding: flat(&medians, MeasuredPartEntry::Embedding),
        cold_call: None,
        memory: None,
    };
    let kinds: Vec<BlockKind> = shape.blocks.iter().map(|block| block.kind).collect();
    let stage = StageParts { embeds: true, ..StageParts::new(&kinds, &[]) };
    whole.iter().map(|item| point(&profile, &stage, item)).collect()
}

/// One call, as the planner would foretell it and as it was measured.
fn point(profile: &DeviceProfile, stage: &StageParts, item: &Item) -> Result<AccuracyPoint, AccuracyError> {
    let Item { point, samples, .. } = item;
    let is_prefill = point.part == MeasuredPartEntry::Prefill;
    let phase = if is_prefill { Phase::Prefill } else { Phase::Decode };
    let rows = f64::from(point.rows);
    let batch = StageBatch {
        phase,
        rows,
        depth: f64::from(point.depth),
        // Of a prompt, the last token's logits are wanted.
        outputs: if is_prefill { 1.0 } else { rows },
        idle: Millis(0.0),
    };
    let predicted_ms = profile.compute_time(stage, &batch)?.0;
    let measured_ms = median(samples);
    Ok(AccuracyPoint {
        phase,
        rows: point.rows,
        depth: point.depth,
        predicted_ms,
        measured_ms,
        error: (predicted_ms / measured_ms - 1.0).abs(),
        samples: samples.len(),
        noisy: is_noisy(samples),
    })
}

/// Time for the rounds, unless the user says otherwise.
pub const ACCURACY_BUDGET: Duration = Duration::from_secs(90);
