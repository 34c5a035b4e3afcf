//! Loads a stage's slices, and finds out what memory they take.
//!
//! Weights are read into the process rather than mapped, except on macOS: mapped pages of repacked tensors stay resident
//! beside their copies, and what a stage holds should be what it says. On Apple Silicon the mapped file is what the GPU
//! computes on, so there a copy would double it.

use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cluster::{LayerRange, LayerRangeError, ModelHash, StageTimeError};
use llama::{
    Content, ContextParams, EmbeddingTable, ExtraBuffers, MemoryMap, Model, ModelParams, Output, SliceContext,
};
use protocol::frame::{Frame, RowRun, Rows};
use protocol::plan_files::PlanFileError;
use protocol::rows::RowEncoding;
use protocol::worker::{SliceConfig, WorkerConfig};
use thiserror::Error;

use crate::chain::{Chain, ChainError, Slice, Slices};
use crate::emulated::{self, DoesNotFit};
use crate::hand_off::{KvFacts, SliceForm};
use crate::memory::resident;
use crate::sampling::{StageSampling, Vocabulary};
use crate::shared::{Loaded, Shared};
use crate::turns::Turns;

/// Why a stage cannot run.
#[derive(Debug, Error)]
pub(crate) enum LoadError {
    #[error(transparent)]
    Llama(#[from] llama::Error),
    #[error("the warm-up run failed: {0}")]
    WarmUp(#[from] ChainError),
    #[error(transparent)]
    Profile(#[from] PlanFileError),
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),
    #[error(transparent)]
    Time(#[from] StageTimeError),
    #[error(transparent)]
    Layers(#[from] LayerRangeError),
    #[error("opening {}, whose lock stages of this host compute under", path.display())]
    Turns { path: PathBuf, source: io::Error },
    #[error("{}: {what} is {got}, but the stage was told {wanted}", path.display())]
    Mismatch { path: PathBuf, what: &'static str, got: u32, wanted: u32 },
}

/// A stage that can run.
pub(crate) struct Stage {
    pub(crate) chain: Box<dyn Chain>,
    pub(crate) facts: Loaded,
    /// Its keys and values, or why they cannot be handed off.
    pub(crate) kv: Result<KvFacts, String>,
    /// The master's.
    pub(crate) sampling: Option<StageSampling>,
}

/// Loads everything, telling how far it is, and runs a few rows once, so that weights and caches have been touched and what
/// does not work fails here.
pub(crate) fn load(config: &WorkerConfig, shared: &Arc<Shared>) -> Result<Stage, LoadError> {
    match &config.emulation {
        Some(emulation) => emulated::load(config, emulation),
        None => load_slices(config, shared),
    }
}

fn load_slices(config: &WorkerConfig, shared: &Arc<Shared>) -> Result<Stage, LoadError> {
    let mut runtime = resident();
    let embedding = config.embedding.as_deref().map(EmbeddingTable::open).transpose()?;
    if let (Some(table), Some(path)) = (&embedding, &config.embedding) {
        check(path, "embedding width", table.n_embd(), config.n_embd)?;
    }
    let vocabulary = vocabulary(config)?;
    let mut progress = Progress::new(config, shared);
    let mut slices = Vec::with_capacity(config.slices.len());
    for slice in &config.slices {
        let facts =
            vocabulary.as_ref().map(Vocabulary::facts).filter(|_| slice.layers.end() == config.n_layer);
        let content = facts.map_or(Content::Whole, |facts| Content::WithoutText(facts.clone()));
        let (model, besides_weights) = load_model(config, slice, content, &mut progress)?;
        runtime += besides_weights;
        let output = if slice.layers.end() == config.n_layer { Output::Logits } else { Output::Hidden };
        let context = SliceContext::new(&model, &context_params(config, output))?;
        slices.push(Slice { layers: slice.layers, context });
    }
    let n_vocab = vocabulary.as_ref().map(|vocabulary| vocabulary.facts().n_tokens);
    let n_vocab = n_vocab.or(embedding.as_ref().map(EmbeddingTable::n_tokens));
    let turns = Turns::open(config.turns.as_deref()).map_err(|source| {
        let path = config.turns.clone().unwrap_or_default();
        LoadError::Turns { path, source }
    })?;
    let mut chain = Slices::new(slices, embedding, config.n_embd, turns);
    let kv = warm_up(&mut chain, config)?;
    llama::release_freed_memory();
    let facts = facts(config, &chain, runtime, n_vocab.unwrap_or(0))?;
    Ok(Stage { chain: Box::new(chain), facts, kv, sampling: vocabulary.map(StageSampling::Logits) })
}

/// The master's vocabulary, which its last slice has.
fn vocabulary(config: &WorkerConfig) -> Result<Option<Vocabulary>, LoadError> {
    let last = config.slices.last().filter(|_| config.is_master());
    Ok(last.map(|slice| Vocabulary::of(slice.path.clone())).transpose()?)
}

fn load_model(
    config: &WorkerConfig,
    SliceConfig { path, layers, gpu_layers }: &SliceConfig,
    content: Content,
    progress: &mut Progress,
) -> Result<(Model, u64), LoadError> {
    let before = resident();
    // Vocabulary and metadata are there when the first weight is about to be read.
    let besides_weights = Arc::new(AtomicU64::new(0));
    let mut is_first = true;
    let mut report = progress.next_slice();
    let (told, layers) = (Arc::clone(&besides_weights), *layers);
    let params = ModelParams {
        gpu_layers: *gpu_layers,
        memory_map: if cfg!(target_os = "macos") { MemoryMap::Mapped } else { MemoryMap::Read },
        extra_buffers: if config.extra_buffers { ExtraBuffers::Repacked } else { ExtraBuffers::Plain },
        progress: Some(Box::new(move |share| {
            if std::mem::take(&mut is_first) {
                told.store(resident().saturating_sub(before), Ordering::Relaxed);
            }
            report(share);
            ControlFlow::Continue(())
        })),
        content,
        ..ModelParams::default()
    };
    let model = Model::load(path, params)?;
    check(path, "number of blocks", model.n_layer(), layers.len())?;
    check(path, "width of a hidden row", model.n_embd(), config.n_embd)?;
    Ok((model, besides_weights.load(Ordering::Relaxed)))
}

fn check(path: &std::path::Path, what: &'static str, got: u32, wanted: u32) -> Result<(), LoadError> {
    if got == wanted { Ok(()) } else { Err(LoadError::Mismatch { path: path.to_owned(), what, got, wanted }) }
}

fn context_params(config: &WorkerConfig, output: Output) -> ContextParams {
    ContextParams {
        n_batch: config.n_batch,
        n_ubatch: config.n_ubatch,
        threads: config.threads,
        threads_batch: config.threads,
        ..ContextParams::new(output, config.slots, config.n_ctx)
    }
}

/// A full ubatch would touch the compute buffers too, which are reserved by then; but it takes as long as a prompt of so many
/// tokens, which on a slow host is most of the start.
const WARM_UP_ROWS: u32 = 2;

/// Runs two rows, and a single one, whose graph is another; leaves no sequence behind. Keys and values are told from what the
/// row leaves.
fn warm_up(chain: &mut Slices, config: &WorkerConfig) -> Result<Result<KvFacts, String>, ChainError> {
    let mut kv = Err("no row was run".to_owned());
    for n in [WARM_UP_ROWS.min(config.n_ubatch).min(config.n_ctx), 1] {
        let data = vec![0; n as usize * config.n_embd as usize * RowEncoding::F16.element_bytes()];
        let frame = Frame {
            epoch: Default::default(),
            step: Default::default(),
            ops: Vec::new(),
            runs: vec![RowRun { slot: Default::default(), position: 0, n }],
            prefill: true,
            rows: Rows::Hidden { encoding: RowEncoding::F16, data: data.into() },
            copies: Vec::new(),
        };
        chain.begin();
        let rows = chain.add(&frame);
        rows.take(config.slots as usize).for_each(|row| chain.want(row));
        chain.compute()?;
        kv = kv_facts(chain, config).map_err(|error| error.to_string());
        chain.clear();
    }
    Ok(kv)
}

/// Of a chain whose slot 0 holds something.
fn kv_facts(chain: &mut Slices, config: &WorkerConfig) -> Result<KvFacts, LoadError> {
    let layout = chain.export(Default::default())?.layout();
    let form = |slice: &Slice| -> Result<SliceForm, LoadError> {
        Ok(SliceForm { form: slice.context.kv_form()?, streams: slice.context.place(0).streams })
    };
    let end = config.slices.last().map_or(0, |slice| slice.layers.end());
    Ok(KvFacts {
        layers: LayerRange::new(config.entry_layer(), end)?,
        model: ModelHash(config.model_hash),
        n_ctx: config.n_ctx,
        layout,
        slices: chain.slices().iter().map(form).collect::<Result<_, _>>()?,
    })
}

fn facts(config: &WorkerConfig, chain: &Slices, runtime: u64, n_vocab: u32) -> Result<Loaded, LoadError> {
    let mut facts =
        Loaded { weights: 0, cache: 0, compute: row_bytes(config, n_vocab), runtime, gpu_layers: 0, n_vocab };
    for slice in chain.slices() {
        for usage in slice.context.memory()?.uses {
            facts.weights += usage.model;
            facts.cache += usage.context;
            facts.compute += usage.compute;
        }
    }
    let on_gpu = |slice: &SliceConfig| slice.gpu_layers.min(LayerRange::len(slice.layers));
    facts.gpu_layers = config.slices.iter().map(on_gpu).sum();
    Ok(facts)
}

/// Bytes of rows on their way in and out, which llama.cpp does not count: a batch's input, each slice's hidden rows, and
/// at the end a row of logits per slot.
fn row_bytes(config: &WorkerConfig, n_vocab: u32) -> u64 {
    let row = u64::from(config.n_ubatch) * u64::from(config.n_embd) * 4;
    let slices = config.slices.len() as u64;
    if config.is_master() {
        row * slices + u64::from(config.slots.min(config.n_ubatch)) * u64::from(n_vocab) * 4
    } else {
        row * (slices + 1)
    }
}

/// How far the weights of all slices together are, by the sizes of their files.
struct Progress {
    shared: Arc<Shared>,
    /// Share of the whole that each slice not yet loaded has, in order.
    shares: std::vec::IntoIter<f32>,
    done: f32,
}

impl Progress {
    fn new(config: &WorkerConfig, shared: &Arc<Shared>) -> Self {
        // A file that is missing fails when it is loaded.
        let size = |slice: &SliceConfig| std::fs::metadata(&slice.path).map_or(0, |file| file.len());
        let sizes: Vec<u64> = config.slices.iter().map(size).collect();
        let total = sizes.iter().sum::<u64>().max(1) as f32;
        let shares: Vec<f32> = sizes.into_iter().map(|size| size as f32 / total).collect();
        Self { shared: Arc::clone(shared), shares: shares.into_iter(), done: 0.0 }
    }

    fn next_slice(&mut self) -> impl FnMut(f32) + use<> {
        let (shared, done) = (Arc::clone(&self.shared), self.done);
        let share = self.shares.next().unwrap_or(0.0);
        self.done += share;
        move |loaded| shared.set_progress((done + share * loaded).min(1.0))
    }
}
