//! Steps that a running stage has taken, counted by phase, rows and depth: what a stage reports, and what corrects its device's
//! profile.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Correction, Millis, Phase, StageBatch, StageIndex};

/// The fewest rows of each bucket of decode batches: a profile's numbers of rows are the most of each.
const DECODE_ROWS: [u32; 7] = [1, 2, 3, 5, 9, 17, 33];

/// The fewest rows of each bucket of prefill chunks.
const PREFILL_ROWS: [u32; 7] = [1, 65, 129, 257, 513, 1025, 2049];

/// The least depth of each bucket.
const DEPTHS: [u32; 4] = [0, 1025, 4097, 16_385];

/// Steps that cost about the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepBucket {
    /// Their kind of work.
    pub phase: Phase,
    rows: u8,
    depth: u8,
}

/// The sums over the steps of a bucket, from which means are had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTotals {
    /// Steps.
    pub steps: u64,
    /// Rows of all of them.
    pub rows: u64,
    /// Depths of all of them; of each the mean over its rows.
    pub depth: u64,
    /// Rows whose logits were wanted.
    pub outputs: u64,
    /// Time that the stage had nothing to do before each.
    pub idle: Millis,
    /// Time that it computed.
    pub time: Millis,
}

/// How often something took place, and how long it took in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// How often.
    pub count: u64,
    /// How long in all.
    pub time: Millis,
}

/// The steps of one bucket of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ObservedSteps {
    /// The bucket.
    pub bucket: StepBucket,
    /// The steps since the stage's process began.
    pub totals: StepTotals,
    /// What its device's profile says that they should have taken, where there is one.
    pub predicted: Option<Millis>,
}

/// What a stage is seen to do, since its process began.
#[derive(Debug, Clone, PartialEq)]
pub struct StageObservation {
    /// The stage.
    pub stage: StageIndex,
    /// Resident memory of its process.
    pub resident: Bytes,
    /// Its steps; buckets without any are left out.
    pub steps: Vec<ObservedSteps>,
    /// Decode frames, from their arrival to their results' departure.
    pub visits: Tally,
    /// On the master: decode steps, from their frame's departure to the drawing of their tokens.
    pub round_trips: Tally,
    /// What its device's profile is off by, which outlives the process.
    pub correction: Correction,
}

impl StageObservation {
    /// Of a stage that has done nothing yet.
    pub fn none(stage: StageIndex) -> Self {
        Self {
            stage,
            resident: Bytes::ZERO,
            steps: Vec::new(),
            visits: Tally::default(),
            round_trips: Tally::default(),
            correction: Correction::default(),
        }
    }
}

impl StepBucket {
    /// Number of buckets.
    pub const COUNT: usize = 2 * DECODE_ROWS.len() * DEPTHS.len();

    /// The bucket of a step.
    pub fn of(phase: Phase, rows: u32, depth: u32) -> Self {
        let place = |points: &[u32], x: u32| points.partition_point(|least| *least <= x).max(1) as u8 - 1;
        Self { phase, rows: place(rows_of(phase), rows), depth: place(&DEPTHS, depth) }
    }

    /// All buckets, by their index.
    pub fn all() -> impl Iterator<Item = Self> {
        [Phase::Decode, Phase::Prefill].into_iter().flat_map(|phase| {
            let rows = 0..DECODE_ROWS.len() as u8;
            rows.flat_map(move |rows| (0..DEPTHS.len() as u8).map(move |depth| Self { phase, rows, depth }))
        })
    }

    /// Its place among all buckets, below [`COUNT`](Self::COUNT).
    pub fn index(self) -> usize {
        let phase = usize::from(self.phase == Phase::Prefill);
        (phase * DECODE_ROWS.len() + usize::from(self.rows)) * DEPTHS.len() + usize::from(self.depth)
    }

    /// The fewest rows, and the most where there is a limit.
    pub fn rows(self) -> (u32, Option<u32>) {
        bounds(rows_of(self.phase), self.rows)
    }

    /// The least depth, and the greatest where there is a limit.
    pub fn depths(self) -> (u32, Option<u32>) {
        bounds(&DEPTHS, self.depth)
    }

    /// The bucket's place among those of its phase by rows.
    pub(crate) fn rows_place(self) -> usize {
        usize::from(self.rows)
    }
}

fn rows_of(phase: Phase) -> &'static [u32; 7] {
    match phase {
        Phase::Decode => &DECODE_ROWS,
        Phase::Prefill => &PREFILL_ROWS,
    }
}

