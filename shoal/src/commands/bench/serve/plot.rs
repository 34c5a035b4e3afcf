//! The result as drawings: how latencies are distributed, and the course of the run.

use chart::{Chart, Curve, Point, svg as draw};
use loadgen::{Bucket, Tally};

use super::session::Side;

/// More points than a drawing has room for are put together.
const MOST_POINTS: usize = 240;

/// The drawing, a whole SVG file.
pub(super) fn svg(sides: &[Side]) -> String {
    let chart = |title: &str, x: &str, y: &str, points: fn(&Tally) -> Vec<(f64, f64)>| Chart {
        title: title.to_owned(),
        x: x.to_owned(),
        y: y.to_owned(),
        curves: sides.iter().map(|side| curve(&side.url, points(&side.tally))).collect(),
    };
    draw(&[
        chart("Time to first token", "ms", "share of answers", Tally::ttft_curve),
        chart("Time between tokens", "ms", "share of gaps", Tally::inter_token_curve),
        chart("Tokens", "time (s)", "tokens/s", tokens),
        chart("Requests under way", "time (s)", "requests", under_way),
    ])
}

fn curve(name: &str, points: Vec<(f64, f64)>) -> Curve {
    Curve { name: name.to_owned(), points: points.into_iter().map(Point::from).collect() }
}

/// Tokens per second, second by second or over longer stretches.
fn tokens(tally: &Tally) -> Vec<(f64, f64)> {
    let rate = |stretch: &[Bucket]| {
        let tokens: u32 = stretch.iter().map(|bucket| bucket.tokens).sum();
        f64::from(tokens) / (stretch.len() as f64 * Bucket::SECONDS)
    };
    stretches(tally.buckets()).map(|(at, stretch)| (at, rate(stretch))).collect()
}

/// Requests that were due and had not ended, at the end of each stretch.
fn under_way(tally: &Tally) -> Vec<(f64, f64)> {
    let mut now = 0.0;
    let count = |(at, stretch): (f64, &[Bucket])| {
        now += stretch.iter().map(|bucket| f64::from(bucket.due) - f64::from(bucket.ended)).sum::<f64>();
        (at, now)
    };
    stretches(tally.buckets()).map(count).collect()
}

/// Stretches of a second or more, each with its end.
fn stretches(buckets: &[Bucket]) -> impl Iterator<Item = (f64, &[Bucket])> {
    let step = ((1.0 / Bucket::SECONDS) as usize).max(buckets.len().div_ceil(MOST_POINTS));
    buckets.chunks(step).scan(0.0, |end, stretch| {
        *end += stretch.len() as f64 * Bucket::SECONDS;
        Some((*end, stretch))
    })
}
