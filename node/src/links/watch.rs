//! When a replica's links must be measured again. No I/O; the clock is the caller's.
//!
//! Decode steps that spend more, or less, time between the stages than the links foretell have found a link changed: somebody
//! moved to Wi-Fi, a cable was mended, another service takes half of it. A few steps prove nothing, since a hop also waits for
//! a busy host. So the middle look of a window must be off by [`FACTOR`], and by [`LEAST`] a hop in absolute terms, in every
//! window for [`LONG_ENOUGH`] of time with steps in it. Then the watch trips, once, and not again before [`PAUSE`] has passed,
//! since a measurement takes bandwidth from the very frames that are late.
//!
//! What a fresh measurement does not explain is the hosts' own share of the hops. It is expected from then on, so that a busy
//! host does not have its links measured for ever; if it goes away, or grows, the watch trips again.

use std::time::Duration;

use cluster::{Millis, ObservedHops};

/// How far off hops must be, either way. The cost model's error is a few per cent, and a busy receiver adds tens of per cent;
/// a link that has really changed class is off by more than this.
const FACTOR: f64 = 1.5;

/// … and by how much at least, for each hop: scheduling noise of a short one.
const LEAST: Millis = Millis(0.5);

/// For how long they must be off without a break: longer than a backup's start or a large download's burst.
const LONG_ENOUGH: Duration = Duration::from_secs(15);

/// Between two trips.
pub(super) const PAUSE: Duration = Duration::from_secs(300);

/// A window has looks of so much time together. No look counts for more: the steps of a longer one took place at some time
/// within it.
const WINDOW: Duration = Duration::from_secs(3);

/// … and so many steps.
const FEWEST: u64 = 16;

/// What was seen of a replica's decode steps since the look before. Looks in which there were none are not shown to the watch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    /// Since the look before.
    pub(super) lasted: Duration,
    /// What was seen.
    pub(super) hops: ObservedHops,
    /// What the links foretell for such steps.
    pub(super) predicted: Millis,
}

/// Watches the links of one replica.
#[derive(Debug, Clone)]
pub(super) struct HopWatch {
    /// The least difference that matters.
    least: Millis,
    /// The hosts' share of the hops, as far as it is known.
    unexplained: Millis,
    /// The present window.
    looks: Vec<Look>,
    off_for: Duration,
    tripped: Option<Duration>,
}

impl HopWatch {
    /// For steps that make so many hops.
    pub(super) fn new(hops: usize) -> Self {
        Self {
            least: Millis(LEAST.0 * hops as f64),
            unexplained: Millis::default(),
            looks: Vec::new(),
            off_for: Duration::ZERO,
            tripped: None,
        }
    }

    /// Takes in a look at `now`, by any clock that only goes forward. If the links should be measured again, the look that
    /// stands for the window that decided.
    pub(super) fn observe(&mut self, now: Duration, look: Look) -> Option<Look> {
        let expected = look.predicted.0 + self.unexplained.0;
        if look.hops.steps == 0 || !look.hops.time.0.is_finite() || !(expected.is_finite() && expected > 0.0)
        {
            return None;
        }
        self.looks.push(Look { lasted: look.lasted.min(WINDOW), ..look });
        let lasted: Duration = self.looks.iter().map(|look| look.lasted).sum();
        let steps: u64 = self.looks.iter().map(|look| look.hops.steps).sum();
        if lasted < WINDOW || steps < FEWEST {
            return None;
        }
        let Some(middle) = self.close_window().filter(|look| self.is_off(look)) else {
            self.off_for = Duration::ZERO;
            return None;
        };
        self.off_for += lasted;
        let rests = self.tripped.is_some_and(|tripped| now.saturating_sub(tripped) < PAUSE);
        if self.off_for < LONG_ENOUGH || rests {
            return None;
        }
        (self.tripped, self.off_for) = (Some(now), Duration::ZERO);
        Some(middle)
    }

    /// The links were measured: for the steps of `tripped`, they foretell `predicted` from now on.
    pub(super) fn measured(&mut self, tripped: &Look, predicted: Millis) {
        self.unexplained = Millis((tripped.hops.time.0 - predicted.0).max(0.0));
    }

    /// The middle look of the window by how far it is off; begins another.
    fn close_window(&mut self) -> Option<Look> {
        let mut looks = std::mem::take(&mut self.looks);
        looks.sort_by(|a, b| self.ratio(a).total_cmp(&self.ratio(b)));
        looks.get(looks.len() / 2).copied()
    }

    fn ratio(&self, look: &Look) -> f64 {
        look.hops.time.0 / (look.predicted.0 + self.unexplained.0)
    }