fn bounds(points: &[u32], place: u8) -> (u32, Option<u32>) {
    let place = usize::from(place);
    let least = points.get(place).copied().unwrap_or(0);
    (least, points.get(place + 1).map(|next| next - 1))
}

impl StepTotals {
    /// What came on top of earlier totals; all of it where these are not earlier ones, because the process is another.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        if self.steps < earlier.steps {
            return self;
        }
        Self {
            steps: self.steps - earlier.steps,
            rows: self.rows.saturating_sub(earlier.rows),
            depth: self.depth.saturating_sub(earlier.depth),
            outputs: self.outputs.saturating_sub(earlier.outputs),
            idle: Millis((self.idle.0 - earlier.idle.0).max(0.0)),
            time: Millis((self.time.0 - earlier.time.0).max(0.0)),
        }
    }

    /// The step that stands for all of them: curves are nearly linear within a bucket. None of no step.
    pub fn mean_batch(self, phase: Phase) -> Option<StageBatch> {
        let mean = |sum: f64| sum / self.steps as f64;
        (self.steps > 0).then(|| StageBatch {
            phase,
            rows: mean(self.rows as f64),
            depth: mean(self.depth as f64),
            outputs: mean(self.outputs as f64),
            idle: Millis(mean(self.idle.0)),
        })
    }
}

impl Tally {
    /// What came on top of an earlier tally; all of it where that is none.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        if self.count < earlier.count {
            return self;
        }
        Self { count: self.count - earlier.count, time: Millis((self.time.0 - earlier.time.0).max(0.0)) }
    }

    /// The mean, if it took place at all.
    pub fn mean(self) -> Option<Millis> {
        (self.count > 0).then(|| Millis(self.time.0 / self.count as f64))
    }
}

/// What a decode step spends between the stages of a replica, in order, the way back included: the round trip at the master
/// without the visits of all stages. No two clocks are compared. None before every stage has seen a step, or of one stage.
pub fn hop_time(stages: &[StageObservation]) -> Option<Millis> {
    let [_, .., master] = stages else { return None };
    let visits = stages.iter().map(|stage| stage.visits.mean().map(|mean| mean.0)).sum::<Option<f64>>()?;
    master.round_trips.mean().map(|round_trip| Millis((round_trip.0 - visits).max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_a_bucket_whose_bounds_hold_it() {
        for phase in [Phase::Decode, Phase::Prefill] {
            for rows in [1, 2, 4, 8, 31, 32, 33, 64, 512, 100_000] {
                for depth in [0, 1024, 1025, 4096, 1 << 20] {
                    let bucket = StepBucket::of(phase, rows, depth);
                    let within =
                        |x, (least, most): (u32, Option<u32>)| x >= least && most.is_none_or(|m| x <= m);
                    assert!(within(rows, bucket.rows()) && within(depth, bucket.depths()), "{bucket:?}");
                }
            }
        }
        assert_eq!(StepBucket::of(Phase::Decode, 0, 0), StepBucket::of(Phase::Decode, 1, 0));
    }

    #[test]
    fn buckets_are_numbered_without_gaps() {
        let indices: Vec<usize> = StepBucket::all().map(StepBucket::index).collect();
        assert_eq!(indices, (0..StepBucket::COUNT).collect::<Vec<_>>());
    }

    #[test]
    fn the_totals_of_another_process_are_not_compared_with_those_of_the_one_before() {
        let totals = |steps, time| StepTotals { steps, time: Millis(time), ..Default::default() };
        assert_eq!(totals(10, 50.0).since(totals(4, 30.0)), totals(6, 20.0));
        assert_eq!(totals(3, 9.0).since(totals(4, 30.0)), totals(3, 9.0));
        assert_eq!(totals(0, 0.0).mean_batch(Phase::Decode), None);
    }

    #[test]
    fn hops_are_what_a_round_trip_has_beyond_the_visits() {
        let stage = |visit, round_trip| StageObservation {
            visits: Tally { count: 2, time: Millis(visit) },
            round_trips: Tally { count: if round_trip > 0.0 { 4 } else { 0 }, time: Millis(round_trip) },
            ..StageObservation::none(StageIndex(0))
        };
        assert_eq!(hop_time(&[stage(8.0, 0.0), stage(6.0, 40.0)]), Some(Millis(3.0)));
        assert_eq!(hop_time(&[stage(8.0, 0.0), stage(6.0, 0.0)]), None);
        assert_eq!(hop_time(&[stage(8.0, 40.0)]), None, "nothing is between the stages of one");
    }
}
