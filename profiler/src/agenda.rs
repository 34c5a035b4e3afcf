//! What is measured, and in which processes: each session holds a few slices in contexts of one depth, and stays below a limit of
//! memory. What would not fit is left out, with the bytes it would have taken, and the fit does without it.

use std::collections::HashMap;
use std::path::PathBuf;

use cluster::{Attention, Bytes, CONTEXT_STEP, LayerRange, Load, MemoryCosts, ModelShape, cache_request};
use protocol::plan_files::MeasuredPartEntry;

use crate::reduction::Reduction;
use crate::sampling::{Item, Point};
use crate::session::SessionSpec;
use crate::wire::{Command, ContextSpec, Gives, Processor, Setup};

/// Rows of decode steps.
pub(crate) const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// Tokens of prefill chunks, in groups that share contexts: a context's buffers are sized for its longest chunk.
const CHUNKS: [&[u32]; 3] = [&[64, 128, 256, 512], &[1024], &[2048]];

/// Depths of decode steps, besides the slot's end.
const DECODE_DEPTHS: [u32; 3] = [0, 1024, 4096];

/// The second is less where the slot ends before.
const PREFILL_DEPTHS: [u32; 2] = [0, 4096];

const LOOK_UPS: [u32; 7] = [1, 4, 16, 32, 128, 512, 2048];

const HOPS: [u32; 4] = [1, 8, 32, 512];

/// Rows that fill a cache at once: few, for their buffers take memory that caches could have.
const FILL: u32 = 64;

/// The files of a reduced model.
#[derive(Debug, Clone)]
pub struct Files {
    /// The slices, by their blocks.
    pub slices: HashMap<LayerRange, PathBuf>,
    /// The token embeddings.
    pub embedding: PathBuf,
}

/// What measuring one processor stands on.
pub(crate) struct Ground<'a> {
    pub(crate) shape: &'a ModelShape,
    pub(crate) reduction: &'a Reduction,
    pub(crate) files: &'a Files,
    pub(crate) processor: Processor,
    pub(crate) threads: u32,
    /// Tokens per slot.
    pub(crate) n_ctx: u32,
    pub(crate) costs: MemoryCosts,
    /// What a process may hold.
    pub(crate) limit: Bytes,
    /// The processor's largest cache.
    pub(crate) last_level_cache: Bytes,
}

/// A session to be, what it measures, what was left out of it, and its share of the time.
pub(crate) struct Planned {
    pub(crate) spec: SessionSpec,
    pub(crate) items: Vec<Item>,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) share: f64,
    /// What its process should hold.
    pub(crate) expected: Bytes,
}

/// A measurement that does not fit.
#[derive(Debug, Clone)]
pub(crate) struct LeftOut {
    pub(crate) what: String,
    pub(crate) needed: Bytes,
    pub(crate) limit: Bytes,
}

/// Slices in contexts of one kind.
struct Contexts {
    ranges: Vec<LayerRange>,
    load: Load,
    depth: u32,
}

