//! From measured times to curves.
//!
//! Each time is that of a call of a slice: a fixed cost, and a cost for each block of each type. At every number of rows and
//! depth where enough slices were measured, these are told apart (weighted least squares). Then each of them becomes a
//! [`Surface`]: linear in depth (up to the window, for a sliding window), with a base and a slope for each number of rows; both
//! never fall with more rows (isotonic regression), and between the measured numbers of rows they are linear. Where only one
//! depth was measured, for want of memory, the slope of another number of rows stands in, row for row: attention reads
//! each sequence's cache for itself.

use std::collections::BTreeMap;

use cluster::{Attention, Millis, Surface, SurfaceError};

use crate::linear::least_squares;
use crate::statistics::never_falling;

/// No time is zero; less than what a clock can tell.
const LEAST_MS: f64 = 1e-6;

/// Times of calls at one number of rows and one depth: blocks of each type, and milliseconds.
pub(crate) type Calls = Vec<(Vec<f64>, f64)>;

/// What calls cost at one number of rows and one depth.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Costs {
    /// The fixed cost.
    pub(crate) call: f64,
    /// A block of each type.
    pub(crate) blocks: Vec<f64>,
}

/// Tells the costs apart; `known_call` stands in where there are too few slices. None where that does not suffice either.
pub(crate) fn costs(calls: &Calls, known_call: Option<f64>) -> Option<Costs> {
    let n_kinds = calls.first()?.0.len();
    let times: Vec<f64> = calls.iter().map(|(_, ms)| *ms).collect();
    let with_call: Vec<Vec<f64>> =
        calls.iter().map(|(counts, _)| [&[1.0], counts.as_slice()].concat()).collect();
    let whole = if calls.len() > n_kinds { least_squares(&with_call, &times) } else { None };
    match whole {
        Some(x) if x.iter().skip(1).all(|block| *block > 0.0) && x[0] >= 0.0 => {
            return Some(Costs { call: x[0], blocks: x[1..].to_vec() });
        }
        _ => {}
    }
    // A fixed cost below zero is noise: there is none to speak of.
    let call = known_call.unwrap_or(0.0);
    if whole.is_none() && known_call.is_none() {
        return None;
    }
    let counts: Vec<Vec<f64>> = calls.iter().map(|(counts, _)| counts.clone()).collect();
    let rest: Vec<f64> = times.iter().map(|ms| (ms - call).max(ms * 0.1)).collect();
    let blocks = least_squares(&counts, &rest)?;
    Some(Costs { call, blocks: blocks.into_iter().map(|block| block.max(LEAST_MS)).collect() })
}

/// A measured or derived time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Timed {
    pub(crate) rows: u32,
    pub(crate) depth: u32,
    pub(crate) ms: f64,
}

/// How a cost follows the depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Growth {
    /// With all of it.
    Unbounded,
    /// As far as this.
    UpTo(u32),
    /// Not at all.
    None,
}

impl Growth {
    /// How blocks of a type do.
    pub(crate) fn of(attention: Attention) -> Self {
        match attention {
            Attention::Full => Self::Unbounded,
            Attention::SlidingWindow { window } => Self::UpTo(window),
            Attention::Recurrent => Self::None,
        }
    }

    fn reach(self, depth: u32) -> f64 {
        match self {
            Self::Unbounded => f64::from(depth),
            Self::UpTo(window) => f64::from(depth.min(window)),
            Self::None => 0.0,
        }
    }
}

/// The surface through `points`.
pub(crate) fn surface(points: &[Timed], growth: Growth) -> Result<Surface, SurfaceError> {
    let mut by_rows: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
    for point in points {
        by_rows.entry(point.rows).or_default().push((growth.reach(point.depth), point.ms));
    }
    let lines: Vec<(u32, Line)> =
        by_rows.iter().map(|(rows, points)| (*rows, Line::through(points))).collect();
    let slopes: Vec<f64> =
        lines.iter().map(|(rows, line)| line.slope.unwrap_or_else(|| borrowed(&lines, *rows))).collect();
    let bases: Vec<f64> =
        lines.iter().zip(&slopes).map(|((_, line), slope)| line.mean_ms - slope * line.mean_reach).collect();
    let bases: Vec<f64> = never_falling(&bases).into_iter().map(|base| base.max(LEAST_MS)).collect();
    let slopes = never_falling(&slopes);
    let deepest = points.iter().map(|point| point.depth).max().unwrap_or(0);
    let depths = depths(growth, deepest);
    let at = |depth: &u32| growth.reach(*depth);
    let times = bases.iter().zip(&slopes).flat_map(|(base, slope)| {
        depths.iter().map(move |depth| Millis(base + slope * at(depth))).collect::<Vec<_>>()
    });
    Surface::new(lines.iter().map(|(rows, _)| *rows).collect(), depths.clone(), times.collect())
}