    fn is_off(&self, look: &Look) -> bool {
        let (ratio, expected) = (self.ratio(look), look.predicted.0 + self.unexplained.0);
        (look.hops.time.0 - expected).abs() >= self.least.0 && (ratio >= FACTOR || ratio <= 1.0 / FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Two hops; each step's take 11 ms by what the links foretell.
    const PREDICTED: Millis = Millis(11.0);

    fn watch() -> HopWatch {
        HopWatch::new(2)
    }

    fn look(hops: f64, predicted: Millis) -> Look {
        let hops = ObservedHops { steps: 10, rows: 4.0, time: Millis(hops), prefilled: false };
        Look { lasted: SECOND, hops, predicted }
    }

    /// Looks once a second, at hops of `hops(second)`; gives the seconds at which the watch tripped.
    fn trips(watch: &mut HopWatch, seconds: std::ops::Range<u64>, hops: impl Fn(u64) -> f64) -> Vec<u64> {
        let tripped =
            |second: &u64| watch.observe(SECOND * *second as u32, look(hops(*second), PREDICTED)).is_some();
        seconds.filter(tripped).collect()
    }

    #[test]
    fn links_as_predicted_are_left_alone() {
        assert!(trips(&mut watch(), 0..600, |second| 10.5 + (second % 3) as f64).is_empty());
    }

    #[test]
    fn links_that_became_slower_or_faster_are_measured_again_after_a_while() {
        for hops in [17.0, 5.0] {
            let tripped = trips(&mut watch(), 0..60, |_| hops);
            assert_eq!(tripped.len(), 1, "{hops}: {tripped:?}");
            assert!((14..=25).contains(&tripped[0]), "{hops}: {tripped:?}");
        }
    }

    #[test]
    fn late_frames_now_and_then_prove_nothing() {
        assert!(trips(&mut watch(), 0..300, |second| if second % 10 < 4 { 90.0 } else { 11.0 }).is_empty());
        let one_of_three = |second| if second % 3 == 0 { 500.0 } else { 11.0 };
        assert!(trips(&mut watch(), 0..300, one_of_three).is_empty());
    }

    #[test]
    fn noise_of_short_hops_is_no_change() {
        let noisy = |hops| {
            let mut watch = HopWatch::new(hops);
            (0..60).any(|second| watch.observe(SECOND * second, look(1.2, Millis(0.4))).is_some())
        };
        assert!(!noisy(2) && noisy(1), "two hops may have twice the noise of one");
    }

    #[test]
    fn silence_counts_for_nothing_however_long() {
        let mut watch = watch();
        let burst = |watch: &mut HopWatch, at: u64| {
            let waited = Look { lasted: SECOND * 3600, ..look(30.0, PREDICTED) };
            let after = look(30.0, PREDICTED);
            (0..2).any(|i| {
                watch.observe(SECOND * (at + i) as u32, if i == 0 { waited } else { after }).is_some()
            })
        };
        assert!((0..3).all(|hour| !burst(&mut watch, hour * 3600)), "a few steps an hour are few");
        assert!((3..9).any(|hour| burst(&mut watch, hour * 3600)), "they add up");
    }

    #[test]
    fn a_watch_that_tripped_rests() {
        let tripped = trips(&mut watch(), 0..700, |_| 30.0);
        assert!(tripped.windows(2).all(|pair| pair[1] - pair[0] >= 300), "{tripped:?}");
        assert_eq!(tripped.len(), 3);
    }

    #[test]
    fn what_a_fresh_measurement_does_not_explain_is_expected_until_it_changes() {
        let mut watch = watch();
        assert_eq!(trips(&mut watch, 0..30, |_| 30.0).len(), 1);
        watch.measured(&look(30.0, PREDICTED), PREDICTED);
        assert!(trips(&mut watch, 30..900, |_| 30.0).is_empty(), "the links are not to blame");
        assert_eq!(trips(&mut watch, 900..930, |_| 11.0).len(), 1, "it went away");
    }

    #[test]
    fn links_that_are_slower_than_they_seemed_are_believed() {
        let mut watch = watch();
        watch.measured(&look(30.0, PREDICTED), Millis(40.0));
        let mut slow = (0..300_u32).map(|second| watch.observe(SECOND * second, look(38.0, Millis(40.0))));
        assert!(slow.all(|tripped| tripped.is_none()));
    }

    #[test]
    fn few_steps_and_impossible_times_prove_nothing() {
        let mut watch = watch();
        let few = |steps| ObservedHops { steps, ..look(90.0, PREDICTED).hops };
        for (steps, predicted) in [(0, PREDICTED), (10, Millis(0.0)), (10, Millis(f64::NAN))] {
            let look = Look { hops: few(steps), ..look(90.0, predicted) };
            assert!((0..200).all(|second| watch.observe(SECOND * second, look).is_none()));
        }
        let nonsense = look(f64::NAN, PREDICTED);
        assert!((0..200).all(|second| watch.observe(SECOND * second, nonsense).is_none()));
        let rare = Look { hops: few(1), ..look(90.0, PREDICTED) };
        assert!((0..15).all(|second| watch.observe(SECOND * second, rare).is_none()), "no window is full");
    }
}
