//! What a stage saw of its own steps, on the wire. Sums that are no numbers and buckets that this version does not know are left
//! out: they would only spoil a correction.

use cluster::{Millis, Phase, StepBucket, StepTotals, Tally};

use crate::v1;

impl From<(StepBucket, StepTotals)> for v1::StepTimes {
    fn from((bucket, totals): (StepBucket, StepTotals)) -> Self {
        Self {
            prefill: bucket.phase == Phase::Prefill,
            from_rows: bucket.rows().0,
            from_depth: bucket.depths().0,
            steps: totals.steps,
            rows: totals.rows,
            depth: totals.depth,
            outputs: totals.outputs,
            idle_ms: totals.idle.0,
            time_ms: totals.time.0,
        }
    }
}

/// Reads the steps of a stage.
pub fn steps(of: &[v1::StepTimes]) -> impl Iterator<Item = (StepBucket, StepTotals)> {
    of.iter().filter_map(|steps| {
        let phase = if steps.prefill { Phase::Prefill } else { Phase::Decode };
        let bucket = StepBucket::of(phase, steps.from_rows, steps.from_depth);
        let is_known = (bucket.rows().0, bucket.depths().0) == (steps.from_rows, steps.from_depth);
        let totals = StepTotals {
            steps: steps.steps,
            rows: steps.rows,
            depth: steps.depth,
            outputs: steps.outputs,
            idle: time(steps.idle_ms)?,
            time: time(steps.time_ms)?,
        };
        (is_known && totals.steps > 0).then_some((bucket, totals))
    })
}

/// Reads a tally; nothing of one that is missing or no number.
pub fn tally(of: Option<&v1::Tally>) -> Tally {
    let read =
        |tally: &v1::Tally| Some(Tally { count: tally.count, rows: tally.rows, time: time(tally.time_ms)? });
    of.and_then(read).unwrap_or_default()
}

fn time(ms: f64) -> Option<Millis> {
    (ms.is_finite() && ms >= 0.0).then_some(Millis(ms))
}

impl From<Tally> for v1::Tally {
    fn from(tally: Tally) -> Self {
        Self { count: tally.count, time_ms: tally.time.0, rows: tally.rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals() -> StepTotals {
        StepTotals { steps: 3, rows: 12, depth: 4000, outputs: 12, idle: Millis(0.5), time: Millis(9.25) }
    }

    #[test]
    fn every_bucket_survives_the_wire() {
        let sent: Vec<(StepBucket, StepTotals)> =
            StepBucket::all().map(|bucket| (bucket, totals())).collect();
        let wire: Vec<v1::StepTimes> = sent.iter().copied().map(v1::StepTimes::from).collect();
        assert_eq!(steps(&wire).collect::<Vec<_>>(), sent);
        let counted = Tally { count: 7, rows: 9, time: Millis(1.5) };
        assert_eq!(tally(Some(&counted.into())), counted);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let good = v1::StepTimes::from((StepBucket::of(Phase::Decode, 4, 0), totals()));
        let bad = [
            v1::StepTimes { time_ms: f64::NAN, ..good },
            v1::StepTimes { idle_ms: -1.0, ..good },
            v1::StepTimes { from_rows: 4, ..good },
            v1::StepTimes { steps: 0, ..good },
        ];
        assert_eq!(steps(&bad).count(), 0);
        assert_eq!(tally(Some(&v1::Tally { count: 7, time_ms: f64::INFINITY, rows: 9 })), Tally::default());
        assert_eq!(tally(None), Tally::default());
    }
}
