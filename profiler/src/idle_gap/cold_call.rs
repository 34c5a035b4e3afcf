//! The short form of the experiment: what a profile says about a device that has idled.

use std::ops::ControlFlow;
use std::time::Duration;

use cluster::{ColdCall, Millis};
use llama::SliceContext;

use super::experiment::{Replay, Rounds};
use super::replay::SETTLING;
use super::{Gaps, HiddenRows, IdleGapError, PROMPT, Point};
use crate::statistics::never_falling;

/// Where the effect sets in, where most of it is there, and where the paper saw it end.
const GAPS: [Millis; 4] = [Millis(1.0), Millis(4.0), Millis(10.0), Millis(25.0)];

const TOKENS: u32 = 6;

const REPEAT: u32 = 9;

/// Together with the rounds that are always run: some seconds.
const BUDGET: Duration = Duration::from_secs(4);

/// Hidden rows that [`cold_call`] replays, and tokens that its context must have room for.
pub const COLD_CALL_ROWS: u32 = PROMPT + SETTLING + TOKENS;

/// Measures within seconds how much longer a call of the slice in `context` takes after idle gaps.
///
/// The slice should be small, one block or two: a stage pays the fixed part of the cost at each of its calls. `rows`
/// are [`COLD_CALL_ROWS`] or more, of any content. Slot 0 is used, and all slots are emptied. `go_on` is asked before each
/// replay, several times a second.
pub fn cold_call(
    context: &mut SliceContext,
    rows: &HiddenRows,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ColdCall, IdleGapError> {
    let gaps = Gaps::new(&GAPS)?;
    let rounds = Rounds { gaps: &gaps, tokens: TOKENS, repeat: REPEAT, budget: BUDGET };
    let mut replays = [Replay { cut: 0, context, rows }];
    correction(&rounds.run(&mut replays, &mut |_, _| go_on())?)
}

/// A longer gap never costs less, and none gains anything: what says otherwise is noise.
fn correction(points: &[Point]) -> Result<ColdCall, IdleGapError> {
    let mut measured: Vec<(f64, f64)> = points
        .iter()
        .filter(|point| point.gap.0 > 0.0)
        .map(|point| (point.actual_gap.0, point.extra.median))
        .collect();
    // On a host that is busy beyond measure, gaps can turn out other than wished.
    measured.sort_by(|a, b| a.0.total_cmp(&b.0));
    measured.dedup_by(|next, kept| next.0 <= kept.0);
    let (gaps, extra): (Vec<f64>, Vec<f64>) = measured.into_iter().unzip();
    let extra = never_falling(&extra).into_iter().map(|extra| Millis(extra.max(0.0))).collect();
    Ok(ColdCall::new(gaps.into_iter().map(Millis).collect(), extra)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Quartiles;

    fn point(gap: f64, actual: f64, extra: f64) -> Point {
        let extra = Quartiles { lower: extra, median: extra, upper: extra };
        Point { cut: 0, gap: Millis(gap), actual_gap: Millis(actual), per_token: extra, extra }
    }

    fn millis(of: &[f64]) -> Vec<Millis> {
        of.iter().copied().map(Millis).collect()
    }

    #[test]
    fn a_correction_never_falls_and_is_never_negative() {
        let points = [
            point(0.0, 0.0, 0.3),
            point(1.0, 1.1, -0.2),
            point(4.0, 4.1, 0.5),
            point(10.0, 10.0, 0.3),
            point(25.0, 25.2, 0.9),
        ];
        let cold = correction(&points).unwrap();
        assert_eq!(cold.gaps(), millis(&[1.1, 4.1, 10.0, 25.2]));
        assert_eq!(cold.extra(), millis(&[0.0, 0.4, 0.4, 0.9]));
    }

    #[test]
    fn gaps_that_came_out_in_another_order_still_make_a_correction() {
        let points =
            [point(0.0, 0.0, 0.0), point(1.0, 5.0, 0.2), point(4.0, 4.0, 0.1), point(10.0, 5.0, 0.6)];
        let cold = correction(&points).unwrap();
        assert_eq!(cold.gaps(), millis(&[4.0, 5.0]));
        assert_eq!(cold.extra().len(), 2);
    }

    #[test]
    fn nothing_measured_is_no_correction() {
        assert!(matches!(correction(&[point(0.0, 0.0, 0.0)]), Err(IdleGapError::ColdCall(_))));
    }
}
