//! Adds up what became of requests. Pure: it is given times and asks for none.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::client::Watch;
use crate::exchange::{Answer, Exchange, Failure};
use crate::summary::{Distribution, Goodput, Limits, Summary};

/// A bucket of the time line.
const BUCKET: Duration = Duration::from_millis(250);

/// Longer than any run; a trace may reach that far.
const MOST_BUCKETS: usize = 40 * 86_400 * 4;

/// How many points a curve has.
const CURVE_POINTS: u32 = 200;

/// Times in microseconds, to three digits.
#[derive(Debug, Clone)]
pub(crate) struct Histogram(Option<hdrhistogram::Histogram<u64>>);

impl Histogram {
    pub(crate) fn new() -> Self {
        // Three significant digits are always possible.
        Self(hdrhistogram::Histogram::new(3).ok())
    }

    pub(crate) fn record(&mut self, time: Duration) {
        if let Some(histogram) = &mut self.0 {
            // Fails only for times of ages, which no run reaches.
            let _ = histogram.record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        }
    }

    pub(crate) fn append(&mut self, other: &Self) {
        if let (Some(histogram), Some(other)) = (&mut self.0, &other.0) {
            // Fails only if it could not grow, and both grow alike.
            let _ = histogram.add(other);
        }
    }

    /// `None` of nothing.
    pub(crate) fn distribution(&self) -> Option<Distribution> {
        let histogram = self.0.as_ref().filter(|histogram| !histogram.is_empty())?;
        let at = |share| histogram.value_at_quantile(share) as f64 / 1e3;
        Some(Distribution {
            count: histogram.len(),
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            max: histogram.max() as f64 / 1e3,
        })
    }

    /// Its cumulated distribution, as `(milliseconds, share)`.
    fn curve(&self) -> Curve {
        let histogram = self.0.as_ref().filter(|histogram| !histogram.is_empty());
        let at = |histogram: &hdrhistogram::Histogram<u64>, i| {
            let share = f64::from(i) / f64::from(CURVE_POINTS);
            let value = if i == 0 { histogram.min() } else { histogram.value_at_quantile(share) };
            (value as f64 / 1e3, share)
        };
        histogram.map(|of| (0..=CURVE_POINTS).map(|i| at(of, i)).collect()).unwrap_or_default()
    }
}

/// Points of a curve, rising.
pub type Curve = Vec<(f64, f64)>;

/// A quarter of a second of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Tokens that came in it.
    pub tokens: u32,
    /// Requests due in it.
    pub due: u32,
    /// Requests that ended in it.
    pub ended: u32,
}

impl Bucket {
    /// How long one lasts.
    pub const SECONDS: f64 = 0.25;
}

/// What became of the requests of one server, in one run or in several.
#[derive(Debug, Clone)]
pub struct Tally {
    limits: Limits,
    ttft: Histogram,
    tpot: Histogram,
    inter_token: Histogram,
    request: Histogram,
    queue_wait: Histogram,
    answered: u64,
    good: u64,
    tokens: u64,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    failures: BTreeMap<Failure, u64>,
    unfinished: u64,
    /// From the first request's time, and to the last one's end.
    span: Option<(Duration, Duration)>,
    /// Of runs that were added.
    earlier: Duration,
    buckets: Vec<Bucket>,
    pub(crate) watch: Watch,
}

impl Tally {
    /// Of nothing yet; answers are good within `limits`.
    pub fn new(limits: Limits) -> Self {
        let empty = Histogram::new;
        Self {
            limits,
            ttft: empty(),
            tpot: empty(),
            inter_token: empty(),
            request: empty(),
            queue_wait: empty(),
            answered: 0,
            good: 0,
            tokens: 0,
            prompt_tokens: None,
            cached_tokens: None,
            failures: BTreeMap::new(),
            unfinished: 0,
            span: None,
            earlier: Duration::ZERO,
            buckets: Vec::new(),
            watch: Watch::new(),
        }
    }

    /// Adds a request that ended.
    pub(crate) fn add(&mut self, exchange: &Exchange) {
        let Exchange { due, ended, outcome } = exchange;
        let (from, to) = self.span.unwrap_or((*due, *ended));
        self.span = Some((from.min(*due), to.max(*ended)));
        self.bucket(*due, |bucket| bucket.due += 1);
        self.bucket(*ended, |bucket| bucket.ended += 1);
        match outcome {
            Ok(answer) => self.answer(answer, *due, *ended),
            Err(failure) => *self.failures.entry(failure.clone()).or_default() += 1,
        }
    }

    /// Adds requests that were given up.
    pub(crate) fn give_up(&mut self, requests: u64) {
        self.unfinished += requests;
    }

