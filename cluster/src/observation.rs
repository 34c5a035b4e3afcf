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

/// How often frames did something, and how long it took them in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// How often.
    pub count: u64,
    /// Rows of all of them.
    pub rows: u64,
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

/// What decode steps of a replica spent between its stages over some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ObservedHops {
    /// Steps that came back.
    pub steps: u64,
    /// Rows of a step, in the mean.
    pub rows: f64,
    /// All hops of a step together, the way back to the master included, in the mean.
    pub time: Millis,
    /// Whether prompts went the same way, which hold decode steps up.
    pub prefilled: bool,
}

/// What decode steps of a replica spent between its stages of late, and what its links foretell for such steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForetoldHops {
    /// Seen.
    pub observed: Millis,
    /// By what is believed of the links.
    pub predicted: Millis,
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

    /// Prefill steps so far.
    fn prefills(&self) -> u64 {
        let prefills = self.steps.iter().filter(|steps| steps.bucket.phase == Phase::Prefill);
        prefills.map(|steps| steps.totals.steps).sum()
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
        Self {
            count: self.count - earlier.count,
            rows: self.rows.saturating_sub(earlier.rows),
            time: Millis((self.time.0 - earlier.time.0).max(0.0)),
        }
    }

    /// The mean, if it took place at all.
    pub fn mean(self) -> Option<Millis> {
        (self.count > 0).then(|| Millis(self.time.0 / self.count as f64))
    }
}

/// What decode steps spent between the stages of a replica since their processes began; see [`hops_since`].
pub fn hop_time(stages: &[StageObservation]) -> Option<Millis> {
    let nothing: Vec<_> = stages.iter().map(|stage| StageObservation::none(stage.stage)).collect();
    hops_since(stages, &nothing).map(|hops| hops.time)
}

/// What decode steps spent between the stages of a replica, in order, since an earlier look at them: the round trip at the
/// master without the visits of all stages. No two clocks are compared. None before every stage has seen a step, or of one
/// stage.
pub fn hops_since(stages: &[StageObservation], earlier: &[StageObservation]) -> Option<ObservedHops> {
    let ([_, .., master], [_, .., master_before]) = (stages, earlier) else { return None };
    let both = || stages.iter().zip(earlier);
    let visit = |(stage, before): (&StageObservation, &StageObservation)| {
        stage.visits.since(before.visits).mean().map(|mean| mean.0)
    };
    let visits = both().map(visit).sum::<Option<f64>>()?;
    let round_trips = master.round_trips.since(master_before.round_trips);
    Some(ObservedHops {
        steps: round_trips.count,
        rows: round_trips.rows as f64 / round_trips.count as f64,
        time: Millis((round_trips.mean()?.0 - visits).max(0.0)),
        prefilled: both().any(|(stage, before)| stage.prefills() != before.prefills()),
    })
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
            visits: Tally { count: 2, rows: 6, time: Millis(visit) },
            round_trips: Tally {
                count: if round_trip > 0.0 { 4 } else { 0 },
                rows: 12,
                time: Millis(round_trip),
            },
            ..StageObservation::none(StageIndex(0))
        };
        assert_eq!(hop_time(&[stage(8.0, 0.0), stage(6.0, 40.0)]), Some(Millis(3.0)));
        assert_eq!(hop_time(&[stage(8.0, 0.0), stage(6.0, 0.0)]), None);
        assert_eq!(hop_time(&[stage(8.0, 40.0)]), None, "nothing is between the stages of one");
    }

    #[test]
    fn hops_since_a_look_are_those_of_the_steps_since_then() {
        let stage = |visits: (u64, f64), round_trips: (u64, f64)| StageObservation {
            visits: Tally { count: visits.0, rows: visits.0, time: Millis(visits.1) },
            round_trips: Tally { count: round_trips.0, rows: 3 * round_trips.0, time: Millis(round_trips.1) },
            ..StageObservation::none(StageIndex(0))
        };
        let before = [stage((10, 20.0), (0, 0.0)), stage((10, 30.0), (10, 900.0))];
        let mut after = [stage((14, 28.0), (0, 0.0)), stage((15, 45.0), (14, 940.0))];
        let seen = ObservedHops { steps: 4, rows: 3.0, time: Millis(5.0), prefilled: false };
        assert_eq!(hops_since(&after, &before), Some(seen));
        assert_eq!(hops_since(&before, &before), None, "no step came back");
        let bucket = StepBucket::of(Phase::Prefill, 64, 0);
        let totals = StepTotals { steps: 1, ..Default::default() };
        after[0].steps = vec![ObservedSteps { bucket, totals, predicted: None }];
        assert!(hops_since(&after, &before).unwrap().prefilled);
    }
}
