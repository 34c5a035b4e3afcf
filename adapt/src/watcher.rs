//! Notices that what is asked for has left the range that was planned for, and that it waits. Pure: times are handed in.
//!
//! What is asked for is three numbers: requests a second, tokens of a prompt, tokens of an answer. Each has left its range when it
//! is `leaves_at` times the highest that was planned for, or that part of the lowest; it is back when it is within `returns_at`.
//! Between the two nothing changes, so a number at the border does not come and go. One that is outside for `dwell` without being
//! back is a cause to decide; after a decision there is none for `rest`. If something was changed, it was for what is asked for
//! now, and that alone is planned for; if nothing was better, the range is as much wider, so what comes and goes every hour is
//! decided about once. While nobody has said what is planned, the first demand that there is enough of is taken for it.
//!
//! The other cause is a line longer than all slots together, for as long: then whoever planned was wrong about how fast replicas are,
//! which by now is observed. Where nothing helps against it, it is asked for half as often each time.

use std::fmt;
use std::time::Duration;

use cluster::{Demand, DemandLevel, DemandRange};
use serde::Serialize;

use crate::tuning::Tuning;

/// Rests after which a line that nothing helps against is looked at again.
const MOST_PATIENCE: u32 = 32;

/// Why something should be decided.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A number has left the planned range.
    Left {
        /// Which.
        quantity: Quantity,
        /// The nearest that was planned for.
        planned: f64,
        /// What it is.
        seen: f64,
    },
    /// Requests wait.
    Waits {
        /// So many.
        requests: usize,
        /// For so many slots.
        slots: usize,
    },
}

/// One of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Requests a second.
    RequestsPerSecond,
    /// Mean tokens of a prompt.
    PromptTokens,
    /// Mean tokens of an answer.
    AnswerTokens,
}

/// Who waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Line {
    /// Requests that wait for a slot, of either kind.
    pub waiting: usize,
    /// Slots of all replicas.
    pub slots: usize,
}

/// What came of a cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Something is another way now.
    Changed,
    /// All stays.
    Kept,
}

/// Looks at what is asked for now and then.
#[derive(Debug)]
pub struct Watcher {
    tuning: Tuning,
    planned: Option<DemandRange>,
    /// What is outside, and since when.
    outside: Option<(Duration, Cause)>,
    /// Since when the line is long.
    long_since: Option<Duration>,
    /// Nothing is decided before.
    rests_until: Duration,
    /// Rests between two looks at a line.
    patience: u32,
    waits_until: Duration,
}

impl Watcher {
    /// With what is planned for, if that is known.
    pub fn new(tuning: Tuning, planned: Option<DemandLevel>) -> Self {
        Self {
            tuning,
            planned: planned.map(DemandRange::of),
            outside: None,
            long_since: None,
            rests_until: Duration::ZERO,
            patience: 1,
            waits_until: Duration::ZERO,
        }
    }

    /// What is planned for.
    pub fn planned(&self) -> Option<DemandRange> {
        self.planned
    }

    /// What is outside of the range, whether or not for long.
    pub fn outside(&self) -> Option<Cause> {
        self.outside.map(|(_, cause)| cause)
    }

    /// Looks at what is asked for, if there is enough to go by; gives a cause if something should be decided now.
    pub fn look(&mut self, now: Duration, demand: Option<&Demand>, line: Line) -> Option<Cause> {
        let Some(demand) = demand.map(Demand::level) else {
            (self.outside, self.long_since) = (None, None);
            return None;
        };
        let Some(planned) = self.planned else {
            self.planned = Some(DemandRange::of(demand));
            return None;
        };
        self.note_range(now, planned, demand);
        self.note_line(now, line);
        if now < self.rests_until {
            return None;
        }
        let lasts = |since: Duration| now.saturating_sub(since) >= self.tuning.dwell;
        if let Some((_, cause)) = self.outside.filter(|(since, _)| lasts(*since)) {
            return Some(cause);
        }
        let is_long = self.long_since.is_some_and(lasts) && now >= self.waits_until;
        is_long.then_some(Cause::Waits { requests: line.waiting, slots: line.slots })
    }

