//! From the arrivals of a stream to the rate that the link sustains. No I/O, no clock.
//!
//! A stream does not begin at its link's rate: congestion control works its way up (slow start, BBR's startup), shapers let
//! a burst pass, a radio wakes. So the time is taken in pieces; the first are not looked at, and the rate counts once
//! several pieces in a row agree. A link that never becomes steady within the limit gets the rate of the middle piece of
//! the later half, and its spread says so.

use std::time::Duration;

use cluster::BytesPerSecond;

use super::{quantile, sorted};

/// Shortest piece: many times the scheduling noise of a busy host. On slow paths two round trips, since congestion control
/// acts once per round trip.
const SHORTEST_PIECE: Duration = Duration::from_millis(100);

/// Longest piece, on paths with absurd round trips.
const LONGEST_PIECE: Duration = Duration::from_secs(1);

/// Arrivals that make a piece: fewer would measure the size of frames.
const ARRIVALS: u32 = 4;

/// Pieces never looked at.
const WARM_UP: usize = 2;

/// Pieces in a row that must agree …
const AGREEING: usize = 4;

/// … to so much: (largest − smallest) / middle.
const AGREEMENT: f64 = 0.06;

/// Pieces after which a stream is what it is.
const MOST_PIECES: usize = 15;

/// Time that one frame of the stream is to take: short, so that the link's queue is never long, and long enough that a
/// frame's fixed cost does not count.
const FRAME_SECS: f64 = 0.005;

/// Time's worth of bytes under way: no wait of sender or receiver lasts as long, so the link is never idle.
const AHEAD_SECS: f64 = 0.1;

const SMALLEST_FRAME: usize = 8 << 10;
const LARGEST_FRAME: usize = Meter::LARGEST_FRAME;

/// Bytes under way at first, and at most: twice what 1 Gbit/s and 30 ms of round trip take.
const LEAST_AHEAD: u64 = 64 << 10;
const MOST_AHEAD: u64 = 8 << 20;

/// What a stream sustains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sustained {
    pub(super) rate: BytesPerSecond,
    /// Of the pieces' rates: (largest − smallest) / middle.
    pub(super) spread: f64,
}

/// Watches a stream.
#[derive(Debug)]
pub(super) struct Meter {
    piece: Duration,
    /// Round trip, in seconds.
    round_trip: f64,
    /// Bytes and time at which the present piece began.
    began: Option<(u64, Duration)>,
    arrivals: u32,
    arrived: u64,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    bytes: f64,
    seconds: f64,
}

impl Piece {
    fn rate(self) -> f64 {
        self.bytes / self.seconds
    }
}

impl Meter {
    /// Of any frame of the stream, in bytes.
    pub(super) const LARGEST_FRAME: usize = 1 << 20;

    /// For a path of this round trip.
    pub(super) fn new(round_trip: Duration) -> Self {
        let piece = (round_trip * 2).clamp(SHORTEST_PIECE, LONGEST_PIECE);
        let round_trip = round_trip.as_secs_f64();
        Self { piece, round_trip, began: None, arrivals: 0, arrived: 0, pieces: Vec::new() }
    }

    /// So many bytes in all have arrived at `elapsed` by the receiver's clock.
    pub(super) fn arrived(&mut self, bytes: u64, elapsed: Duration) {
        self.arrived = bytes;
        let Some((before, since)) = self.began else {
            self.began = Some((bytes, elapsed));
            return;
        };
        self.arrivals += 1;
        let took = elapsed.saturating_sub(since);
        if took >= self.piece && self.arrivals >= ARRIVALS {
            let bytes_here = bytes.saturating_sub(before) as f64;
            self.pieces.push(Piece { bytes: bytes_here, seconds: took.as_secs_f64() });
            (self.began, self.arrivals) = (Some((bytes, elapsed)), 0);
        }
    }

    /// The rate, once it is known.
    pub(super) fn verdict(&self) -> Option<Sustained> {
        let pieces = self.pieces.get(WARM_UP..)?;
        let last = pieces.len().checked_sub(AGREEING).and_then(|from| pieces.get(from..));
        if let Some(last) = last {
            let (bytes, seconds) =
                last.iter().fold((0.0, 0.0), |(b, s), piece| (b + piece.bytes, s + piece.seconds));
            let rates = sorted(last.iter().map(|piece| piece.rate()).collect());
            if spread(&rates) <= AGREEMENT {
                return Some(Sustained { rate: BytesPerSecond(bytes / seconds), spread: spread(&rates) });
            }
        }
        if self.pieces.len() < MOST_PIECES {
            return None;
        }
        let later = &self.pieces[self.pieces.len() / 2..];
        let rates = sorted(later.iter().map(|piece| piece.rate()).collect());
        Some(Sustained { rate: BytesPerSecond(quantile(&rates, 0.5)), spread: spread(&rates) })
    }

