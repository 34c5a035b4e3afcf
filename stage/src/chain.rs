//! A stage's slices, run one after the other on the rows of a batch, with the embedding table before them on stage 0.
//! The only file that computes; knows rows and slots, no frames' ways and no requests.

use std::ops::Range;

use cluster::{LayerRange, SlotId};
use llama::{EmbeddingTable, RowInput, SliceContext, Token};
use protocol::frame::{Frame, KvOp, Rows};
use thiserror::Error;

/// Why a batch could not be run.
#[derive(Debug, Error)]
pub(crate) enum ChainError {
    /// llama.cpp, or a check before it.
    #[error("blocks {layers}: {source}")]
    Slice {
        layers: LayerRange,
        #[source]
        source: llama::Error,
    },
    /// The token embeddings could not be looked up.
    #[error("token embeddings: {0}")]
    Embedding(#[source] llama::Error),
    /// Some block does not keep what is needed to go back there. The engine avoids such operations.
    #[error("blocks {layers}: {slot} cannot be cut back to position {from}, the state there is not kept")]
    CannotForget { layers: LayerRange, slot: SlotId, from: u32 },
    /// Token ids reached a stage without embeddings; frames are checked against that.
    #[error("token ids without embeddings to look them up in")]
    NoEmbedding,
}

/// One slice.
pub(crate) struct Slice {
    pub(crate) layers: LayerRange,
    pub(crate) context: SliceContext,
}

/// A stage's slices and the batch they run.
pub(crate) struct Chain {
    slices: Vec<Slice>,
    embedding: Option<EmbeddingTable>,
    n_embd: usize,
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

impl Chain {
    pub(crate) fn new(slices: Vec<Slice>, embedding: Option<EmbeddingTable>, n_embd: u32) -> Self {
        Self { slices, embedding, n_embd: n_embd as usize, batch: Batch::default() }
    }

    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Forgets every sequence.
    pub(crate) fn clear(&mut self) {
        for slice in &mut self.slices {
            slice.context.clear();
        }
    }

    /// Applies an operation to every slice.
    pub(crate) fn apply(&mut self, op: KvOp) -> Result<(), ChainError> {
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

    /// Begins an empty batch.
    pub(crate) fn begin(&mut self) {
        let Batch { tokens, hidden, slots, positions, outputs } = &mut self.batch;
        tokens.clear();
        hidden.clear();
        slots.clear();
        positions.clear();
        outputs.clear();
    }

    /// Adds a frame's rows to the batch and returns where they are in it.
    pub(crate) fn add(&mut self, frame: &Frame) -> Range<usize> {
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

    /// Asks for the logits of a row of the batch.
    pub(crate) fn want(&mut self, row: usize) {
        if let Some(wanted) = self.batch.outputs.get_mut(row) {
            *wanted = true;
        }
    }

    /// Runs the batch through all slices. A batch without rows is none.
    pub(crate) fn run(&mut self) -> Result<(), ChainError> {
        let Batch { tokens, hidden, slots, positions, outputs } = &mut self.batch;
        if slots.is_empty() {
            return Ok(());
        }
        if !tokens.is_empty() {
            let embedding = self.embedding.as_ref().ok_or(ChainError::NoEmbedding)?;
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
        Ok(())
    }

    /// Hidden rows `[rows, n_embd]` of the last run, unless the last slice gives logits.
    pub(crate) fn hidden(&self, rows: Range<usize>) -> &[f32] {
        let all = self.slices.last().map_or(&[][..], |slice| slice.context.hidden());
        all.get(rows.start * self.n_embd..rows.end * self.n_embd).unwrap_or(&[])
    }

    /// Logits `[n_vocab]` of a row of the last run, if they were asked for.
    pub(crate) fn logits(&self, row: usize) -> Option<&[f32]> {
        self.slices.last()?.context.logits(row)
    }
}