    /// It was decided because of a cause, about what was asked for then.
    pub fn settle(&mut self, now: Duration, (cause, outcome): (Cause, Outcome), about: DemandLevel) {
        self.planned = match (outcome, self.planned) {
            (Outcome::Kept, Some(planned)) => Some(planned.with(about)),
            _ => Some(DemandRange::of(about)),
        };
        self.outside = None;
        self.rests_until = now + self.tuning.rest;
        if matches!(cause, Cause::Waits { .. }) {
            self.waits_until = now + self.tuning.rest * self.patience;
            self.patience = (self.patience * 2).min(MOST_PATIENCE);
        }
        self.long_since = None;
    }

    fn note_range(&mut self, now: Duration, planned: DemandRange, seen: DemandLevel) {
        let (cause, ratio) = farthest(planned, seen);
        self.outside = match self.outside {
            Some(_) if ratio < self.tuning.returns_at => None,
            // The numbers are the newest, the time is that of the first.
            Some((since, _)) => Some((since, cause)),
            None => (ratio >= self.tuning.leaves_at).then_some((now, cause)),
        };
    }

    fn note_line(&mut self, now: Duration, line: Line) {
        if line.waiting > line.slots {
            self.long_since.get_or_insert(now);
        } else {
            self.long_since = None;
            self.patience = 1;
        }
    }
}

