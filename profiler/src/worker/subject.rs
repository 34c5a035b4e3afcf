//! A context that is measured: it is run exactly as a stage worker runs its slice, from the same depth each time.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cluster::ColdCall;
use llama::{ContextParams, EmbeddingTable, Error, Model, Output, RowInput, Rows, SliceContext, Token};

use super::cold::Cold;
use crate::idle_gap::{COLD_CALL_ROWS, HiddenRows, IdleGapError, cold_call};
use crate::wire::{ContextSpec, Gives};

/// Tokens that rows are drawn from: enough to keep all experts busy, and few enough that the pages of their embeddings, which
/// are mapped, do not count.
const VARIETY: u32 = 2048;

/// Rows on their way in. Tokens are drawn anew for each run: experts are picked by what a row holds.
pub(super) struct Input {
    pub(super) embedding: Option<EmbeddingTable>,
    pub(super) n_embd: u32,
    state: u64,
    tokens: Vec<Token>,
    hidden: Vec<f32>,
}

impl Input {
    pub(super) fn new(embedding: Option<EmbeddingTable>, n_embd: u32) -> Self {
        Self { embedding, n_embd, state: 1, tokens: Vec::new(), hidden: Vec::new() }
    }

    /// Draws some tokens of the vocabulary's first.
    fn draw(&mut self, rows: u32) {
        self.draw_of(rows, VARIETY);
    }

    /// Draws tokens of the whole vocabulary.
    pub(super) fn draw_widely(&mut self, rows: u32) {
        self.draw_of(rows, u32::MAX);
    }

    fn draw_of(&mut self, rows: u32, most: u32) {
        let n_tokens = self.embedding.as_ref().map_or(1, EmbeddingTable::n_tokens).clamp(1, most);
        self.tokens.clear();
        for _ in 0..rows {
            let token = (self.random() * f64::from(n_tokens)) as i32;
            self.tokens.push(Token(token));
        }
    }

    /// Turns the tokens into hidden rows.
    pub(super) fn look_up(&mut self) -> Result<(), Error> {
        if let Some(embedding) = &mut self.embedding {
            return embedding.lookup(&self.tokens, &mut self.hidden);
        }
        let n = self.tokens.len() * self.n_embd as usize;
        self.hidden.clear();
        for _ in 0..n {
            let value = self.random() as f32 - 0.5;
            self.hidden.push(value);
        }
        Ok(())
    }

    /// Evenly from 0 to 1 (a linear congruential generator: only variety matters).
    fn random(&mut self) -> f64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A context and what its slots hold.
pub(super) struct Subject {
    context: SliceContext,
    spec: ContextSpec,
    /// Slots hold `spec.depth` tokens or somewhat more.
    is_filled: bool,
    slots: Vec<u32>,
    positions: Vec<u32>,
    outputs: Vec<bool>,
}

impl Subject {
    pub(super) fn new(model: &Model, spec: ContextSpec, threads: u32) -> Result<Self, Error> {
        let output = match spec.gives {
            Gives::Hidden => Output::Hidden,
            Gives::Logits => Output::Logits,
        };
        let n_batch = spec.n_ubatch.max(spec.slots);
        let params = ContextParams {
            n_batch,
            n_ubatch: n_batch,
            threads,
            threads_batch: threads,
            ..ContextParams::new(output, spec.slots, spec.n_ctx)
        };
        Ok(Self {
            context: SliceContext::new(model, &params)?,
            spec,
            is_filled: false,
            slots: Vec::new(),
            positions: Vec::new(),
            outputs: Vec::new(),
        })
    }

    pub(super) fn context(&self) -> &SliceContext {
        &self.context
    }

    /// One row in each of the first `rows` slots. Stages decode without a pause, so a step goes before the one that counts: what
    /// idling costs is measured for itself.
    pub(super) fn decode(&mut self, rows: u32, input: &mut Input, cold: &Cold) -> Result<Duration, Error> {
        self.step(rows, input, cold)?;
        self.step(rows, input, cold)
    }

