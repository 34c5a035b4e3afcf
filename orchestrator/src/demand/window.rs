//! Counts requests by when they came and answers by when they ended, for the last minutes. Pure: times are handed in, as time
//! since some beginning, and must not run backwards.
//!
//! Time is cut into buckets of equal length, of which the last few are kept: so what it takes is bounded, whatever comes. What is
//! asked of it is over whole buckets and the one that has begun, so a stretch is longer than asked for by up to a bucket.
//!
//! The length of an answer is known when it ends, and long ones end late: after a change to longer answers the short ones
//! from before would be the only ones for a while. So those that still run count as soon as they are longer than the mean of
//! those that ended; what they have is less than what they will have, so the change is seen early and never overstated.

use std::collections::VecDeque;
use std::time::Duration;

use cluster::{CountedLengths, Demand};

/// Buckets in a window: five seconds each in one of five minutes, so that a change is seen as soon as there is enough of it.
pub(crate) const BUCKETS: u32 = 60;

/// Bins to a doubling of a length.
const BINS_PER_DOUBLING: usize = 4;

/// Lengths of up to a million tokens are told apart.
const BINS: usize = 20 * BINS_PER_DOUBLING + 1;

/// What counts as enough to go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enough {
    /// Requests that came.
    pub requests: u32,
    /// Answers that ended, or that are long already.
    pub answers: u32,
    /// The least stretch of time.
    pub span: Duration,
}

/// The last minutes.
#[derive(Debug)]
pub(crate) struct Window {
    width: Duration,
    began: Duration,
    /// The oldest first, by their numbers; those in which nothing was counted are left out.
    buckets: VecDeque<(u64, Bucket)>,
}

#[derive(Debug, Clone, Default)]
struct Bucket {
    prompts: Tally,
    answers: Tally,
}

/// Lengths, added up.
#[derive(Debug, Clone)]
struct Tally {
    count: u32,
    sum: f64,
    squares: f64,
    bins: [u32; BINS],
}

impl Window {
    /// Of this length, begun at `now`.
    pub(crate) fn new(span: Duration, now: Duration) -> Self {
        // A zero would divide by zero; nobody looks at a shorter time.
        let width = (span / BUCKETS).max(Duration::from_millis(1));
        Self { width, began: now, buckets: VecDeque::new() }
    }

    /// Its length.
    pub(crate) fn span(&self) -> Duration {
        self.width * BUCKETS
    }

    /// A request came.
    pub(crate) fn arrived(&mut self, prompt: u32, now: Duration) {
        self.bucket(now).prompts.add(prompt);
    }

    /// An answer ended.
    pub(crate) fn answered(&mut self, tokens: u32, now: Duration) {
        self.bucket(now).answers.add(tokens);
    }

    /// All that it holds; beside it answers run that have so many tokens.
    pub(crate) fn demand(&self, running: &[u32], now: Duration) -> Demand {
        // The longest stretch is the last.
        self.stretches(running, now).last().unwrap_or_default()
    }

    /// The shortest stretch up to now in which there is enough; none if there is not.
    pub(crate) fn recent(&self, enough: Enough, running: &[u32], now: Duration) -> Option<Demand> {
        let is_enough = |demand: &Demand| {
            demand.prompt.count >= enough.requests
                && demand.output.count >= enough.answers
                && demand.span_ms >= enough.span.as_secs_f64() * 1e3
        };
        self.stretches(running, now).find(is_enough)
    }

    /// The last bucket, the last two, and so on to all.
    fn stretches<'a>(&'a self, running: &'a [u32], now: Duration) -> impl Iterator<Item = Demand> + 'a {
        let last = self.number(now);
        let (mut prompts, mut answers) = (Tally::default(), Tally::default());
        let mut older = self.buckets.iter().rev().peekable();
        (1..=u64::from(BUCKETS)).map(move |buckets| {
            let first = (last + 1).saturating_sub(buckets);
            while let Some((_, bucket)) = older.next_if(|(number, _)| *number >= first) {
                prompts.merge(&bucket.prompts);
                answers.merge(&bucket.answers);
            }
            let begin = (self.width.as_secs_f64() * first as f64).max(self.began.as_secs_f64());
            Demand {
                span_ms: (now.as_secs_f64() - begin).max(0.0) * 1e3,
                prompt: prompts.lengths(),
                output: with_running(&answers, running).lengths(),
            }
        })
    }

    fn number(&self, now: Duration) -> u64 {
        (now.as_secs_f64() / self.width.as_secs_f64()) as u64
    }

    fn bucket(&mut self, now: Duration) -> &mut Bucket {
        // Of two threads the one with the later time may be first.
        let number = self.number(now).max(self.buckets.back().map_or(0, |(last, _)| *last));
        while self.buckets.front().is_some_and(|(first, _)| first + u64::from(BUCKETS) <= number) {
            self.buckets.pop_front();
        }
        if self.buckets.back().is_none_or(|(last, _)| *last < number) {
            self.buckets.push_back((number, Bucket::default()));
        }
        let last = self.buckets.len() - 1;
        &mut self.buckets[last].1
    }
}

/// With those that are longer already than these are in the mean.
fn with_running(ended: &Tally, running: &[u32]) -> Tally {
    let mut answers = ended.clone();
    if ended.count > 0 {
        let mean = ended.mean();
        running.iter().filter(|&&tokens| f64::from(tokens) > mean).for_each(|&tokens| answers.add(tokens));
    }
    answers
}

