//! How fast a replica is: what was predicted of it, until what is observed says more. No clock: durations are handed in.
//!
//! Observations are those of the replica's own requests, so they hold whatever slows it: prompts computed between steps, links,
//! other programs. They are kept by the number of requests that generated at once, since a step takes longer with more rows.

use cluster::{Millis, TokensPerSecond};

/// What is predicted of a replica's speed, as its plan has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictedRates {
    /// Prompt tokens per second.
    pub prefill: TokensPerSecond,
    /// Time per output token with one request.
    pub tpot_alone: Millis,
    /// Time per output token with every slot busy.
    pub tpot_full: Millis,
}

impl Default for PredictedRates {
    /// Of a replica of which nothing is known: a small model on a laptop. Replicas that nothing is known of are alike, and that is
    /// all that routing needs.
    fn default() -> Self {
        Self { prefill: TokensPerSecond(500.0), tpot_alone: Millis(50.0), tpot_full: Millis(50.0) }
    }
}

/// Seconds per token, the mean over what was seen of late.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Pace {
    seconds: f64,
    tokens: f64,
}

impl Pace {
    /// What is older counts half, and then a quarter: a replica that got slower is known for it after so many tokens.
    const MEMORY: f64 = 4096.0;

    fn observe(&mut self, seconds: f64, tokens: f64) {
        self.seconds += seconds;
        self.tokens += tokens;
        if self.tokens > Self::MEMORY {
            self.seconds /= 2.0;
            self.tokens /= 2.0;
        }
    }

    /// The mean, once there is something that it is the mean of.
    fn mean(self) -> Option<f64> {
        (self.tokens >= 1.0).then(|| self.seconds / self.tokens)
    }
}

/// How fast a replica is.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    predicted: PredictedRates,
    prefill: Pace,
    /// By the number of requests that generated at once, less one.
    decode: Vec<Pace>,
}

/// Prompt tokens for which a prediction counts: after as many observed ones it counts half.
const PREDICTION_WEIGHT: f64 = 256.0;

impl Rates {
    pub(super) fn new(predicted: PredictedRates, slots: usize) -> Self {
        let per_token = 1.0 / predicted.prefill.0.max(f64::MIN_POSITIVE);
        let prefill = Pace { seconds: per_token * PREDICTION_WEIGHT, tokens: PREDICTION_WEIGHT };
        Self { predicted, prefill, decode: vec![Pace::default(); slots.max(1)] }
    }

    /// Seconds that a prompt of so many tokens takes.
    pub(super) fn prefill_seconds(&self, tokens: f64) -> f64 {
        tokens * self.prefill.mean().unwrap_or(0.0)
    }

    /// Whether anything was predicted of this replica's prompts, or seen of them.
    pub(super) fn knows_prefill(&self) -> bool {
        self.predicted != PredictedRates::default() || self.prefill.tokens > PREDICTION_WEIGHT
    }

    /// Whether anything was predicted of this replica's tokens, or a few dozen of them were seen.
    pub(super) fn knows_decode(&self) -> bool {
        const ENOUGH_TOKENS: f64 = 32.0;
        let seen: f64 = self.decode.iter().map(|pace| pace.tokens).sum();
        self.predicted != PredictedRates::default() || seen >= ENOUGH_TOKENS
    }

    /// Seconds per token with `n` requests running. Of numbers that were not seen: as much above or below the nearest that was
    /// seen as was predicted.
    pub(super) fn tpot(&self, n: usize) -> f64 {
        let n = n.clamp(1, self.decode.len());
        let seen = self.decode.iter().enumerate().filter_map(|(i, pace)| Some((i + 1, pace.mean()?)));
        let nearest = seen.min_by_key(|(m, _)| m.abs_diff(n));
        match nearest {
            Some((m, seconds)) if m == n => seconds,
            Some((m, seconds)) => seconds * self.predicted_tpot(n) / self.predicted_tpot(m),
            None => self.predicted_tpot(n),
        }
    }

    /// Prompts of so many tokens were computed while the replica spent so many seconds with prompts.
    pub(super) fn saw_prefill(&mut self, seconds: f64, tokens: f64) {
        self.prefill.observe(seconds, tokens);
    }

    /// So many tokens came in so many seconds in which `n` requests generated.
    pub(super) fn saw_decode(&mut self, n: usize, seconds: f64, tokens: u64) {
        let place = n.clamp(1, self.decode.len()) - 1;
        self.decode[place].observe(seconds * n as f64, tokens as f64);
    }

    fn predicted_tpot(&self, n: usize) -> f64 {
        let PredictedRates { tpot_alone, tpot_full, .. } = self.predicted;
        let share = (n - 1) as f64 / (self.decode.len().max(2) - 1) as f64;
        ((tpot_alone.0 + (tpot_full.0 - tpot_alone.0) * share) / 1e3).max(1e-6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates() -> Rates {
        let predicted = PredictedRates {
            prefill: TokensPerSecond(1000.0),
            tpot_alone: Millis(10.0),
            tpot_full: Millis(40.0),
        };
        Rates::new(predicted, 4)
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn a_prediction_counts_until_something_was_seen() {
        let rates = rates();
        near(rates.prefill_seconds(500.0), 0.5);
        for (n, ms) in [(1, 10.0), (2, 20.0), (4, 40.0), (9, 40.0)] {
            near(rates.tpot(n), ms / 1e3);
        }
    }

    #[test]
    fn what_was_seen_with_other_numbers_is_carried_over_as_predicted() {
        let mut rates = rates();
        // Two requests, 100 tokens in 4 s: each had one every 80 ms.
        rates.saw_decode(2, 4.0, 100);
        near(rates.tpot(2), 0.08);
        near(rates.tpot(1), 0.04);
        near(rates.tpot(4), 0.16);
    }

    #[test]
    fn a_replica_that_gets_slower_is_known_for_it() {
        let mut rates = rates();
        for _ in 0..100 {
            rates.saw_prefill(1.0, 1000.0);
        }
        for _ in 0..100 {
            rates.saw_prefill(4.0, 1000.0);
        }
        assert!(rates.prefill_seconds(1000.0) > 3.9);
    }

    #[test]
    fn waiting_without_a_token_says_nothing_until_one_comes() {
        let mut rates = rates();
        rates.saw_decode(1, 1.0, 0);
        near(rates.tpot(1), 0.01);
        rates.saw_decode(1, 1.0, 4);
        near(rates.tpot(1), 0.5);
    }
}
