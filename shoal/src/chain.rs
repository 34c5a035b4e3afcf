//! A model run in this process, for comparing and measuring: the whole, untouched file, or a chain of slices.
//!
//! Both are given the same steps and give logits. What serves requests is `stage`, not this.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use cluster::LayerRange;
use llama::{ContextParams, EmbeddingTable, Model, ModelParams, Output, RowInput, Rows, SliceContext, Token};
use node::StoredSlices;

/// Tokens to compute at once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Step {
    tokens: Vec<Token>,
    slots: Vec<u32>,
    positions: Vec<u32>,
    outputs: Vec<bool>,
}

impl Step {
    /// A prompt from position 0 of a slot on; logits are wanted of its last token.
    pub(crate) fn prompt(slot: u32, tokens: &[Token]) -> Self {
        let mut step = Self::default();
        for (position, &token) in (0..).zip(tokens) {
            step.push(slot, position, token);
        }
        step.outputs.iter_mut().rev().skip(1).for_each(|wanted| *wanted = false);
        step
    }

    /// Adds a token, whose logits are wanted.
    pub(crate) fn push(&mut self, slot: u32, position: u32, token: Token) {
        self.tokens.push(token);
        self.slots.push(slot);
        self.positions.push(position);
        self.outputs.push(true);
    }

    /// The same tokens in several steps of at most `n_batch`.
    pub(crate) fn cut(&self, n_batch: u32) -> Vec<Self> {
        let n = n_batch.max(1) as usize;
        let tokens = self.tokens.chunks(n).zip(self.outputs.chunks(n));
        let places = self.slots.chunks(n).zip(self.positions.chunks(n));
        let step = |((tokens, outputs), (slots, positions)): ((&[_], &[_]), (&[_], &[_]))| Self {
            tokens: tokens.to_vec(),
            slots: slots.to_vec(),
            positions: positions.to_vec(),
            outputs: outputs.to_vec(),
        };
        tokens.zip(places).map(step).collect()
    }

    /// The last row.
    pub(crate) fn last(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    fn rows<'a>(&'a self, input: RowInput<'a>) -> Rows<'a> {
        Rows { input, slots: &self.slots, positions: &self.positions, outputs: &self.outputs }
    }
}

/// What both are set up with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) slots: u32,
    /// Tokens of each slot.
    pub(crate) n_ctx: u32,
    /// Tokens of a step, at most.
    pub(crate) n_batch: u32,
    pub(crate) threads: u32,
}

impl Setup {
    fn context(&self, model: &Model, output: Output) -> Result<SliceContext> {
        let params = ContextParams {
            n_batch: self.n_batch,
            n_ubatch: self.n_batch,
            threads: self.threads,
            threads_batch: self.threads,
            ..ContextParams::new(output, self.slots, self.n_ctx)
        };
        SliceContext::new(model, &params).context("making a context")
    }
}

/// Something that computes logits.
pub(crate) trait Runner {
    /// Computes a step.
    fn run(&mut self, step: &Step) -> Result<()>;

    /// Logits of a row of the last step, `[n_vocab]`.
    fn logits(&self, row: usize) -> Result<&[f32]>;

    /// Forgets all slots.
    fn clear(&mut self);
}

/// Slices, each fed with the hidden rows of the one before.
pub(crate) struct Chain {
    embedding: EmbeddingTable,
    slices: Vec<SliceContext>,
    /// Rows on their way into a slice, `[tokens, n_embd]`.
    hidden: Vec<f32>,
}

impl Chain {
    /// Loads all slices. `on_gpu` says how many blocks of each go to GPUs; of those that it does not name, none.
    pub(crate) fn load(stored: &StoredSlices, on_gpu: &[u32], setup: Setup) -> Result<Self> {
        let last = stored.slices.len().saturating_sub(1);
        let load = |(i, file): (usize, &node::StoredFile)| {
            let output = if i == last { Output::Logits } else { Output::Hidden };
            setup.context(&load(&file.path, on_gpu.get(i).copied().unwrap_or(0))?, output)
        };
        Ok(Self {
            embedding: EmbeddingTable::open(&stored.embedding.path).context("opening the embedding")?,
            slices: stored.slices.iter().enumerate().map(load).collect::<Result<_>>()?,
            hidden: Vec::new(),
        })
    }
}

