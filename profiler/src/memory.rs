//! What a stage takes besides weights and cache, measured: from llama.cpp's own breakdown, and, for what that does not count, from
//! what the operating system says the process holds.

use cluster::{Bytes, LayerRange, Load, MemoryCosts, ModelShape, cache_request};
use node::agent::WorkerCommand;
use protocol::plan_files::KvEntry;

use crate::agenda::Ground;
use crate::reduction::{Reduction, blocks_by_kind};
use crate::session::{Session, SessionError, SessionSpec};
use crate::wire::{BufferUse, Command, ContextSpec, Gives, Outcome, Processor, Reply, Setup};

/// Batches whose buffers are compared.
const BATCHES: [u32; 3] = [128, 512, 2048];

/// What was measured.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) costs: MemoryCosts,
    pub(crate) kv: Vec<KvEntry>,
    pub(crate) peak: u64,
}

/// Measures, each amount in a process of its own: what an allocator keeps of one context would count for the next.
pub(crate) fn measure(command: &WorkerCommand, ground: &Ground<'_>) -> Result<Measured, SessionError> {
    let slices = &ground.reduction.slices;
    // Two blocks have more alive at once than one.
    let range = slices.iter().find(|range| range.len() > 1).or(slices.first()).copied();
    let range = range.ok_or_else(|| SessionError::Unable("there is no slice to weigh".to_owned()))?;
    let mut scale = Scale { command, ground, peak: 0 };
    let Work { row: work_row, frame_row, runtime } = scale.work(range)?;
    let (row, row_and_cell, kv) = scale.buffers(range)?;
    let output = Bytes(u64::from(ground.shape.n_vocab) * 4);
    let (head_row, vocabulary) = scale.head(output)?;
    let last_row = if ground.reduction.last.len() == 1 { scale.last(row_and_cell)? } else { row + work_row };
    let costs = MemoryCosts {
        row,
        row_and_cell,
        head_row,
        output,
        work_row,
        last_row,
        frame_row,
        runtime,
        vocabulary,
    };
    Ok(Measured { costs, kv, peak: scale.peak })
}

struct Scale<'a> {
    command: &'a WorkerCommand,
    ground: &'a Ground<'a>,
    peak: u64,
}

/// A process with one slice.
struct Pan<'a> {
    session: Session<'a>,
    on_host: bool,
    /// What loading took besides weights.
    besides_weights: Bytes,
    weights: u64,
}

/// What a process holds besides weights, cache, and rows in and out.
struct Filled {
    /// After it computed.
    computed: u64,
    /// After it sent, and received, too.
    sent: u64,
    /// Of it, compute buffers, as llama.cpp counts them.
    compute: u64,
}

/// What neither llama.cpp nor the model's description tells of.
struct Work {
    row: Bytes,
    frame_row: Bytes,
    runtime: Bytes,
}

/// A context of its slice.
struct Wanted {
    n_ctx: u32,
    n_ubatch: u32,
    gives: Gives,
}

