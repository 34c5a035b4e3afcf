//! One replay: stored rows, one call each, with a gap before every call.
//!
//! The gap is a sleep of the thread that calls, as a stage's thread sleeps while it waits for a frame. Nothing spins:
//! a spinning core would not be idle.

use std::time::{Duration, Instant};

use cluster::Millis;
use llama::{Rows, SliceContext};

use super::{HiddenRows, IdleGapError, PROMPT};

/// Tokens replayed with the gap before measuring begins, so that nothing is left of the prompt's own run.
pub(super) const SETTLING: u32 = 2;

/// More than any system oversleeps by habit; beyond that something else took the core, which says nothing about next time.
const LONGEST_HABIT: Duration = Duration::from_millis(2);

/// Slots, positions and outputs of consecutive rows of slot 0.
pub(super) struct Span {
    first: u32,
    slots: Vec<u32>,
    positions: Vec<u32>,
    outputs: Vec<bool>,
}

impl Span {
    /// `count` rows from `first` on; logits are wanted of the last.
    pub(super) fn new(first: u32, count: u32) -> Self {
        Self {
            first,
            slots: vec![0; count as usize],
            positions: (first..first + count).collect(),
            outputs: (1..=count).map(|row| row == count).collect(),
        }
    }
}

/// Runs stored rows in a slice.
pub(super) fn run(context: &mut SliceContext, rows: &HiddenRows, span: &Span) -> Result<(), llama::Error> {
    let Span { first, slots, positions, outputs } = span;
    let input = rows.input(*first, u32::try_from(slots.len()).unwrap_or(u32::MAX));
    context.run(&Rows { input, slots, positions, outputs })
}

/// Means over the tokens of one replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pass {
    /// From the end of a call to the begin of the next.
    pub(super) gap: Millis,
    /// From the begin of a call to its end.
    pub(super) call: Millis,
}

/// Replays rows with gaps, and learns how late this system wakes.
#[derive(Debug, Default)]
pub(super) struct Replayer {
    /// How much longer than asked a sleep takes, lately.
    oversleeps: Duration,
}

impl Replayer {
    /// Fills slot 0 with the prompt and replays `tokens` rows after it with `gap` before each.
    pub(super) fn pass(
        &mut self,
        context: &mut SliceContext,
        rows: &HiddenRows,
        gap: Millis,
        tokens: u32,
    ) -> Result<Pass, IdleGapError> {
        rows.require(PROMPT + SETTLING + tokens)?;
        let spans: Vec<Span> = (0..SETTLING + tokens).map(|i| Span::new(PROMPT + i, 1)).collect();
        context.clear();
        run(context, rows, &Span::new(0, PROMPT))?;
        let (mut gaps, mut calls) = (Duration::ZERO, Duration::ZERO);
        let mut ended = Instant::now();
        for (i, span) in (0..).zip(&spans) {
            if gap.0 > 0.0 {
                self.sleep_until(ended + Duration::from_secs_f64(gap.0 / 1e3));
            }
            let began = Instant::now();
            run(context, rows, span)?;
            let end = Instant::now();
            if i >= SETTLING {
                gaps += began - ended;
                calls += end - began;
            }
            ended = end;
        }
        let mean = |sum: Duration| Millis(Millis::from(sum).0 / f64::from(tokens.max(1)));
        Ok(Pass { gap: mean(gaps), call: mean(calls) })
    }

    /// Sleeps so as to be awake at `deadline`: systems wake late, by much the same each time. However late that is, half of
    /// the time is slept at least.
    fn sleep_until(&mut self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let asked = left - self.oversleeps.min(left / 2);
        let begin = Instant::now();
        std::thread::sleep(asked);
        self.learn(begin.elapsed().saturating_sub(asked));
    }

    fn learn(&mut self, overslept: Duration) {
        self.oversleeps = (self.oversleeps * 7 + overslept.min(LONGEST_HABIT)) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversleeping_is_learned_and_accidents_are_not() {
        let mut replayer = Replayer::default();
        for _ in 0..50 {
            replayer.learn(Duration::from_micros(80));
        }
        let habit = replayer.oversleeps;
        assert!(habit > Duration::from_micros(75) && habit <= Duration::from_micros(80), "{habit:?}");
        replayer.learn(Duration::from_secs(3));
        assert!(replayer.oversleeps < habit + LONGEST_HABIT / 4, "{:?}", replayer.oversleeps);
    }

    #[test]
    fn logits_are_wanted_of_a_spans_last_row_alone() {
        let span = Span::new(3, 2);
        assert_eq!((span.positions, span.outputs), (vec![3, 4], vec![false, true]));
    }
}