/// Which number is farthest from what was planned, and how many times that it is, or what part.
fn farthest(planned: DemandRange, seen: DemandLevel) -> (Cause, f64) {
    let number = |quantity, of: fn(&DemandLevel) -> f64| {
        let seen = of(&seen);
        // Within the range that is the number itself.
        (quantity, seen.max(of(&planned.low)).min(of(&planned.high)), seen)
    };
    let of = [
        number(Quantity::RequestsPerSecond, |level| level.requests_per_second),
        number(Quantity::PromptTokens, |level| level.prompt_tokens),
        number(Quantity::AnswerTokens, |level| level.answer_tokens),
    ];
    let ratio = |planned: f64, seen: f64| {
        let (low, high) = (planned.min(seen), planned.max(seen));
        if high <= 0.0 { 1.0 } else { high / low.max(f64::MIN_POSITIVE) }
    };
    let ratios =
        of.map(|(quantity, planned, seen)| (Cause::Left { quantity, planned, seen }, ratio(planned, seen)));
    ratios.into_iter().fold(ratios[0], |a, b| if b.1 > a.1 { b } else { a })
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left { quantity: Quantity::RequestsPerSecond, planned, seen } => {
                write!(f, "{seen:.2} requests come in a second, and {planned:.2} were planned for")
            }
            Self::Left { quantity: Quantity::PromptTokens, planned, seen } => {
                write!(f, "prompts have {seen:.0} tokens in the mean, and {planned:.0} were planned for")
            }
            Self::Left { quantity: Quantity::AnswerTokens, planned, seen } => {
                write!(f, "answers have {seen:.0} tokens in the mean, and {planned:.0} were planned for")
            }
            Self::Waits { requests, slots } => write!(f, "{requests} requests wait for {slots} slots"),
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::CountedLengths;
    use proptest::prelude::*;

    use super::*;

    const SHORT: Line = Line { waiting: 0, slots: 8 };

    fn demand(rate: f64, prompt: f64, answer: f64) -> Demand {
        let lengths = |mean| CountedLengths { count: 100, mean, deviation: 0.0, p95: mean };
        Demand { span_ms: 100e3 / rate, prompt: lengths(prompt), output: lengths(answer) }
    }

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn planned() -> Watcher {
        Watcher::new(Tuning::default(), Some(demand(1.0, 1000.0, 50.0).level()))
    }

    #[test]
    fn what_nobody_planned_is_learnt_and_then_left() {
        let mut watcher = Watcher::new(Tuning::default(), None);
        assert_eq!(watcher.look(at(0.0), None, SHORT), None);
        assert_eq!(watcher.look(at(1.0), Some(&demand(1.0, 1000.0, 50.0)), SHORT), None);
        assert_eq!(watcher.planned(), Some(DemandRange::of(demand(1.0, 1000.0, 50.0).level())));
        let long_answers = demand(1.0, 1000.0, 200.0);
        assert_eq!(watcher.look(at(2.0), Some(&long_answers), SHORT), None, "not for long");
        let cause = watcher.look(at(12.0), Some(&long_answers), SHORT).unwrap();
        assert_eq!(cause.to_string(), "answers have 200 tokens in the mean, and 50 were planned for");
        watcher.settle(at(12.0), (cause, Outcome::Changed), long_answers.level());
        let short_prompts = demand(1.0, 100.0, 200.0);
        assert_eq!(watcher.look(at(13.0), Some(&short_prompts), SHORT), None);
        assert_eq!(watcher.look(at(41.0), Some(&short_prompts), SHORT), None, "it rests");
        assert!(watcher.look(at(42.0), Some(&short_prompts), SHORT).is_some());
    }

    #[test]
    fn what_comes_back_before_its_time_is_no_cause_and_the_border_does_not_flap() {
        let mut watcher = planned();
        let rates = [(0.0, 1.6), (4.0, 1.4), (8.0, 1.2), (9.0, 1.6), (18.0, 1.3)];
        for (time, rate) in rates {
            assert_eq!(watcher.look(at(time), Some(&demand(rate, 1000.0, 50.0)), SHORT), None, "at {time}");
        }
        let cause = watcher.look(at(19.0), Some(&demand(1.3, 1000.0, 50.0)), SHORT);
        assert!(
            matches!(cause, Some(Cause::Left { quantity: Quantity::RequestsPerSecond, .. })),
            "{cause:?}"
        );
    }

    #[test]
    fn what_was_decided_about_without_a_change_is_no_cause_again() {
        let mut watcher = planned();
        let mut causes = 0;
        // Quiet and busy minutes in turn.
        for second in 0..1200 {
            let rate = if second / 60 % 2 == 0 { 1.0 } else { 3.0 };
            let seen = demand(rate, 1000.0, 50.0);
            if let Some(cause) = watcher.look(at(f64::from(second)), Some(&seen), SHORT) {
                causes += 1;
                watcher.settle(at(f64::from(second)), (cause, Outcome::Kept), seen.level());
            }
        }
        assert_eq!(causes, 1);
        let range = watcher.planned().unwrap();
        assert_eq!((range.low.requests_per_second, range.high.requests_per_second), (1.0, 3.0));
        // A change is for the present alone.
        let seen = demand(9.0, 1000.0, 50.0);
        watcher.look(at(1300.0), Some(&seen), SHORT);
        let cause = watcher.look(at(1310.0), Some(&seen), SHORT).unwrap();
        assert!(matches!(cause, Cause::Left { planned, .. } if planned == 3.0), "{cause:?}");
        watcher.settle(at(1310.0), (cause, Outcome::Changed), seen.level());
        assert_eq!(watcher.planned(), Some(DemandRange::of(seen.level())));
    }

    #[test]
    fn less_than_was_planned_is_a_cause_as_more_is() {
        let mut watcher = planned();
        let few = demand(0.5, 1000.0, 50.0);
        watcher.look(at(0.0), Some(&few), SHORT);
        assert!(watcher.look(at(10.0), Some(&few), SHORT).is_some());
    }

    #[test]
    fn a_line_that_nothing_helps_against_is_looked_at_more_and_more_seldom() {
        let mut watcher = planned();
        let (same, line) = (demand(1.0, 1000.0, 50.0), Line { waiting: 9, slots: 8 });
        let mut times = Vec::new();
        for second in 0..400 {
            let now = at(f64::from(second));
            if let Some(cause) = watcher.look(now, Some(&same), line) {
                assert_eq!(cause, Cause::Waits { requests: 9, slots: 8 });
                watcher.settle(now, (cause, Outcome::Kept), same.level());
                times.push(second);
            }
        }
        assert_eq!(times, [10, 40, 100, 220]);
    }

    proptest! {
        #[test]
        fn decisions_are_never_closer_than_the_rest(
            looks in prop::collection::vec((0.0_f64..20.0, 0.1_f64..10.0, 10.0_f64..5000.0, 1.0_f64..500.0, 0_usize..20), 1..200)
        ) {
            let mut watcher = planned();
            let (mut now, mut last) = (0.0, None);
            for (after, rate, prompt, answer, waiting) in looks {
                now += after;
                let seen = demand(rate, prompt, answer);
                if let Some(cause) = watcher.look(at(now), Some(&seen), Line { waiting, slots: 8 }) {
                    let tuning = Tuning::default();
                    prop_assert!(last.is_none_or(|last| now - last >= tuning.rest.as_secs_f64() - 1e-6));
                    watcher.settle(at(now), (cause, Outcome::Kept), seen.level());
                    last = Some(now);
                }
            }
        }
    }
}
