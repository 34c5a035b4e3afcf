//! When a link must be measured again. No I/O; the clock is the caller's.
//!
//! A stage that sees its frames arrive later, or sooner, than the profile of the link predicts has found the link changed:
//! somebody moved to Wi-Fi, a cable was mended, another service takes half of it. A few frames prove nothing, since a hop
//! also waits for a busy host. So the middle hop of a window must be off by [`FACTOR`], and by [`LEAST`] in absolute
//! terms, in every window for [`LONG_ENOUGH`]. Then the watch trips, once, and not again before [`PAUSE`] has passed, since
//! a measurement takes bandwidth from the very frames that are late.

use std::time::Duration;

use cluster::{Bytes, LinkQuality, Millis};

use super::{quantile, sorted};

/// How far off the middle hop must be, either way. The cost model's error is a few per cent, and a busy receiver adds
/// tens of per cent; a link that has really changed class is off by more than this.
pub const FACTOR: f64 = 1.5;

/// … and by how much at least: scheduling noise of a short hop.
pub const LEAST: Millis = Millis(0.5);

/// For how long it must be off without a break: longer than a backup's start or a large download's burst.
pub const LONG_ENOUGH: Duration = Duration::from_secs(15);

/// Between two trips.
pub const PAUSE: Duration = Duration::from_secs(300);

/// Hops are looked at in windows of so long …
const WINDOW: Duration = Duration::from_secs(3);

/// … in which there must be so many.
const FEWEST: usize = 16;

/// Kept of one window, at most: the first so many.
const MOST: usize = 1024;

/// Watches one link.
#[derive(Debug, Clone)]
pub struct LinkWatch {
    predicted: LinkQuality,
    /// Of the present window: observed over predicted, and their difference.
    ratios: Vec<f64>,
    differences: Vec<f64>,
    window_began: Option<Duration>,
    off_since: Option<Duration>,
    tripped: Option<Duration>,
}

impl LinkWatch {
    /// For a link of which this is believed.
    pub const fn new(predicted: LinkQuality) -> Self {
        Self {
            predicted,
            ratios: Vec::new(),
            differences: Vec::new(),
            window_began: None,
            off_since: None,
            tripped: None,
        }
    }

    /// The link was measured again: `predicted` is believed from now on.
    pub fn measured(&mut self, predicted: LinkQuality) {
        let tripped = self.tripped;
        *self = Self { tripped, ..Self::new(predicted) };
    }

    /// A frame of `size` took `hop` to arrive, observed at `now` by any clock that only goes forward. True if the link
    /// should be measured again.
    pub fn observe(&mut self, now: Duration, size: Bytes, hop: Millis) -> bool {
        let began = *self.window_began.get_or_insert(now);
        let expected = self.predicted.transfer(size);
        if self.ratios.len() < MOST && hop.0.is_finite() && expected.0 > 0.0 {
            self.ratios.push(hop.0 / expected.0);
            self.differences.push(hop.0 - expected.0);
        }
        if now.saturating_sub(began) < WINDOW || self.ratios.len() < FEWEST {
            return false;
        }
        let is_off = self.close_window();
        if !is_off {
            self.off_since = None;
            return false;
        }
        let since = *self.off_since.get_or_insert(began);
        let resting = self.tripped.is_some_and(|tripped| now.saturating_sub(tripped) < PAUSE);
        if now.saturating_sub(since) < LONG_ENOUGH || resting {
            return false;
        }
        (self.tripped, self.off_since) = (Some(now), None);
        true
    }

    /// Whether the window that ends was off; begins another.
    fn close_window(&mut self) -> bool {
        let ratio = quantile(&sorted(std::mem::take(&mut self.ratios)), 0.5);
        let difference = quantile(&sorted(std::mem::take(&mut self.differences)), 0.5);
        self.window_began = None;
        difference.abs() >= LEAST.0 && (ratio >= FACTOR || ratio <= 1.0 / FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use cluster::BytesPerSecond;

    use super::*;

    /// 1 MB/s: a frame of 10 kB takes 10 ms, and half a millisecond of latency.
    fn watch() -> LinkWatch {
        LinkWatch::new(LinkQuality { bandwidth: BytesPerSecond(1e6), one_way_latency: Millis(0.5) })
    }

    /// Observes ten frames a second, each taking `hop(second)`; gives the seconds at which the watch tripped.
    fn trips(watch: &mut LinkWatch, seconds: std::ops::Range<u64>, hop: impl Fn(u64) -> f64) -> Vec<u64> {
        let frames = (seconds.start * 10..seconds.end * 10).filter_map(|tenth| {
            let now = Duration::from_millis(tenth * 100);
            watch.observe(now, Bytes(10_000), Millis(hop(tenth / 10))).then_some(tenth / 10)
        });
        frames.collect()
    }

    #[test]
    fn a_link_as_predicted_is_left_alone() {
        assert!(trips(&mut watch(), 0..600, |second| 10.5 + (second % 3) as f64).is_empty());
    }

    #[test]
    fn a_link_that_became_slower_or_faster_is_measured_again_after_a_while() {
        for hop in [17.0, 5.0] {
            let tripped = trips(&mut watch(), 0..60, |_| hop);
            assert_eq!(tripped.len(), 1, "{hop}: {tripped:?}");
            assert!((15..=25).contains(&tripped[0]), "{hop}: {tripped:?}");
        }
    }

    #[test]
    fn late_frames_now_and_then_prove_nothing() {
        let mut watch = watch();
        assert!(trips(&mut watch, 0..300, |second| if second % 10 < 4 { 90.0 } else { 10.0 }).is_empty());
    }

    #[test]
    fn a_noisy_short_hop_is_no_change() {
        let quality = LinkQuality { bandwidth: BytesPerSecond(1e9), one_way_latency: Millis(0.1) };
        assert!(trips(&mut LinkWatch::new(quality), 0..60, |_| 0.5).is_empty());
    }

    #[test]
    fn a_watch_that_tripped_rests() {
        let mut watch = watch();
        let tripped = trips(&mut watch, 0..700, |_| 30.0);
        assert!(tripped.windows(2).all(|pair| pair[1] - pair[0] >= 300), "{tripped:?}");
        assert_eq!(tripped.len(), 3);
    }

    #[test]
    fn a_new_measurement_is_what_counts_from_then_on() {
        let mut watch = watch();
        assert_eq!(trips(&mut watch, 0..30, |_| 30.0).len(), 1);
        watch.measured(LinkQuality { bandwidth: BytesPerSecond(3.4e5), one_way_latency: Millis(0.5) });
        assert!(trips(&mut watch, 30..900, |_| 30.0).is_empty());
    }

    #[test]
    fn few_frames_and_impossible_times_prove_nothing() {
        let mut watch = watch();
        let rare = (0..200).any(|i| watch.observe(Duration::from_secs(i), Bytes(10_000), Millis(f64::NAN)));
        assert!(!rare);
    }
}
