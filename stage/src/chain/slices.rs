//! A stage's slices, run one after the other on the rows of a batch, with the embedding table before them on stage 0.
//! The only file that computes.

use std::ops::Range;
use std::time::{Duration, Instant};

use cluster::{LayerRange, SlotId};
use llama::kv_blob::{Blob, Prepared};
use llama::{EmbeddingTable, RowInput, SliceContext, Token};
use protocol::frame::{Frame, KvOp, Rows};

use super::{Call, Chain, ChainError};
use crate::turns::Turns;

/// One slice.
pub(crate) struct Slice {
    pub(crate) layers: LayerRange,
    pub(crate) context: SliceContext,
}

/// A stage's slices and the batch they run.
pub(crate) struct Slices {
    slices: Vec<Slice>,
    embedding: Option<EmbeddingTable>,
    n_embd: usize,
    turns: Turns,
    batch: Batch,
}

/// The rows of a batch; kept for its memory.
#[derive(Default)]
struct Batch {
    /// Either these, on stage 0, …
    tokens: Vec<Token>,
    /// … or these, `[rows, n_embd]`; filled from the tokens when they run.
    hidden: Vec<f32>,
    slots: Vec<u32>,
    positions: Vec<u32>,
    outputs: Vec<bool>,
}

impl Slices {
    pub(crate) fn new(
        slices: Vec<Slice>,
        embedding: Option<EmbeddingTable>,
        n_embd: u32,
        turns: Turns,
    ) -> Self {
        Self { slices, embedding, n_embd: n_embd as usize, turns, batch: Batch::default() }
    }

    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Runs the batch through all slices when it is this stage's turn, and says how long it took from then on.
    pub(crate) fn compute(&mut self) -> Result<Duration, ChainError> {
        let Batch { tokens, hidden, slots, positions, outputs } = &mut self.batch;
        if slots.is_empty() {
            return Ok(Duration::ZERO);
        }
        let _turn = self.turns.take().map_err(ChainError::Turn)?;
        let started = Instant::now();
        if !tokens.is_empty() {
            let embedding = self.embedding.as_mut().ok_or(ChainError::NoEmbedding)?;
            embedding.lookup(tokens, hidden).map_err(ChainError::Embedding)?;
        }
        let mut before: Option<&Slice> = None;
        for slice in &mut self.slices {
            let hidden = before.map_or(hidden.as_slice(), |slice| slice.context.hidden());
            let rows = llama::Rows { input: RowInput::Hidden(hidden), slots, positions, outputs };
            let layers = slice.layers;
            slice.context.run(&rows).map_err(|source| ChainError::Slice { layers, source })?;
            before = Some(slice);
        }
        Ok(started.elapsed())
    }
}

impl Chain for Slices {
    fn clear(&mut self) {
        for slice in &mut self.slices {
            slice.context.clear();
        }
    }

    fn apply(&mut self, op: KvOp) -> Result<(), ChainError> {
        for Slice { layers, context } in &mut self.slices {
            let applied = match op {
                KvOp::RemoveFrom { slot, from } => match context.remove_from(slot.0, from) {
                    Ok(false) => return Err(ChainError::CannotForget { layers: *layers, slot, from }),
                    Ok(true) => Ok(()),
                    Err(error) => Err(error),
                },
                KvOp::Copy { from, to } => context.copy(from.0, to.0),
                KvOp::KeepOnly(slot) => context.keep_only(slot.0),
            };
            applied.map_err(|source| ChainError::Slice { layers: *layers, source })?;
        }
        Ok(())
    }

    fn export(&mut self, slot: SlotId) -> Result<Blob, ChainError> {
        let mut parts = Vec::with_capacity(self.slices.len());
        for Slice { layers, context } in &mut self.slices {
            let part = context.export_slot(slot.0);
            parts.push(part.map_err(|source| ChainError::Slice { layers: *layers, source })?);
        }
        Blob::merge(parts).map_err(|source| ChainError::Blob { slot, source })
    }

    fn import(&mut self, slot: SlotId, blobs: &[Prepared]) -> Result<(), ChainError> {
        let (got, slices) = (blobs.len(), self.slices.len());
        if got != slices {
            return Err(ChainError::BlobCount { got, slices });
        }
        for (Slice { layers, context }, blob) in self.slices.iter_mut().zip(blobs) {
            let done = context.import_slot(slot.0, blob);
            done.map_err(|source| ChainError::Slice { layers: *layers, source })?;
        }
        Ok(())
    }

    fn begin(&mut self) {
        let Batch { tokens, hidden, slots, positions, outputs } = &mut self.batch;
        tokens.clear();
        hidden.clear();
        slots.clear();
        positions.clear();
        outputs.clear();
    }

    fn add(&mut self, frame: &Frame) -> Range<usize> {
        let batch = &mut self.batch;
        let start = batch.slots.len();
        for run in &frame.runs {
            batch.slots.extend(std::iter::repeat_n(run.slot.0, run.n as usize));
            batch.positions.extend(run.position..run.position + run.n);
        }
        batch.outputs.resize(batch.slots.len(), false);
        match &frame.rows {
            Rows::Tokens(ids) => batch.tokens.extend(ids.iter().copied().map(Token)),
            Rows::Hidden { encoding, data } => encoding.append(data, &mut batch.hidden),
        }
        start..batch.slots.len()
    }

    fn want(&mut self, row: usize) {
        if let Some(wanted) = self.batch.outputs.get_mut(row) {
            *wanted = true;
        }
    }

    fn run(&mut self, _: &Call) -> Result<Duration, ChainError> {
        self.compute()
    }

    fn hidden(&self, rows: Range<usize>) -> &[f32] {
        let all = self.slices.last().map_or(&[][..], |slice| slice.context.hidden());
        all.get(rows.start * self.n_embd..rows.end * self.n_embd).unwrap_or(&[])
    }

    fn logits(&self, row: usize) -> Option<&[f32]> {
        self.slices.last()?.context.logits(row)
    }
}