impl Ground<'_> {
    /// All sessions.
    pub(crate) fn agenda(&self) -> Vec<Planned> {
        let depths = self.decode_depths();
        let share = |depth: u32| if depth == 0 { 0.25 } else { 0.25 / (depths.len() as f64 - 1.0).max(1.0) };
        let mut agenda: Vec<Planned> =
            depths.iter().flat_map(|&depth| self.decode(depth, &BATCHES, share(depth))).collect();
        agenda.push(self.head(&BATCHES));
        for depth in PREFILL_DEPTHS {
            for chunks in CHUNKS {
                agenda.extend(self.prefill(depth, chunks));
            }
        }
        if self.processor == Processor::Cpu {
            agenda.push(self.surroundings());
        }
        agenda
    }

    /// Depths below the slot's end, and the slot's end: less the room in which a few steps can be taken.
    fn decode_depths(&self) -> Vec<u32> {
        let end = self.n_ctx - CONTEXT_STEP.min(self.n_ctx / 4);
        let mut depths: Vec<u32> = DECODE_DEPTHS.into_iter().filter(|depth| *depth < end).collect();
        depths.push(end);
        depths
    }

    /// Decode steps at one depth: of all slices by as many rows as their caches have room for, and of the smallest alone by as many
    /// more as its own has.
    pub(crate) fn decode(&self, depth: u32, batches: &[u32], share: f64) -> Vec<Planned> {
        let smallest = self.reduction.slices.first().map(std::slice::from_ref).unwrap_or_default();
        let mut left: Vec<u32> = batches.to_vec();
        let mut sessions = Vec::with_capacity(2);
        for (ranges, share) in [(self.reduction.slices.as_slice(), share), (smallest, share / 2.0)] {
            let fits = |rows: &u32| self.needed(&self.decoding(ranges, depth, *rows)) <= self.limit;
            let fitting: Vec<u32> = left.iter().copied().filter(fits).collect();
            left.retain(|rows| !fitting.contains(rows));
            if !fitting.is_empty() {
                sessions.push(self.decode_session(ranges, depth, &fitting, share));
            }
        }
        let left_out = |rows: &u32| LeftOut {
            what: format!("decode of {rows} rows at depth {depth}"),
            needed: self.needed(&self.decoding(smallest, depth, *rows)),
            limit: self.limit,
        };
        if !left.is_empty() {
            sessions
                .push(Planned { left_out: left.iter().map(left_out).collect(), ..self.without_slices(0.0) });
        }
        sessions
    }

    fn decoding(&self, ranges: &[LayerRange], depth: u32, slots: u32) -> Contexts {
        let n_ctx = (depth + CONTEXT_STEP).min(self.n_ctx.max(CONTEXT_STEP));
        let n_ubatch = if depth == 0 { slots } else { FILL.max(slots) };
        Contexts { ranges: ranges.to_vec(), load: Load { slots, n_ctx, n_ubatch }, depth }
    }

    fn decode_session(&self, ranges: &[LayerRange], depth: u32, batches: &[u32], share: f64) -> Planned {
        let most = batches.iter().copied().max().unwrap_or(1);
        let mut planned = self.session(&self.decoding(ranges, depth, most), share);
        for &rows in batches {
            for (context, range) in ranges.iter().enumerate() {
                let point = Point { part: MeasuredPartEntry::Decode, layers: Some(*range), rows, depth };
                planned.items.push(Item::new(point, 0, Command::Decode { context, rows }));
            }
        }
        planned
    }

    /// Decode steps of the last slice, and beside them of a like one without the head.
    pub(crate) fn head(&self, batches: &[u32]) -> Planned {
        let Reduction { last, twin, .. } = self.reduction;
        let contexts = |slots: u32| Contexts {
            ranges: twin.iter().copied().chain([*last]).collect(),
            load: Load { slots, n_ctx: CONTEXT_STEP, n_ubatch: slots },
            depth: 0,
        };
        let fits = |rows: &u32| self.needed(&contexts(*rows)) <= self.limit;
        // The head must be measured: what else does not fit is found out by trying.
        let fitting: Vec<u32> = batches
            .iter()
            .copied()
            .enumerate()
            .filter(|(i, rows)| *i == 0 || fits(rows))
            .map(|(_, rows)| rows)
            .collect();
        let contexts = contexts(fitting.last().copied().unwrap_or(1));
        let mut planned = self.session(&contexts, 0.12);
        for &rows in &fitting {
            for (context, range) in contexts.ranges.iter().enumerate() {
                let part =
                    if range == last { MeasuredPartEntry::Head } else { MeasuredPartEntry::WithoutHead };
                let point = Point { part, layers: Some(*range), rows, depth: 0 };
                planned.items.push(Item::new(point, 0, Command::Decode { context, rows }));
            }
        }
        planned
    }

    /// Prefill chunks at one depth: of all slices, or of the smallest alone where there is no room for more.
    pub(crate) fn prefill(&self, depth: u32, chunks: &[u32]) -> Option<Planned> {
        let mut chunks: Vec<u32> = chunks.iter().copied().filter(|chunk| *chunk < self.n_ctx).collect();
        if chunks.is_empty() && depth == 0 && self.n_ctx <= CHUNKS[0][0] {
            chunks.push(self.n_ctx / 2);
        }
        let longest = *chunks.last()?;
        let is_deep = depth > 0;
        let depth = depth.min((self.n_ctx - longest - 1) / CONTEXT_STEP * CONTEXT_STEP);
        if is_deep && depth == 0 {
            return None;
        }
        // One row more goes ahead of each chunk where the state before is restored from a copy.
        let slots = if depth > 0 && self.needs_copies() { 2 } else { 1 };
        let contexts = |ranges: &[LayerRange]| Contexts {
            ranges: ranges.to_vec(),
            load: Load { slots, n_ctx: depth + longest + 1, n_ubatch: longest },
            depth,
        };
        let smallest = self.reduction.slices.first()?;
        let choices = [contexts(&self.reduction.slices), contexts(&[*smallest])];
        let needed = self.needed(&choices[1]);
        let Some(contexts) = choices.into_iter().find(|contexts| self.needed(contexts) <= self.limit) else {
            let what = format!("prefill of {longest} rows at depth {depth}");
            let left_out = vec![LeftOut { what, needed, limit: self.limit }];
            return Some(Planned { left_out, ..self.without_slices(0.0) });
        };
        let mut planned = self.session(&contexts, 0.05);
        for &rows in &chunks {
            for (context, range) in contexts.ranges.iter().enumerate() {
                let point = Point { part: MeasuredPartEntry::Prefill, layers: Some(*range), rows, depth };
                planned.items.push(Item::new(point, 0, Command::Prefill { context, rows }));
            }
        }
        Some(planned)
    }

    /// The smallest slice alone, with room for so many tokens, to let it idle.
    pub(crate) fn idling(&self, tokens: u32) -> Option<(SessionSpec, Command)> {
        let load = Load { slots: 1, n_ctx: tokens, n_ubatch: tokens };
        let contexts = Contexts { ranges: vec![*self.reduction.slices.first()?], load, depth: 0 };
        Some((self.session(&contexts, 0.0).spec, Command::ColdCall { context: 0 }))
    }

    /// Embedding look-up and hop.
    fn surroundings(&self) -> Planned {
        let mut planned = self.look_ups(&LOOK_UPS);
        let hops = HOPS
            .iter()
            .map(|&rows| Item::new(around(MeasuredPartEntry::Hop, rows), 0, Command::Hop { rows }));
        planned.items.extend(hops);
        planned
    }

    /// Embedding look-up.
    pub(crate) fn look_ups(&self, numbers: &[u32]) -> Planned {
        let mut planned = self.without_slices(0.05);
        let look_up =
            |&rows: &u32| Item::new(around(MeasuredPartEntry::Embedding, rows), 0, Command::Embed { rows });
        planned.items = numbers.iter().map(look_up).collect();
        planned
    }

    fn without_slices(&self, share: f64) -> Planned {
        let none = Contexts { ranges: Vec::new(), load: Load { slots: 1, n_ctx: 1, n_ubatch: 1 }, depth: 0 };
        self.session(&none, share)
    }

    fn session(&self, contexts: &Contexts, share: f64) -> Planned {
        let paths = contexts.ranges.iter().filter_map(|range| self.files.slices.get(range).cloned());
        let Contexts { load, depth, .. } = *contexts;
        let spec = |(number, range): (usize, &LayerRange)| ContextSpec {
            context: number,
            slice: number,
            gives: if range.end() == self.shape.n_layer() { Gives::Logits } else { Gives::Hidden },
            slots: load.slots,
            n_ctx: load.n_ctx,
            n_ubatch: load.n_ubatch,
            depth,
            looks_up: false,
        };
        let spec = SessionSpec {
            setup: self.setup(self.cold_bytes(&contexts.ranges)),
            slices: paths.collect(),
            contexts: contexts.ranges.iter().enumerate().map(spec).collect(),
        };
        Planned { spec, items: Vec::new(), left_out: Vec::new(), share, expected: self.needed(contexts) }
    }

    /// How a worker begins.
    pub(crate) fn setup(&self, cold: Bytes) -> Setup {
        Setup {
            processor: self.processor.clone(),
            threads: self.threads,
            cold_bytes: cold.0,
            n_embd: self.shape.n_embd,
            embedding: Some(self.files.embedding.clone()),
        }
    }

    /// What is streamed between two runs, so that a block's weights have left the caches when it is run again, as they have in the
    /// whole model: the slices themselves count, and a model that fits the caches as a whole is left there.
    pub(crate) fn cold_bytes(&self, ranges: &[LayerRange]) -> Bytes {
        if self.processor != Processor::Cpu {
            return Bytes::ZERO;
        }
        let slices = self.bytes_of(ranges);
        let whole: Bytes = self.shape.blocks.iter().map(|block| block.weight_bytes).sum();
        let cache = self.last_level_cache;
        let enough = Bytes(cache.0 / 4 * 5).saturating_sub(slices).max(Bytes(cache.0 / 2));
        enough.min((whole + self.shape.head_bytes).saturating_sub(slices))
    }

    /// What the files of these slices hold together.
    pub(crate) fn bytes_of(&self, ranges: &[LayerRange]) -> Bytes {
        ranges.iter().map(|range| self.file_bytes(*range)).sum()
    }

    fn file_bytes(&self, range: LayerRange) -> Bytes {
        // A file that is missing fails when it is loaded.
        let size = self.files.slices.get(&range).and_then(|path| std::fs::metadata(path).ok());
        Bytes(size.map_or(0, |file| file.len()))
    }

    /// What a process with these contexts holds.
    fn needed(&self, contexts: &Contexts) -> Bytes {
        let Contexts { ranges, load, .. } = contexts;
        let request = cache_request(*load);
        let of_slice = |range: &LayerRange| {
            let is_last = range.end() == self.shape.n_layer();
            let logits = if is_last {
                Bytes(u64::from(load.slots)) * u64::from(self.shape.n_vocab) * 4
            } else {
                Bytes::ZERO
            };
            let vocabulary = if is_last { self.costs.vocabulary } else { Bytes::ZERO };
            let rows =
                (self.costs.work_row + Bytes(u64::from(self.shape.n_embd) * 4)) * u64::from(load.n_ubatch);
            self.file_bytes(*range)
                + self.shape.cache_bytes(*range, request)
                + self.costs.compute(*load, self.shape.cells(*range, request), is_last)
                + (logits + vocabulary + rows)
        };
        let rows_in = Bytes(u64::from(load.n_ubatch)) * u64::from(self.shape.n_embd) * 4;
        let slices: Bytes = ranges.iter().map(of_slice).sum();
        self.costs.runtime + self.cold_bytes(ranges) + rows_in + slices
    }

    fn needs_copies(&self) -> bool {
        self.shape.blocks.iter().any(|block| block.kind.attention != Attention::Full)
    }
}

/// What belongs to no blocks.
fn around(part: MeasuredPartEntry, rows: u32) -> Point {
    Point { part, layers: None, rows, depth: 0 }
}
