//! What is computed for a comparison: two sequences, interleaved, with greedy decoding.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use llama::Token;

/// Slots that a conversation uses.
pub(crate) const SLOTS: u32 = 2;
/// Odd, so that a prompt is never a whole number of a kernel's tiles.
pub(crate) const PROMPT_TOKENS: u32 = 33;
pub(crate) const GENERATED_TOKENS: u32 = 24;

/// Rows of one run, as token ids.
#[derive(Debug, Default)]
pub(crate) struct TokenRows {
    pub(crate) tokens: Vec<Token>,
    pub(crate) slots: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) outputs: Vec<bool>,
}

/// A model, whole or in slices.
pub(crate) trait Runner {
    /// Appends `rows` to their slots and gives the logits of the rows that want them, in the rows' order.
    fn run(&mut self, rows: &TokenRows) -> Result<Vec<Vec<f32>>>;
}

/// What a model made of a conversation.
#[derive(Debug)]
pub(crate) struct Transcript {
    /// Prompt and generated tokens of each sequence.
    pub(crate) tokens: [Vec<Token>; SLOTS as usize],
    /// Logits of every generated token, in the order of computation.
    pub(crate) logits: Vec<Vec<f32>>,
}

/// One sequence, in the slot of its index.
#[derive(Debug)]
struct Sequence {
    slot: u32,
    tokens: Vec<Token>,
    /// Tokens that the model has seen.
    done: usize,
}

/// Both sequences' prompts and greedy continuations: the second prompt is run beside the first sequence's decoding, and
/// then the two decode by turns in one run and in a run each.
pub(crate) fn converse(runner: &mut dyn Runner, n_vocab: u32) -> Result<Transcript> {
    let mut sequences = [Sequence::new(0, n_vocab), Sequence::new(1, n_vocab)];
    let mut logits = Vec::new();
    let mut run = |slots: &[usize]| step(runner, &mut sequences, slots, &mut logits);
    run(&[0])?;
    run(&[0, 1])?;
    for round in 1..GENERATED_TOKENS {
        if round % 2 == 0 {
            run(&[0])?;
            run(&[1])?;
        } else {
            run(&[1, 0])?;
        }
    }
    Ok(Transcript { tokens: sequences.map(|sequence| sequence.tokens), logits })
}

impl Sequence {
    fn new(slot: u32, n_vocab: u32) -> Self {
        let token = |index| Token(((index * 37 + 5 + slot * 11) % n_vocab) as i32);
        Self { slot, tokens: (0..PROMPT_TOKENS).map(token).collect(), done: 0 }
    }
}

/// Runs what is new of the sequences `of`: row k of each before row k + 1 of any.
fn step(
    runner: &mut dyn Runner,
    sequences: &mut [Sequence],
    of: &[usize],
    logits: &mut Vec<Vec<f32>>,
) -> Result<()> {
    let mut rows = TokenRows::default();
    let mut last_of = Vec::new();
    let most = of.iter().map(|&index| sequences[index].tokens.len() - sequences[index].done).max();
    for offset in 0..most.unwrap_or(0) {
        for &index in of {
            let sequence = &sequences[index];
            let position = sequence.done + offset;
            let Some(&token) = sequence.tokens.get(position) else { continue };
            let is_last = position + 1 == sequence.tokens.len();
            if is_last {
                last_of.push(index);
            }
            rows.tokens.push(token);
            rows.slots.push(sequence.slot);
            rows.positions.push(position as u32);
            rows.outputs.push(is_last);
        }
    }
    let given = runner.run(&rows)?;
    ensure!(given.len() == last_of.len(), "{} rows of logits for {} wanted", given.len(), last_of.len());
    for (row, index) in given.into_iter().zip(last_of) {
        let sequence = &mut sequences[index];
        sequence.done = sequence.tokens.len();
        sequence.tokens.push(greedy(&row)?);
        logits.push(row);
    }
    Ok(())
}

/// The first of equal maxima, as llama.cpp's greedy sampler has it.
fn greedy(logits: &[f32]) -> Result<Token> {
    let best = logits.iter().enumerate().reduce(|best, this| if this.1 > best.1 { this } else { best });
    Ok(Token(best.context("no logits")?.0 as i32))
}

impl Transcript {
    /// A transcript of numbers that say nothing would equal another such: refuses it.
    pub(crate) fn check_is_telling(&self) -> Result<()> {
        ensure!(self.logits.iter().flatten().all(|x| x.is_finite()), "logits that are not finite");
        let distinct: HashSet<Vec<u32>> =
            self.logits.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
        ensure!(distinct.len() == self.logits.len(), "two tokens had the same logits");
        ensure!(
            self.logits.iter().all(|row| row.iter().any(|x| *x != row[0])),
            "logits that are all the same"
        );
        Ok(())
    }

    /// Whether `other` says the same, to the bit.
    pub(crate) fn check_equals(&self, other: &Self) -> Result<()> {
        let difference = self.largest_difference(other);
        ensure!(self.tokens == other.tokens, "tokens differ, and logits by up to {difference}");
        let pairs = || self.logits.iter().zip(&other.logits);
        let same_bits = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        ensure!(
            self.logits.len() == other.logits.len() && pairs().all(same_bits),
            "logits differ by up to {difference}"
        );
        Ok(())
    }

    fn largest_difference(&self, other: &Self) -> f32 {
        let (ours, theirs) = (self.logits.iter().flatten(), other.logits.iter().flatten());
        ours.zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}