    fn answer(&mut self, answer: &Answer, due: Duration, ended: Duration) {
        let ttft = answer.first.saturating_sub(due);
        let further = answer.tokens.saturating_sub(1);
        let tpot = (further > 0).then(|| answer.last.saturating_sub(answer.first) / further);
        self.answered += 1;
        self.tokens += u64::from(answer.tokens);
        self.good += u64::from(self.is_good(ttft, tpot));
        self.ttft.record(ttft);
        self.request.record(ended.saturating_sub(due));
        if let Some(tpot) = tpot {
            self.tpot.record(tpot);
        }
        if let Some(wait) = answer.queue_wait {
            self.queue_wait.record(wait);
        }
        let sum = |so_far: Option<u64>, more: Option<u32>| match (so_far, more) {
            (None, None) => None,
            (so_far, more) => Some(so_far.unwrap_or(0) + u64::from(more.unwrap_or(0))),
        };
        self.prompt_tokens = sum(self.prompt_tokens, answer.prompt_tokens);
        self.cached_tokens = sum(self.cached_tokens, answer.cached_tokens);
        let mut at = answer.first;
        self.bucket(at, |bucket| bucket.tokens += 1);
        for gap in answer.gaps.iter().map(|&gap| Duration::from_micros(u64::from(gap))) {
            at += gap;
            self.inter_token.record(gap);
            self.bucket(at, |bucket| bucket.tokens += 1);
        }
    }

    fn is_good(&self, ttft: Duration, tpot: Option<Duration>) -> bool {
        let within =
            |time: Duration, limit: Option<f64>| limit.is_none_or(|limit| time.as_secs_f64() * 1e3 <= limit);
        within(ttft, self.limits.ttft) && tpot.is_none_or(|tpot| within(tpot, self.limits.tpot))
    }

    fn bucket(&mut self, at: Duration, add: impl FnOnce(&mut Bucket)) {
        let index = (at.as_nanos() / BUCKET.as_nanos()) as usize;
        if index >= self.buckets.len() {
            self.buckets.resize((index + 1).min(MOST_BUCKETS), Bucket::default());
        }
        if let Some(bucket) = self.buckets.get_mut(index) {
            add(bucket);
        }
    }

    /// Adds a later run of the same server.
    pub fn append(&mut self, later: &Self) {
        self.earlier = self.measured() + later.earlier;
        self.span = later.span;
        self.ttft.append(&later.ttft);
        self.tpot.append(&later.tpot);
        self.inter_token.append(&later.inter_token);
        self.request.append(&later.request);
        self.queue_wait.append(&later.queue_wait);
        self.answered += later.answered;
        self.good += later.good;
        self.tokens += later.tokens;
        let sum = |a: Option<u64>, b: Option<u64>| {
            if a.or(b).is_some() { Some(a.unwrap_or(0) + b.unwrap_or(0)) } else { None }
        };
        self.prompt_tokens = sum(self.prompt_tokens, later.prompt_tokens);
        self.cached_tokens = sum(self.cached_tokens, later.cached_tokens);
        for (failure, count) in &later.failures {
            *self.failures.entry(failure.clone()).or_default() += count;
        }
        self.unfinished += later.unfinished;
        self.buckets.extend(&later.buckets);
        self.buckets.truncate(MOST_BUCKETS);
        self.watch.append(&later.watch);
    }

    fn measured(&self) -> Duration {
        self.earlier + self.span.map_or(Duration::ZERO, |(from, to)| to.saturating_sub(from))
    }

    /// Requests that ended.
    pub fn ended(&self) -> u64 {
        self.answered + self.failures.values().sum::<u64>()
    }

    /// What it came to.
    pub fn summary(&self) -> Summary {
        let seconds = self.measured().as_secs_f64();
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let Limits { ttft, tpot } = self.limits;
        let goodput = (ttft.is_some() || tpot.is_some()).then(|| Goodput {
            ttft_limit_ms: ttft,
            tpot_limit_ms: tpot,
            good: self.good,
            share: self.good as f64 / self.ended().max(1) as f64,
            requests_per_second: per_second(self.good),
        });
        Summary {
            answered: self.answered,
            failed: self.ended() - self.answered,
            unfinished: self.unfinished,
            seconds,
            requests_per_second: per_second(self.answered),
            tokens_per_second: per_second(self.tokens),
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            ttft_ms: self.ttft.distribution(),
            tpot_ms: self.tpot.distribution(),
            inter_token_ms: self.inter_token.distribution(),
            request_ms: self.request.distribution(),
            queue_wait_ms: self.queue_wait.distribution(),
            goodput,
            failures: self.failures.iter().map(|(failure, count)| (failure.to_string(), *count)).collect(),
            client: self.watch.summary(),
        }
    }

    /// The share of answers over their time to first token, in milliseconds.
    pub fn ttft_curve(&self) -> Curve {
        self.ttft.curve()
    }

    /// The share of gaps between tokens over their length, in milliseconds.
    pub fn inter_token_curve(&self) -> Curve {
        self.inter_token.curve()
    }

    /// Its course, run after run.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A token every `gap` after `first`.
    fn answered(due: u64, first: u64, gap: u64, tokens: u32) -> Exchange {
        let last = first + gap * u64::from(tokens - 1);
        let gaps = vec![gap as u32 * 1000; tokens as usize - 1];
        let answer = Answer { first: ms(first), last: ms(last), gaps, tokens, ..Answer::default() };
        Exchange { due: ms(due), ended: ms(last + 1), outcome: Ok(answer) }
    }