    fn step(&mut self, rows: u32, input: &mut Input, cold: &Cold) -> Result<Duration, Error> {
        let has_room = (0..rows).all(|slot| self.context.next_position(slot) < self.spec.n_ctx);
        if !self.is_filled || !has_room {
            self.fill(input)?;
        }
        self.place((0..rows).map(|slot| (slot, 1)));
        self.outputs.fill(true);
        self.timed(input, cold)
    }

    /// `rows` rows of slot 0, of which the last wants logits. What they add is taken back.
    pub(super) fn prefill(&mut self, rows: u32, input: &mut Input, cold: &Cold) -> Result<Duration, Error> {
        let depth = self.spec.depth;
        if depth == 0 {
            self.context.clear();
        } else if self.spec.slots > 1 {
            // The state before a chunk is not kept by every model; slot 1 holds another copy of it.
            if !self.is_filled {
                self.fill(input)?;
            }
            self.context.copy(1, 0)?;
            // Copies are carried out by the next run, which must not be the one that is timed.
            self.place([(0, 1)].into_iter());
            self.run(input)?;
        } else if !self.is_filled || !self.context.remove_from(0, depth)? {
            self.fill(input)?;
        }
        self.place([(0, rows)].into_iter());
        self.timed(input, cold)
    }

    /// What idling adds to a call; empties all slots.
    pub(super) fn cold_call(&mut self, input: &mut Input) -> Result<ColdCall, IdleGapError> {
        self.is_filled = false;
        input.draw(COLD_CALL_ROWS);
        input.look_up()?;
        let rows = HiddenRows::new(input.n_embd, input.hidden.clone())?;
        // The end of stdin ends the process, so there is nothing to ask in between.
        cold_call(&mut self.context, &rows, &mut || ControlFlow::Continue(()))
    }

    /// Brings all slots to the depth, by way of the first.
    fn fill(&mut self, input: &mut Input) -> Result<(), Error> {
        self.context.clear();
        let n_batch = self.context.params().n_batch;
        while self.context.next_position(0) < self.spec.depth {
            let left = self.spec.depth - self.context.next_position(0);
            self.place([(0, left.min(n_batch))].into_iter());
            self.run(input)?;
        }
        if self.spec.depth > 0 && self.spec.slots > 1 {
            (1..self.spec.slots).try_for_each(|slot| self.context.copy(0, slot))?;
            // Carries the copies out.
            self.place([(0, 1)].into_iter());
            self.run(input)?;
        }
        self.is_filled = true;
        Ok(())
    }

    /// The next rows: how many of each slot.
    fn place(&mut self, runs: impl Iterator<Item = (u32, u32)>) {
        self.slots.clear();
        self.positions.clear();
        for (slot, n) in runs {
            let first = self.context.next_position(slot);
            self.slots.extend(std::iter::repeat_n(slot, n as usize));
            self.positions.extend(first..first + n);
        }
        self.outputs.clear();
        self.outputs.resize(self.slots.len(), false);
        if let Some(last) = self.outputs.last_mut() {
            *last = true;
        }
    }

    fn run(&mut self, input: &mut Input) -> Result<(), Error> {
        input.draw(self.slots.len() as u32);
        input.look_up()?;
        self.compute(input)
    }

    fn timed(&mut self, input: &mut Input, cold: &Cold) -> Result<Duration, Error> {
        input.draw(self.slots.len() as u32);
        input.look_up()?;
        cold.stream();
        let start = Instant::now();
        if self.spec.looks_up {
            input.look_up()?;
        }
        self.compute(input)?;
        Ok(start.elapsed())
    }

    fn compute(&mut self, input: &Input) -> Result<(), Error> {
        self.context.run(&Rows {
            input: RowInput::Hidden(&input.hidden),
            slots: &self.slots,
            positions: &self.positions,
            outputs: &self.outputs,
        })
    }
}