    /// How large the next frame should be.
    pub(super) fn frame_bytes(&self) -> usize {
        let wanted = self.rate_now().map_or(0.0, |rate| rate * FRAME_SECS);
        (wanted as usize).clamp(SMALLEST_FRAME, LARGEST_FRAME)
    }

    /// How many bytes may be under way: as many as have arrived, as in slow start, up to what the link needs.
    pub(super) fn ahead(&self) -> u64 {
        let enough =
            self.rate_now().map_or(MOST_AHEAD, |rate| (rate * (AHEAD_SECS + 2.0 * self.round_trip)) as u64);
        self.arrived.min(enough).clamp(LEAST_AHEAD, MOST_AHEAD)
    }

    fn rate_now(&self) -> Option<f64> {
        self.pieces.last().map(|piece| piece.rate())
    }
}

fn spread(sorted: &[f64]) -> f64 {
    match (sorted.first(), sorted.last()) {
        (Some(least), Some(most)) => (most - least) / quantile(sorted, 0.5).max(1.0),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds a stream whose rate at a time is `rate`, and gives the verdict with the time it took.
    fn run(rate: impl Fn(f64) -> f64, round_trip: Duration) -> (Sustained, f64) {
        let mut meter = Meter::new(round_trip);
        let (mut bytes, mut now) = (0_u64, 0.0);
        loop {
            let frame = meter.frame_bytes() as u64;
            bytes += frame;
            now += frame as f64 / rate(now);
            meter.arrived(bytes, Duration::from_secs_f64(now));
            if let Some(verdict) = meter.verdict() {
                return (verdict, now);
            }
            assert!(now < 1e4, "no verdict");
        }
    }

    #[test]
    fn a_steady_stream_is_measured_in_less_than_a_second() {
        for mbit in [20.0, 100.0, 920.0, 9000.0] {
            let rate = mbit * 1e6 / 8.0;
            let (found, took) = run(|_| rate, Duration::from_micros(300));
            assert!((found.rate.0 / rate - 1.0).abs() < 1e-3, "{mbit}: {found:?}");
            assert!(found.spread < 0.01 && took < 1.0, "{mbit}: {took}");
        }
    }

    #[test]
    fn neither_a_slow_start_nor_a_burst_at_the_start_counts() {
        let rate = 12.5e6;
        let slow_start = |t: f64| rate * (0.02 + t / 0.8).min(1.0);
        let burst = |t: f64| if t < 0.15 { 20.0 * rate } else { rate };
        for start in [&slow_start as &dyn Fn(f64) -> f64, &burst] {
            let (found, _) = run(start, Duration::from_millis(2));
            assert!((found.rate.0 / rate - 1.0).abs() < 0.04, "{found:?}");
        }
    }

    #[test]
    fn a_stream_that_never_settles_gets_its_middle_rate_and_a_spread_that_says_so() {
        let wave = |t: f64| 1e7 * (1.0 + 0.5 * (t * 9.0).sin());
        let (found, _) = run(wave, Duration::from_millis(1));
        assert!(found.spread > 0.3, "{found:?}");
        assert!((0.6..1.4).contains(&(found.rate.0 / 1e7)), "{found:?}");
    }

    #[test]
    fn frames_and_what_is_under_way_follow_the_rate() {
        let mut meter = Meter::new(Duration::from_millis(10));
        assert_eq!((meter.frame_bytes(), meter.ahead()), (SMALLEST_FRAME, LEAST_AHEAD));
        for i in 0..=200_u64 {
            meter.arrived(i * 625_000, Duration::from_millis(5 * i));
        }
        assert_eq!(meter.frame_bytes(), 625_000);
        assert_eq!(meter.ahead(), MOST_AHEAD);
        let mut slow = Meter::new(Duration::from_millis(10));
        for i in 0..=200_u64 {
            slow.arrived(i * 12_500, Duration::from_millis(5 * i));
        }
        assert_eq!(slow.ahead(), 300_000);
    }

    proptest! {
        #[test]
        fn any_arrivals_give_a_rate_or_none(
            steps in proptest::collection::vec((0..u64::MAX / 400, 0..2_000_000_u64), 0..400),
            round_trip_us in 0..100_000_000_u64,
        ) {
            let mut meter = Meter::new(Duration::from_micros(round_trip_us));
            let (mut bytes, mut elapsed) = (0_u64, 0_u64);
            for (more, later) in steps {
                (bytes, elapsed) = (bytes + more, elapsed + later);
                meter.arrived(bytes, Duration::from_micros(elapsed));
                prop_assert!((SMALLEST_FRAME..=LARGEST_FRAME).contains(&meter.frame_bytes()));
                prop_assert!((LEAST_AHEAD..=MOST_AHEAD).contains(&meter.ahead()));
                if let Some(found) = meter.verdict() {
                    prop_assert!(found.rate.0.is_finite() && found.spread.is_finite());
                }
            }
        }
    }
}
