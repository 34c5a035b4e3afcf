//! How long prompts take on a chain, whatever their length: chunks follow each other through the stages as a wave.
//!
//! It does not know where the times come from.

use crate::chain::Pass;
use crate::instance::chunks;

/// Whole chunks that are tabulated: half a million tokens and more. Later ones take as long as the last.
const MOST_CHUNKS: f64 = 1024.0;

/// Times of a prefill on a chain, for prompts of any length.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillTimes {
    chunk: f64,
    /// One chunk on an empty cache, by its tokens.
    points: Vec<(f64, Pass)>,
    /// The first whole chunk.
    first: Pass,
    /// The first, second, … whole chunk of a prompt; empty where the depth of the cache does not matter.
    whole: Vec<Pass>,
    /// Seconds of the slowest stage for all whole chunks before.
    before: Vec<f64>,
}

impl PrefillTimes {
    /// `points` are one chunk on an empty cache, by its tokens, rising.
    pub(crate) fn new(chunk: f64, points: Vec<(f64, Pass)>) -> Self {
        let none = Pass { sum: 0.0, slowest: 0.0 };
        let mut times = Self { chunk, points, first: none, whole: Vec::new(), before: Vec::new() };
        times.first = times.at(chunk);
        times
    }

    /// With what whole chunks take at each depth, up to a slot's context.
    pub(crate) fn deeper(mut self, context: f64, whole: impl Fn(f64) -> Pass) -> Self {
        let n = (context / self.chunk).ceil().clamp(1.0, MOST_CHUNKS) as u32;
        self.whole = (0..n).map(|i| whole(f64::from(i) * self.chunk)).collect();
        self.first = self.nth(0);
        let mut sum = 0.0;
        let before = std::iter::once(0.0).chain(self.whole.iter().map(|pass| {
            sum += pass.slowest;
            sum
        }));
        self.before = before.collect();
        self
    }

    /// Times that grow in proportion to the prompt, the same for the whole pass as for the slowest stage.
    pub(crate) fn proportional(seconds_per_token: f64, chunk: f64) -> Self {
        let point = |tokens: f64| {
            let seconds = tokens * seconds_per_token;
            (tokens, Pass { sum: seconds, slowest: seconds })
        };
        Self::new(chunk, vec![point(0.0), point(chunk)])
    }

    /// Seconds between prompts when they follow each other, and from a prompt's start to its end.
    pub(crate) fn of(&self, tokens: f64) -> Pass {
        let (full, rest) = chunks(tokens, self.chunk);
        let n = full as usize;
        let last = if rest > 0.0 { self.last(rest, n) } else { Pass { sum: 0.0, slowest: 0.0 } };
        if n == 0 {
            return last;
        }
        let first = self.first;
        let slowest = if self.whole.is_empty() {
            full * first.slowest
        } else {
            let known = n.min(self.whole.len());
            self.before[known] + (n - known) as f64 * self.nth(n).slowest
        };
        Pass { sum: first.sum + slowest - first.slowest + last.slowest, slowest: slowest + last.slowest }
    }

    /// Chunks of a prompt.
    pub(crate) fn n_chunks(&self, tokens: f64) -> f64 {
        (tokens / self.chunk).ceil().max(1.0)
    }

    /// Tokens of a chunk.
    pub(crate) fn chunk(&self) -> f64 {
        self.chunk
    }

    /// The last, incomplete chunk, after `n` whole ones. What depth adds is in proportion to its tokens.
    fn last(&self, tokens: f64, n: usize) -> Pass {
        let shallow = self.at(tokens);
        if self.whole.is_empty() || n == 0 {
            return shallow;
        }
        let (deep, first, share) = (self.nth(n), self.first, tokens / self.chunk);
        Pass {
            sum: shallow.sum + (deep.sum - first.sum) * share,
            slowest: shallow.slowest + (deep.slowest - first.slowest) * share,
        }
    }

    /// A whole chunk, after `n` others.
    fn nth(&self, n: usize) -> Pass {
        self.whole.get(n).or(self.whole.last()).copied().unwrap_or(self.first)
    }

    /// One chunk on an empty cache.
    fn at(&self, tokens: f64) -> Pass {
        let above = self.points.partition_point(|p| p.0 < tokens).clamp(1, self.points.len().max(2) - 1);
        let (Some(&(a, low)), Some(&(b, high))) = (self.points.get(above - 1), self.points.get(above)) else {
            return self.points.first().map_or(Pass { sum: 0.0, slowest: 0.0 }, |p| p.1);
        };
        let share = ((tokens - a) / (b - a)).max(0.0);
        let between = |x: f64, y: f64| x + (y - x) * share;
        Pass { sum: between(low.sum, high.sum), slowest: between(low.slowest, high.slowest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(seconds: f64) -> Pass {
        Pass { sum: 3.0 * seconds, slowest: seconds }
    }

    #[test]
    fn chunks_follow_each_other_as_a_wave() {
        let times = PrefillTimes::new(100.0, vec![(0.0, pass(0.0)), (100.0, pass(1.0))]);
        assert_eq!(times.of(50.0), Pass { sum: 1.5, slowest: 0.5 });
        assert_eq!(times.of(250.0), Pass { sum: 4.5, slowest: 2.5 });
    }

    #[test]
    fn a_chunk_costs_what_the_cache_before_it_makes_it_cost() {
        let flat = PrefillTimes::new(100.0, vec![(0.0, pass(0.0)), (100.0, pass(1.0))]);
        // A second for each chunk, and a tenth for each hundred tokens before it.
        let times = flat.clone().deeper(1000.0, |depth| pass(1.0 + depth / 1000.0));
        assert_eq!(times.of(50.0), flat.of(50.0));
        assert!((times.of(300.0).slowest - 3.3).abs() < 1e-9);
        assert!((times.of(350.0).slowest - (3.3 + 0.5 * 1.3)).abs() < 1e-9);
        // The pipeline fills with the first chunk.
        assert!((times.of(300.0).sum - 5.3).abs() < 1e-9);
        assert!(times.of(1500.0).slowest > times.of(1400.0).slowest);
    }
}
