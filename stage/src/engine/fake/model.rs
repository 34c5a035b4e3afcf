//! A model of several stages, made of hashes: a row's output depends on every cached row that it attends to, on every
//! stage. A row in the wrong slot, at the wrong time, or left over from someone else changes all tokens after it.

use cluster::SlotId;
use protocol::frame::{KvOp, RowRun};

use super::super::{FinishReason, Rollback, Sample, Sampling, Token};
use super::random::mix;
use super::sampling::{Draw, FakeSampling, logits_of};

/// The model's shape.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct FakeModel {
    pub(in super::super) stages: usize,
    pub(in super::super) n_ctx: u32,
    pub(in super::super) n_vocab: u32,
    pub(in super::super) rollback: Rollback,
}

/// One stage's cache of every slot.
#[derive(Debug, Clone)]
pub(in super::super) struct StageCache {
    stage: u64,
    rollback: Rollback,
    slots: Vec<Sequence>,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    /// Rows held, with their positions; with `Rollback::AppendOnly` only counted.
    rows: Vec<(u32, u64)>,
    /// The recurrent state, and how many rows it stands for.
    state: u64,
    state_len: u32,
}

impl StageCache {
    pub(in super::super) fn new(stage: usize, slots: u32, rollback: Rollback) -> Self {
        Self { stage: stage as u64, rollback, slots: vec![Sequence::default(); slots as usize] }
    }

    /// What stage 0 is fed for a token.
    pub(in super::super) fn embed(token: Token) -> u64 {
        mix(0xe3bed, token as u64)
    }

    /// Inputs held for a slot, in order of position; `None` where the cache keeps no rows, or not all.
    pub(in super::super) fn held(&self, slot: usize) -> Option<Vec<u64>> {
        matches!(self.rollback, Rollback::Any)
            .then(|| self.slots[slot].rows.iter().map(|(_, value)| *value).collect())
    }

    pub(in super::super) fn apply(&mut self, op: KvOp) {
        let KvOp::RemoveFrom { slot, from } = op else { panic!("the engine sends no {op:?}") };
        let sequence = &mut self.slots[slot.0 as usize];
        if self.rollback == Rollback::AppendOnly {
            let possible = from == 0 || from >= sequence.state_len;
            assert!(possible, "{slot}: a state of {} rows cannot go back to {from}", sequence.state_len);
        }
        if from == 0 {
            *sequence = Sequence::default();
        }
        sequence.rows.retain(|(position, _)| *position < from);
    }

    /// Runs `inputs` (one per row) and gives the outputs.
    pub(in super::super) fn run(&mut self, runs: &[RowRun], inputs: &[u64]) -> Vec<u64> {
        let positions =
            runs.iter().flat_map(|run| (run.position..).take(run.n as usize).map(|p| (run.slot, p)));
        positions.zip(inputs).map(|((slot, position), input)| self.row(slot, position, *input)).collect()
    }

    fn row(&mut self, slot: SlotId, position: u32, input: u64) -> u64 {
        let sequence = &mut self.slots[slot.0 as usize];
        let attended = if self.rollback == Rollback::AppendOnly {
            assert_eq!(sequence.state_len, position, "{slot}: the state stands for that many rows");
            sequence.state_len += 1;
            sequence.state = mix(sequence.state, input);
            sequence.state
        } else {
            let end = sequence.rows.last().map_or(0, |(last, _)| last + 1);
            assert_eq!(end, position, "{slot}: rows are appended");
            sequence.rows.push((position, input));
            if let Rollback::Window(window) = self.rollback {
                sequence.rows.retain(|(held, _)| held + window > position);
            }
            sequence.rows.iter().fold(0, |sum, (held, value)| mix(mix(sum, u64::from(*held)), *value))
        };
        mix(mix(self.stage, input), attended)
    }
}

impl FakeModel {
    /// What a request gets when it is alone, computed row by row on fresh caches.
    pub(in super::super) fn answer(
        &self,
        prompt: &[Token],
        draw: &Draw,
        max_tokens: u32,
        ignore_eos: bool,
    ) -> (Vec<Token>, FinishReason) {
        let mut caches: Vec<_> =
            (0..self.stages).map(|stage| StageCache::new(stage, 1, self.rollback)).collect();
        let mut sampling = FakeSampling { n_vocab: self.n_vocab };
        let mut sampler = sampling.sampler(draw, prompt, 0).unwrap();
        let mut hidden = 0;
        let mut position = 0;
        let mut feed = |token| {
            let run = RowRun { slot: SlotId(0), position, n: 1 };
            position += 1;
            caches.iter_mut().fold(StageCache::embed(token), |row, cache| cache.run(&[run], &[row])[0])
        };
        prompt.iter().for_each(|token| hidden = feed(*token));
        let mut tokens = Vec::new();
        loop {
            let position = (prompt.len() + tokens.len()) as u32;
            let token = sampler.sample(&logits_of(hidden), position).unwrap().token;
            if !ignore_eos && sampling.ends_generation(token) {
                return (tokens, FinishReason::Stop);
            }
            tokens.push(token);
            if tokens.len() == max_tokens as usize || position == self.n_ctx {
                return (tokens, FinishReason::Length);
            }
            hidden = feed(token);
        }
    }
}