impl<'a> Scale<'a> {
    fn pan(&self, range: LayerRange) -> Result<Pan<'a>, SessionError> {
        // Rows are made up: mapped pages of embeddings are not what is weighed here.
        let setup = Setup { embedding: None, ..self.ground.setup(Bytes::ZERO) };
        let spec = SessionSpec { setup, slices: Vec::new(), contexts: Vec::new() };
        let mut session = Session::new(self.command, spec);
        let path = self.ground.files.slices.get(&range).cloned();
        let path =
            path.ok_or_else(|| SessionError::Unable(format!("the slice of blocks {range} was not cut")))?;
        let besides_weights = match session.ask(&Command::Load { path })?.outcome {
            Outcome::Loaded { besides_weights_bytes } => Bytes(besides_weights_bytes),
            _ => Bytes::ZERO,
        };
        let on_host = self.ground.processor == Processor::Cpu;
        Ok(Pan { session, on_host, besides_weights, weights: 0 })
    }

    /// What nobody tells of.
    fn work(&mut self, range: LayerRange) -> Result<Work, SessionError> {
        let [few, many, _] = BATCHES;
        let mut filled =
            |n_ubatch| self.filled(range, &Wanted { n_ctx: n_ubatch, n_ubatch, gives: Gives::Hidden });
        let (less, more) = (filled(few)?, filled(many)?);
        let per_row = |of: fn(&Filled) -> u64| of(&more).saturating_sub(of(&less)) / u64::from(many - few);
        let row = per_row(|filled| filled.computed.saturating_sub(filled.compute));
        let with_frame = per_row(|filled| filled.sent.saturating_sub(filled.compute));
        Ok(Work {
            row: Bytes(row),
            // Both ends are in this process.
            frame_row: Bytes(with_frame.saturating_sub(row) / 2),
            runtime: Bytes(less.sent.saturating_sub(less.compute + with_frame * u64::from(few))),
        })
    }

    /// All that a row takes in a stage of nothing but the last block, without its mask.
    fn last(&mut self, row_and_cell: Bytes) -> Result<Bytes, SessionError> {
        let [few, many, _] = BATCHES;
        let range = self.ground.reduction.last;
        let mut computed = |n_ubatch| {
            let wanted = Wanted { n_ctx: many, n_ubatch, gives: Gives::Logits };
            Ok::<_, SessionError>(self.filled(range, &wanted)?.computed)
        };
        let per_row = computed(many)?.saturating_sub(computed(few)?) / u64::from(many - few);
        let cells =
            self.ground.shape.cells(range, cache_request(Load { slots: 1, n_ctx: many, n_ubatch: many }));
        Ok(Bytes(per_row).saturating_sub(row_and_cell * cells))
    }

    /// A process after a full batch, and after its rows went over a link, as they do from stage to stage.
    fn filled(&mut self, range: LayerRange, wanted: &Wanted) -> Result<Filled, SessionError> {
        let mut pan = self.pan(range)?;
        let uses = pan.make(wanted)?;
        let computed = pan.session.ask(&Command::Prefill { context: 0, rows: wanted.n_ubatch })?;
        let sent = pan.session.ask(&Command::Hop { rows: wanted.n_ubatch })?;
        self.peak = self.peak.max(pan.session.peak());
        let cache: u64 = uses.iter().map(|entry| entry.cache).sum();
        let rows = 2 * u64::from(wanted.n_ubatch) * u64::from(self.ground.shape.n_embd) * 4;
        let besides = |reply: &Reply| reply.resident_bytes.saturating_sub(pan.weights + cache + rows);
        Ok(Filled {
            computed: besides(&computed),
            sent: besides(&sent),
            compute: uses.iter().map(|entry| entry.compute).sum(),
        })
    }

    fn buffers(&mut self, range: LayerRange) -> Result<(Bytes, Bytes, Vec<KvEntry>), SessionError> {
        let mut pan = self.pan(range)?;
        let (row, row_and_cell) = pan.rows(self.ground.shape, range)?;
        let kv = pan.cache(self.ground, range)?;
        self.peak = self.peak.max(pan.session.peak());
        Ok((row, row_and_cell, kv))
    }

    /// Bytes of compute buffers for each row while the head computes, and what the vocabulary takes.
    fn head(&mut self, output: Bytes) -> Result<(Bytes, Bytes), SessionError> {
        let mut pan = self.pan(self.ground.reduction.last)?;
        let compute = pan.compute(&Wanted { n_ctx: 256, n_ubatch: 1, gives: Gives::Logits })?;
        self.peak = self.peak.max(pan.session.peak());
        Ok((Bytes(compute).saturating_sub(output), pan.besides_weights))
    }
}

