//! Two servers' figures against each other: a ratio for each round, of which the median and the extremes are told. Only
//! within a round do both meet the same state of the host.

use loadgen::{Distribution, Summary};
use profiler::statistics::median;
use serde::Serialize;

/// A figure of the first server over that of the second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Ratio {
    pub(super) figure: &'static str,
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    /// How many rounds have it.
    pub(super) rounds: usize,
}

type Figure = (&'static str, fn(&Summary) -> Option<f64>);

fn of(distribution: Option<Distribution>, figure: fn(Distribution) -> f64) -> Option<f64> {
    distribution.map(figure)
}

/// What is compared.
const FIGURES: [Figure; 10] = [
    ("tokens_per_second", |s| Some(s.tokens_per_second)),
    ("ttft_mean", |s| of(s.ttft_ms, |d| d.mean)),
    ("ttft_p50", |s| of(s.ttft_ms, |d| d.p50)),
    ("ttft_p95", |s| of(s.ttft_ms, |d| d.p95)),
    ("tpot_mean", |s| of(s.tpot_ms, |d| d.mean)),
    ("tpot_p95", |s| of(s.tpot_ms, |d| d.p95)),
    ("inter_token_p99", |s| of(s.inter_token_ms, |d| d.p99)),
    ("inter_token_max", |s| of(s.inter_token_ms, |d| d.max)),
    ("request_mean", |s| of(s.request_ms, |d| d.mean)),
    ("goodput", |s| s.goodput.map(|goodput| goodput.requests_per_second)),
];

/// The ratios of the rounds that both servers finished.
pub(super) fn ratios(first: &[Summary], second: &[Summary]) -> Vec<Ratio> {
    let ratio = |(figure, value): &Figure| {
        let quotient = |(a, b)| Some(value(a)? / value(b).filter(|b| *b > 0.0)?);
        let ratios: Vec<f64> = first.iter().zip(second).filter_map(quotient).collect();
        let extreme = |of: fn(f64, f64) -> f64| ratios.iter().copied().reduce(of);
        let (min, max) = (extreme(f64::min)?, extreme(f64::max)?);
        Some(Ratio { figure, median: median(&ratios), min, max, rounds: ratios.len() })
    };
    FIGURES.iter().filter_map(ratio).collect()
}

#[cfg(test)]
mod tests {
    use loadgen::{Limits, Tally};

    use super::*;

    fn summary(tokens_per_second: f64, ttft: Option<f64>) -> Summary {
        let ttft = ttft.map(|mean| Distribution { mean, ..Distribution::default() });
        Summary { tokens_per_second, ttft_ms: ttft, ..Tally::new(Limits::default()).summary() }
    }

    #[test]
    fn a_ratio_is_of_figures_of_the_same_round() {
        let first = [summary(90.0, Some(4.0)), summary(40.0, Some(2.0)), summary(20.0, None)];
        let second = [
            summary(100.0, Some(2.0)),
            summary(20.0, Some(2.0)),
            summary(20.0, Some(1.0)),
            summary(1.0, None),
        ];
        let ratios = ratios(&first, &second);
        let named = |figure| ratios.iter().find(|ratio| ratio.figure == figure);
        let tokens = Ratio { figure: "tokens_per_second", median: 1.0, min: 0.9, max: 2.0, rounds: 3 };
        assert_eq!(named("tokens_per_second"), Some(&tokens));
        assert_eq!(named("ttft_mean").map(|ratio| (ratio.median, ratio.rounds)), Some((1.5, 2)));
        assert_eq!(named("goodput"), None);
        assert_eq!(named("ttft_p50"), None, "nothing over nothing is no ratio");
    }
}
