//! What was asked of a cluster of late, as it was counted. A [`Workload`] is what is planned for; this is what came.

use serde::{Deserialize, Serialize};

use crate::{Arrivals, Lengths, Millis, Spread, Workload};

/// Requests of a stretch of time that ends now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    /// How long the stretch is.
    pub span_ms: f64,
    /// Prompts of the requests that came in it.
    pub prompt: CountedLengths,
    /// Answers that ended in it, and those that are longer already than these are in the mean.
    pub output: CountedLengths,
}

/// Lengths in tokens that were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CountedLengths {
    /// How many there are.
    pub count: u32,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation.
    pub deviation: f64,
    /// What 95 of 100 are not longer than, up to a fifth more.
    pub p95: f64,
}

/// How much is asked for, in three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DemandLevel {
    /// Requests a second.
    pub requests_per_second: f64,
    /// Mean tokens of a prompt.
    pub prompt_tokens: f64,
    /// Mean tokens of an answer.
    pub answer_tokens: f64,
}

/// Levels from the lowest to the highest, number by number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DemandRange {
    /// The lowest of each.
    pub low: DemandLevel,
    /// The highest of each.
    pub high: DemandLevel,
}

/// A log-normal distribution with a larger one has its mean from a few lengths that hardly ever come.
const MOST_VARIATION: f64 = 3.0;

impl Demand {
    /// In three numbers.
    pub fn level(&self) -> DemandLevel {
        let seconds = self.span_ms / 1e3;
        DemandLevel {
            requests_per_second: if seconds > 0.0 { f64::from(self.prompt.count) / seconds } else { 0.0 },
            prompt_tokens: self.prompt.mean,
            answer_tokens: self.output.mean,
        }
    }

    /// The workload that goes on like this: its requests come at random for `horizon`, and all else is as in `like`. None if
    /// nothing came, or no answer ended.
    pub fn workload(&self, like: &Workload, horizon: Millis) -> Option<Workload> {
        let level = self.level();
        if !(level.requests_per_second > 0.0 && level.prompt_tokens > 0.0 && level.answer_tokens > 0.0) {
            return None;
        }
        let requests = (level.requests_per_second * horizon.0 / 1e3).round();
        Some(Workload {
            arrivals: Arrivals::Poisson(Millis(1e3 / level.requests_per_second)),
            prompt: self.prompt.lengths(),
            output: self.output.lengths(),
            // As many as tell one plan from another, and no more than are simulated in a moment.
            requests: requests.clamp(40.0, 400.0) as u32,
            ..like.clone()
        })
    }
}

impl CountedLengths {
    /// As the planner takes them.
    pub fn lengths(&self) -> Lengths {
        let variation = if self.mean > 0.0 { self.deviation / self.mean } else { 0.0 };
        Lengths { mean: self.mean, spread: Spread::LogNormal(variation.clamp(0.0, MOST_VARIATION)) }
    }
}

impl DemandRange {
    /// Of one level.
    pub const fn of(level: DemandLevel) -> Self {
        Self { low: level, high: level }
    }

    /// The same with this level in it.
    #[must_use]
    pub fn with(self, level: DemandLevel) -> Self {
        Self { low: self.low.by(level, f64::min), high: self.high.by(level, f64::max) }
    }
}

impl DemandLevel {
    /// Number by number.
    fn by(self, other: Self, choose: fn(f64, f64) -> f64) -> Self {
        Self {
            requests_per_second: choose(self.requests_per_second, other.requests_per_second),
            prompt_tokens: choose(self.prompt_tokens, other.prompt_tokens),
            answer_tokens: choose(self.answer_tokens, other.answer_tokens),
        }
    }

    /// Of a workload.
    pub fn of(workload: &Workload) -> Self {
        Self {
            requests_per_second: 1e3 / workload.mean_interval().0.max(1e-3),
            prompt_tokens: workload.mean_prompt(),
            answer_tokens: workload.mean_output(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(count: u32, mean: f64) -> CountedLengths {
        CountedLengths { count, mean, deviation: mean / 2.0, p95: mean * 2.0 }
    }

    #[test]
    fn what_came_goes_on_as_a_workload_of_the_same_level() {
        let demand = Demand { span_ms: 20_000.0, prompt: lengths(40, 300.0), output: lengths(35, 80.0) };
        let level = demand.level();
        assert_eq!((level.requests_per_second, level.prompt_tokens, level.answer_tokens), (2.0, 300.0, 80.0));
        let like = Workload {
            arrivals: Arrivals::Every(Millis(1.0)),
            prompt: Lengths::fixed(1.0),
            output: Lengths::fixed(1.0),
            requests: 1,
            min_rate: Workload::DEFAULT_MIN_RATE,
            slot_context: 4096,
            max_slots: 8,
        };
        let workload = demand.workload(&like, Millis(60_000.0)).unwrap();
        assert_eq!(DemandLevel::of(&workload), level);
        assert_eq!((workload.requests, workload.slot_context), (120, 4096));
        assert_eq!(workload.prompt.spread, Spread::LogNormal(0.5));
        let low = DemandLevel { prompt_tokens: 100.0, answer_tokens: 90.0, ..level };
        let range = DemandRange::of(level).with(low);
        assert_eq!((range.low.prompt_tokens, range.high.prompt_tokens), (100.0, 300.0));
        assert_eq!((range.low.answer_tokens, range.high.answer_tokens), (80.0, 90.0));
        let silent = Demand { output: CountedLengths::default(), ..demand };
        assert_eq!(silent.workload(&like, Millis(60_000.0)), None);
    }
}
