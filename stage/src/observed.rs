//! How long steps took, summed up in place by the inference thread and read by whoever asks. Atomic numbers only: a step costs a
//! few additions, and no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cluster::{Millis, StepBucket, StepTotals, Tally};

use crate::chain::Call;

/// After a pause of this length a step says more about the pause than about the device; the idle gaps of a pipeline are shorter,
/// and profiles tell of those up to 25 ms.
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// Everything a stage has seen since its process began.
#[derive(Debug)]
pub(crate) struct Observed {
    steps: Vec<Sums>,
    /// Decode frames, from arrival to departure.
    pub(crate) visits: Sum,
    /// The master's decode steps, from departure to the drawing of their tokens.
    pub(crate) round_trips: Sum,
}

/// Sums over the steps of a bucket.
#[derive(Debug, Default)]
struct Sums {
    depth: AtomicU64,
    outputs: AtomicU64,
    idle_ns: AtomicU64,
    time: Sum,
}

/// A count, with rows and a time.
#[derive(Debug, Default)]
pub(crate) struct Sum {
    count: AtomicU64,
    rows: AtomicU64,
    nanos: AtomicU64,
}

impl Default for Observed {
    fn default() -> Self {
        let mut steps = Vec::new();
        steps.resize_with(StepBucket::COUNT, Sums::default);
        Self { steps, visits: Sum::default(), round_trips: Sum::default() }
    }
}

impl Observed {
    /// Takes note of a step.
    pub(crate) fn step(&self, call: &Call, took: Duration) {
        if call.idle > LONG_PAUSE {
            return;
        }
        let depth = call.depth.round();
        let bucket = StepBucket::of(call.phase, call.rows, depth as u32);
        let Some(sums) = self.steps.get(bucket.index()) else { return };
        add(&sums.depth, depth as u64);
        add(&sums.outputs, u64::from(call.outputs));
        add(&sums.idle_ns, nanos(call.idle));
        sums.time.add(u64::from(call.rows), took);
    }

    /// The buckets that have any steps. A step that is added meanwhile may be in some of a bucket's sums and not yet in others.
    pub(crate) fn steps(&self) -> impl Iterator<Item = (StepBucket, StepTotals)> {
        StepBucket::all().zip(&self.steps).filter_map(|(bucket, sums)| {
            let Tally { count, rows, time } = sums.time.tally();
            let totals = StepTotals {
                steps: count,
                rows,
                depth: sums.depth.load(Ordering::Relaxed),
                outputs: sums.outputs.load(Ordering::Relaxed),
                idle: millis(&sums.idle_ns),
                time,
            };
            (count > 0).then_some((bucket, totals))
        })
    }
}

impl Sum {
    pub(crate) fn add(&self, rows: u64, took: Duration) {
        add(&self.rows, rows);
        add(&self.nanos, nanos(took));
        add(&self.count, 1);
    }

    pub(crate) fn tally(&self) -> Tally {
        Tally {
            count: self.count.load(Ordering::Relaxed),
            rows: self.rows.load(Ordering::Relaxed),
            time: millis(&self.nanos),
        }
    }
}

fn add(to: &AtomicU64, amount: u64) {
    to.fetch_add(amount, Ordering::Relaxed);
}

fn nanos(of: Duration) -> u64 {
    u64::try_from(of.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(nanos: &AtomicU64) -> Millis {
    Millis(nanos.load(Ordering::Relaxed) as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use cluster::Phase;

    use super::*;

    fn call(rows: u32, depth: f64, idle: Duration) -> Call {
        Call { phase: Phase::Decode, rows, depth, outputs: rows, arrived: Instant::now(), idle }
    }

    #[test]
    fn steps_are_summed_up_by_bucket() {
        let observed = Observed::default();
        let gap = Duration::from_millis(2);
        for (rows, depth, ms) in [(3, 10.0, 5), (4, 20.4, 7), (1, 2000.0, 1)] {
            observed.step(&call(rows, depth, gap), Duration::from_millis(ms));
        }
        let seen: Vec<_> = observed.steps().collect();
        assert_eq!(seen.len(), 2);
        let (bucket, totals) = seen[1];
        assert_eq!(bucket, StepBucket::of(Phase::Decode, 4, 0));
        let sums =
            StepTotals { steps: 2, rows: 7, depth: 30, outputs: 7, idle: Millis(4.0), time: Millis(12.0) };
        assert_eq!(totals, sums);
    }

    #[test]
    fn a_step_after_a_long_pause_does_not_count() {
        let observed = Observed::default();
        observed.step(&call(1, 0.0, LONG_PAUSE + Duration::from_millis(1)), Duration::from_millis(90));
        assert_eq!(observed.steps().count(), 0);
    }
}