/// Where a surface needs points: at its ends, and where its growth ends.
fn depths(growth: Growth, deepest: u32) -> Vec<u32> {
    match growth {
        Growth::None => vec![0],
        _ if deepest == 0 => vec![0],
        Growth::UpTo(window) if window < deepest => vec![0, window, deepest],
        Growth::Unbounded | Growth::UpTo(_) => vec![0, deepest],
    }
}

/// The slope of the nearest number of rows with one, row for row.
fn borrowed(lines: &[(u32, Line)], rows: u32) -> f64 {
    let with_slope = lines.iter().filter_map(|(other, line)| Some((*other, line.slope?)));
    let nearest = with_slope.min_by_key(|(other, _)| other.abs_diff(rows));
    nearest.map_or(0.0, |(other, slope)| slope * f64::from(rows) / f64::from(other.max(1)))
}

/// A line through times at depths, for one number of rows.
#[derive(Debug, Clone, Copy)]
struct Line {
    mean_reach: f64,
    mean_ms: f64,
    /// None where all depths are one.
    slope: Option<f64>,
}

impl Line {
    /// Errors count relative to the time: deep points are slow and would rule the shallow ones.
    fn through(points: &[(f64, f64)]) -> Self {
        let weight = |ms: f64| 1.0 / (ms * ms).max(1e-18);
        let total: f64 = points.iter().map(|(_, ms)| weight(*ms)).sum();
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            points.iter().map(|(reach, ms)| weight(*ms) * of(*reach, *ms)).sum::<f64>() / total
        };
        let (mean_reach, mean_ms) = (mean(&|reach, _| reach), mean(&|_, ms| ms));
        let spread = mean(&|reach, _| (reach - mean_reach).powi(2));
        let covariance = mean(&|reach, ms| (reach - mean_reach) * (ms - mean_ms));
        let slope = (spread > 0.0).then(|| (covariance / spread).max(0.0));
        Self { mean_reach, mean_ms, slope }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_and_its_blocks_are_told_apart_by_slices_of_two_sizes() {
        let found = costs(&vec![(vec![1.0], 3.0), (vec![3.0], 7.0)], None).unwrap();
        assert!((found.call - 1.0).abs() < 1e-9 && (found.blocks[0] - 2.0).abs() < 1e-9, "{found:?}");
        let one = costs(&vec![(vec![1.0], 3.0)], Some(0.5)).unwrap();
        assert!((one.blocks[0] - 2.5).abs() < 1e-9);
        assert_eq!(costs(&vec![(vec![1.0], 3.0)], None), None);
    }

    #[test]
    fn a_fixed_cost_below_zero_is_taken_for_none() {
        let found = costs(&vec![(vec![1.0], 1.9), (vec![2.0], 4.0)], None).unwrap();
        assert_eq!(found.call, 0.0);
        assert!((found.blocks[0] - 1.95).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn types_of_blocks_are_told_apart() {
        let calls = vec![(vec![1.0, 1.0], 6.0), (vec![2.0, 1.0], 8.0), (vec![3.0, 2.0], 13.0)];
        let found = costs(&calls, None).unwrap();
        assert!((found.blocks[0] - 2.0).abs() < 1e-6 && (found.blocks[1] - 3.0).abs() < 1e-6, "{found:?}");
    }

    fn timed(of: &[(u32, u32, f64)]) -> Vec<Timed> {
        of.iter().map(|&(rows, depth, ms)| Timed { rows, depth, ms }).collect()
    }

    #[test]
    fn a_surface_is_linear_in_depth_and_never_falls_with_rows() {
        let points = timed(&[(1, 0, 2.0), (1, 1000, 3.0), (1, 4000, 6.0), (2, 0, 1.8), (2, 1000, 3.8)]);
        let fitted = surface(&points, Growth::Unbounded).unwrap();
        assert_eq!(fitted.depths(), [0, 4000]);
        assert!((fitted.at(1.0, 2000.0).0 - 3.9).abs() < 0.01, "{fitted:?}");
        assert!(fitted.at(2.0, 0.0).0 >= fitted.at(1.0, 0.0).0);
    }

    #[test]
    fn what_was_not_measured_deep_borrows_the_slope_row_for_row() {
        let points = timed(&[(1, 0, 1.0), (1, 1000, 2.0), (8, 0, 3.0)]);
        let fitted = surface(&points, Growth::Unbounded).unwrap();
        assert!((fitted.at(8.0, 1000.0).0 - 11.0).abs() < 1e-6, "{fitted:?}");
    }

    #[test]
    fn a_sliding_window_costs_no_more_beyond_it() {
        let points = timed(&[(1, 0, 1.0), (1, 1024, 2.0), (1, 4096, 2.0)]);
        let fitted = surface(&points, Growth::UpTo(512)).unwrap();
        assert_eq!(fitted.depths(), [0, 512, 4096]);
        assert!((fitted.at(1.0, 256.0).0 - 1.5).abs() < 1e-6);
        assert!((fitted.at(1.0, 9000.0).0 - 2.0).abs() < 1e-6);
        assert_eq!(surface(&points, Growth::None).unwrap().depths(), [0]);
    }
}