impl Pan<'_> {
    fn make(&mut self, wanted: &Wanted) -> Result<Vec<BufferUse>, SessionError> {
        let spec = ContextSpec {
            context: 0,
            slice: 0,
            gives: wanted.gives,
            slots: 1,
            n_ctx: wanted.n_ctx,
            n_ubatch: wanted.n_ubatch,
            depth: 0,
            looks_up: false,
        };
        let Reply { outcome, .. } = self.session.ask(&Command::Context(spec))?;
        let Outcome::Made { mut uses } = outcome else { return Ok(Vec::new()) };
        self.weights = uses.iter().filter(|entry| entry.on_host).map(|entry| entry.weights).sum();
        uses.retain(|entry| entry.on_host == self.on_host);
        Ok(uses)
    }

    fn compute(&mut self, wanted: &Wanted) -> Result<u64, SessionError> {
        Ok(self.make(wanted)?.iter().map(|entry| entry.compute).sum())
    }

    /// Bytes of compute buffers for each row, and for each row and cell.
    fn rows(&mut self, shape: &ModelShape, range: LayerRange) -> Result<(Bytes, Bytes), SessionError> {
        let n_ctx = BATCHES[2];
        let mut of = |n_ctx, n_ubatch| {
            let compute = self.compute(&Wanted { n_ctx, n_ubatch, gives: Gives::Hidden })?;
            let load = Load { slots: 1, n_ctx, n_ubatch };
            Ok::<_, SessionError>((compute as f64 / f64::from(n_ubatch), cells(shape, range, load)))
        };
        let (short, long) = (of(n_ctx, BATCHES[0])?, of(2 * n_ctx, BATCHES[0])?);
        let per_cell = if long.1 > short.1 { (long.0 - short.0) / (long.1 - short.1) } else { 2.0 };
        let mut row = 0.0_f64;
        for n_ubatch in BATCHES {
            let (compute, cells) = of(n_ctx, n_ubatch)?;
            row = row.max(compute - per_cell * cells);
        }
        Ok((Bytes(row.max(0.0).ceil() as u64), Bytes(per_cell.max(0.0).round() as u64)))
    }

    /// What llama.cpp allocates for cached tokens and states, beside what the model's description says.
    fn cache(&mut self, ground: &Ground<'_>, range: LayerRange) -> Result<Vec<KvEntry>, SessionError> {
        let load = Load { slots: 1, n_ctx: BATCHES[2], n_ubatch: BATCHES[0] };
        let uses = self.make(&Wanted { n_ctx: load.n_ctx, n_ubatch: load.n_ubatch, gives: Gives::Hidden })?;
        let allocated: u64 = uses.iter().map(|entry| entry.cache).sum();
        let described = ground.shape.cache_bytes(range, cache_request(load));
        let ratio = if described.0 > 0 { allocated as f64 / described.0 as f64 } else { 1.0 };
        if (ratio - 1.0).abs() > 0.01 {
            tracing::warn!(
                allocated,
                described = described.0,
                "llama.cpp's cache is not what the model's description says"
            );
        }
        Ok(kv_entries(ground.reduction, ground.shape, ratio))
    }
}

fn cells(shape: &ModelShape, range: LayerRange, load: Load) -> f64 {
    shape.cells(range, cache_request(load)) as f64
}

fn kv_entries(reduction: &Reduction, shape: &ModelShape, ratio: f64) -> Vec<KvEntry> {
    let whole = LayerRange::new(0, shape.n_layer());
    let kinds = whole.map(|whole| blocks_by_kind(shape, whole)).unwrap_or_default();
    debug_assert_eq!(kinds.len(), reduction.kinds.len());
    let entry = |(kind, _): (cluster::BlockKind, u32)| {
        let block = shape.blocks.iter().find(|block| block.kind == kind);
        KvEntry {
            attention: kind.attention.into(),
            feed_forward: kind.feed_forward.into(),
            bytes_per_token: block.map_or(0.0, |block| block.kv_elements_per_token as f64 * 2.0 * ratio),
            bytes_per_slot: block.map_or(0.0, |block| block.state_bytes_per_slot.0 as f64 * ratio),
        }
    };
    kinds.into_iter().map(entry).collect()
}