impl Default for Tally {
    fn default() -> Self {
        Self { count: 0, sum: 0.0, squares: 0.0, bins: [0; BINS] }
    }
}

impl Tally {
    fn add(&mut self, tokens: u32) {
        let length = f64::from(tokens);
        self.count += 1;
        self.sum += length;
        self.squares += length * length;
        let bin = (length.max(1.0).log2() * BINS_PER_DOUBLING as f64) as usize;
        self.bins[bin.min(BINS - 1)] += 1;
    }

    fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
        self.bins.iter_mut().zip(&other.bins).for_each(|(mine, theirs)| *mine += theirs);
    }

    fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / f64::from(self.count) }
    }

    fn lengths(&self) -> CountedLengths {
        let mean = self.mean();
        let variance = self.squares / f64::from(self.count.max(1)) - mean * mean;
        let below = f64::from(self.count) * 0.95;
        let mut seen = 0.0;
        let bin = self.bins.iter().position(|&n| {
            seen += f64::from(n);
            n > 0 && seen >= below
        });
        let p95 = bin.map_or(0.0, |bin| (((bin + 1) as f64) / BINS_PER_DOUBLING as f64).exp2());
        CountedLengths { count: self.count, mean, deviation: variance.max(0.0).sqrt(), p95 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: Duration = Duration::from_secs(60);

    fn seconds(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn what_is_older_than_the_window_is_forgotten_and_a_young_window_is_as_long_as_it_is_old() {
        let mut window = Window::new(SPAN, seconds(100.0));
        assert_eq!(window.demand(&[], seconds(100.0)).prompt.count, 0);
        for i in 0..10 {
            window.arrived(50, seconds(100.0 + f64::from(i)));
        }
        let young = window.demand(&[], seconds(110.0));
        near(young.level().requests_per_second, 1.0);
        assert_eq!((young.prompt.count, young.prompt.mean, young.prompt.deviation), (10, 50.0, 0.0));
        assert_eq!(window.demand(&[], seconds(167.9)).prompt.count, 2);
        assert_eq!(window.demand(&[], seconds(200.0)).prompt.count, 0);
    }

    #[test]
    fn longer_answers_are_seen_before_they_end_and_shorter_ones_are_no_news_until_then() {
        let mut window = Window::new(SPAN, Duration::ZERO);
        for i in 0..10 {
            window.answered(20, seconds(f64::from(i)));
        }
        let mean = |running: &[u32]| window.demand(running, seconds(10.0)).output.mean;
        near(mean(&[1, 5, 20]), 20.0);
        near(mean(&[200, 200]), (200.0 + 400.0) / 12.0);
    }

    #[test]
    fn the_shortest_stretch_with_enough_in_it_is_taken() {
        let mut window = Window::new(SPAN, Duration::ZERO);
        for i in 0..20 {
            let prompt = if i < 12 { 1000 } else { 10 };
            window.arrived(prompt, seconds(f64::from(i) + 0.5));
            window.answered(7, seconds(f64::from(i) + 0.7));
        }
        let enough = |requests, span| Enough { requests, answers: 1, span: seconds(span) };
        let recent = |enough| window.recent(enough, &[], seconds(20.0)).map(|demand| demand.prompt);
        assert_eq!(recent(enough(4, 1.0)).map(|prompt| (prompt.count, prompt.mean)), Some((4, 10.0)));
        assert_eq!(recent(enough(1, 6.0)).map(|prompt| prompt.count), Some(6));
        assert_eq!(recent(enough(21, 1.0)), None);
    }

    #[test]
    fn nineteen_of_twenty_lengths_are_not_longer_than_is_said() {
        let mut window = Window::new(SPAN, Duration::ZERO);
        (1..=100).for_each(|tokens| window.answered(tokens * 10, Duration::ZERO));
        let p95 = window.demand(&[], seconds(1.0)).output.p95;
        assert!((950.0..950.0 * 1.2).contains(&p95), "{p95}");
    }

    proptest! {
        #[test]
        fn whatever_comes_it_is_what_a_count_from_scratch_gives_in_bounded_memory(
            events in prop::collection::vec((0.0_f64..3.0, any::<bool>(), 1_u32..100_000), 0..300),
            rest in 0.0_f64..40.0,
        ) {
            let mut window = Window::new(SPAN, Duration::ZERO);
            let (mut at, mut all) = (0.0, Vec::new());
            for (after, is_answer, tokens) in events {
                at += after;
                if is_answer { window.answered(tokens, seconds(at)) } else { window.arrived(tokens, seconds(at)) }
                all.push((at, is_answer, f64::from(tokens)));
                prop_assert!(window.buckets.len() <= BUCKETS as usize);
            }
            let now = at + rest;
            let demand = window.demand(&[], seconds(now));
            // Buckets are a second wide.
            let first = (now.floor() - f64::from(BUCKETS) + 1.0).max(0.0);
            for (is_answer, counted) in [(false, demand.prompt), (true, demand.output)] {
                let of: Vec<f64> = all.iter().filter(|it| it.0.floor() >= first && it.1 == is_answer).map(|it| it.2).collect();
                prop_assert_eq!(counted.count as usize, of.len());
                if !of.is_empty() {
                    near(counted.mean, of.iter().sum::<f64>() / of.len() as f64);
                    let longer = of.iter().filter(|&&length| length > counted.p95).count();
                    prop_assert!(longer * 20 <= of.len());
                }
            }
            near(demand.span_ms / 1e3, now - first);
        }
    }
}