    fn failed(due: u64, ended: u64, failure: Failure) -> Exchange {
        Exchange { due: ms(due), ended: ms(ended), outcome: Err(failure) }
    }

    fn tally(limits: Limits, exchanges: &[Exchange]) -> Tally {
        let mut tally = Tally::new(limits);
        exchanges.iter().for_each(|exchange| tally.add(exchange));
        tally
    }

    #[track_caller]
    fn near(is: f64, wanted: f64) {
        assert!((is - wanted).abs() <= wanted.abs() * 2e-3, "{is}, not {wanted}");
    }

    #[test]
    fn latencies_count_from_when_a_request_was_due() {
        let summary = tally(Limits::default(), &[answered(100, 400, 20, 11)]).summary();
        near(summary.ttft_ms.unwrap().mean, 300.0);
        near(summary.tpot_ms.unwrap().mean, 20.0);
        near(summary.request_ms.unwrap().max, 501.0);
        assert_eq!(summary.inter_token_ms.unwrap().count, 10);
        near(summary.seconds, 0.501);
        near(summary.tokens_per_second, 11.0 / 0.501);
    }

    #[test]
    fn tokens_that_came_in_one_event_count_as_many() {
        let mut exchange = answered(0, 100, 30, 2);
        if let Ok(answer) = &mut exchange.outcome {
            answer.tokens = 4;
        }
        let summary = tally(Limits::default(), &[exchange]).summary();
        near(summary.tpot_ms.unwrap().mean, 10.0);
        near(summary.inter_token_ms.unwrap().mean, 30.0);
    }

    #[test]
    fn an_answer_of_one_token_has_no_time_per_further_token() {
        let limits = Limits { ttft: None, tpot: Some(1.0) };
        let summary = tally(limits, &[answered(0, 50, 0, 1)]).summary();
        assert_eq!((summary.tpot_ms, summary.inter_token_ms), (None, None));
        assert_eq!(summary.goodput.unwrap().good, 1);
    }

    #[test]
    fn goodput_counts_answers_within_both_limits_among_all_that_ended() {
        let limits = Limits { ttft: Some(100.0), tpot: Some(20.0) };
        let exchanges = [
            answered(0, 100, 20, 10),
            answered(0, 101, 20, 10),
            answered(0, 100, 21, 10),
            failed(0, 2000, Failure::Status(503)),
        ];
        let goodput = tally(limits, &exchanges).summary().goodput.unwrap();
        assert_eq!((goodput.good, goodput.share), (1, 0.25));
        near(goodput.requests_per_second, 0.5);
        assert_eq!(tally(Limits::default(), &exchanges).summary().goodput, None);
    }

    #[test]
    fn failures_are_counted_by_kind_and_give_no_tokens() {
        let refused = || failed(0, 5, Failure::Status(503));
        let summary =
            tally(Limits::default(), &[refused(), refused(), failed(0, 9, Failure::Dropped)]).summary();
        assert_eq!((summary.answered, summary.failed, summary.tokens), (0, 3, 0));
        assert_eq!(summary.failures["HTTP 503"], 2);
        assert_eq!(summary.failures["stream dropped"], 1);
        assert_eq!(summary.ttft_ms, None);
    }

    #[test]
    fn runs_add_up_and_the_time_between_them_does_not_count() {
        let mut both = tally(Limits::default(), &[answered(0, 100, 10, 5)]);
        both.append(&tally(Limits::default(), &[answered(0, 200, 10, 5), failed(0, 3, Failure::Connect)]));
        let summary = both.summary();
        assert_eq!((summary.answered, summary.failed, summary.tokens), (2, 1, 10));
        near(summary.seconds, 0.141 + 0.241);
        near(summary.ttft_ms.unwrap().mean, 150.0);
        let mut none = Tally::new(Limits::default());
        none.append(&both);
        near(none.summary().seconds, summary.seconds);
    }

    #[test]
    fn the_time_line_has_every_token_and_request_in_its_quarter_of_a_second() {
        let tally = tally(Limits::default(), &[answered(100, 300, 250, 3)]);
        let line: Vec<(u32, u32, u32)> = tally.buckets().iter().map(|b| (b.tokens, b.due, b.ended)).collect();
        assert_eq!(line, [(0, 1, 0), (1, 0, 0), (1, 0, 0), (1, 0, 1)]);
    }

    #[test]
    fn a_curve_rises_from_the_shortest_to_the_longest() {
        let curve = tally(Limits::default(), &[answered(0, 10, 5, 3), answered(0, 90, 7, 3)]).ttft_curve();
        assert!(curve.is_sorted());
        near(curve[0].0, 10.0);
        near(curve.last().unwrap().0, 90.0);
        assert!(Tally::new(Limits::default()).ttft_curve().is_empty());
    }
}