impl Runner for Chain {
    fn run(&mut self, step: &Step) -> Result<()> {
        self.embedding.lookup(&step.tokens, &mut self.hidden)?;
        let mut before: Option<&SliceContext> = None;
        for slice in &mut self.slices {
            let hidden = before.map_or(self.hidden.as_slice(), SliceContext::hidden);
            slice.run(&step.rows(RowInput::Hidden(hidden)))?;
            before = Some(slice);
        }
        Ok(())
    }

    fn logits(&self, row: usize) -> Result<&[f32]> {
        let logits = self.slices.last().and_then(|slice| slice.logits(row));
        logits.ok_or_else(|| anyhow!("the last slice gave no logits for row {row}"))
    }

    fn clear(&mut self) {
        self.slices.iter_mut().for_each(SliceContext::clear);
    }
}

/// Loads a model file, its last `gpu_layers` blocks on GPUs.
pub(crate) fn load(path: &Path, gpu_layers: u32) -> Result<Model> {
    let params = ModelParams { gpu_layers, ..ModelParams::default() };
    Model::load(path, params).with_context(|| format!("loading {}", path.display()))
}

/// How many blocks of each slice are among the last `gpu_layers` of the model, which ends with the last slice.
pub(crate) fn shares_of_gpu(ranges: &[LayerRange], gpu_layers: u32) -> Vec<u32> {
    let n_layer = ranges.last().map_or(0, |range| range.end());
    let first = n_layer.saturating_sub(gpu_layers);
    ranges.iter().map(|range| range.end().saturating_sub(first.max(range.start()))).collect()
}

/// The model's own file, given token ids.
pub(crate) struct Whole {
    context: SliceContext,
}

impl Whole {
    /// Puts the model into a context.
    pub(crate) fn new(model: &Model, setup: Setup) -> Result<Self> {
        Ok(Self { context: setup.context(model, Output::Logits)? })
    }
}

impl Runner for Whole {
    fn run(&mut self, step: &Step) -> Result<()> {
        Ok(self.context.run(&step.rows(RowInput::Tokens(&step.tokens)))?)
    }

    fn logits(&self, row: usize) -> Result<&[f32]> {
        self.context.logits(row).ok_or_else(|| anyhow!("the model gave no logits for row {row}"))
    }

    fn clear(&mut self) {
        self.context.clear();
    }
}

/// The token of the largest logit; of equal ones the first.
pub(crate) fn greedy(logits: &[f32]) -> Token {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    Token(i32::try_from(best).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_token_of_a_prompt_wants_logits() {
        let step = Step::prompt(3, &[Token(7), Token(8), Token(9)]);
        assert_eq!(step.outputs, [false, false, true]);
        assert_eq!((step.slots, step.positions), (vec![3; 3], vec![0, 1, 2]));
    }

    #[test]
    fn a_prompt_in_several_steps_wants_logits_of_its_last_token_alone() {
        let steps = Step::prompt(0, &[Token(7), Token(8), Token(9)]).cut(2);
        let positions: Vec<&[u32]> = steps.iter().map(|step| step.positions.as_slice()).collect();
        assert_eq!(positions, [&[0, 1][..], &[2]]);
        assert_eq!((&steps[0].outputs, &steps[1].outputs), (&vec![false, false], &vec![true]));
    }

    #[test]
    fn slices_share_the_last_blocks_as_the_whole_model_has_them() {
        let ranges = LayerRange::from_cuts(&[10, 20], 30).unwrap();
        assert_eq!(shares_of_gpu(&ranges, 0), [0, 0, 0]);
        assert_eq!(shares_of_gpu(&ranges, 15), [0, 5, 10]);
        assert_eq!(shares_of_gpu(&ranges, 99), [10, 10, 10]);
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits() {
        assert_eq!(greedy(&[0.5, 2.0, 2.0]), Token(1));
    }
}
