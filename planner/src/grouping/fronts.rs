//! Exact grouping for objectives on rates: a dynamic program over sets of devices that keeps, for each set, the plans
//! whose pair (ΣPS, ΣDS) no other plan on those devices reaches. An objective that never prefers less of a rate has its
//! best plan on the last front.
//!
//! A set's first device is idle, or in one group with some of the others; the rest of the set is a smaller set. So
//! every pair of a set and a part of it is looked at once: below 3ⁿ/2 pairs for n different devices.

use rayon::prelude::*;

use super::states::States;
use crate::evaluate::Draft;
use crate::watch::{Stopped, Watch, Work, show};

/// A plan on a front, with the way back to its parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point {
    pub ps: f64,
    pub ds: f64,
    /// The group added last and its option; group 0 where there is none.
    group: u32,
    option: u8,
    /// The set without that group, and the point on its front.
    rest: u32,
    at: u32,
}

/// For each set, its plans by rising ΣPS and falling ΣDS.
pub(crate) struct Fronts {
    fronts: Vec<Vec<Point>>,
}

impl Fronts {
    pub(crate) fn new(states: &States, watch: &dyn Watch) -> Result<Self, Stopped> {
        let n = states.options.len();
        let nothing = Point { ps: 0.0, ds: 0.0, group: 0, option: 0, rest: 0, at: 0 };
        let mut fronts = vec![Vec::new(); n];
        fronts[0] = vec![nothing];
        let mut by_count: Vec<Vec<u32>> = Vec::new();
        for state in 0..n as u32 {
            let count = states.count(state) as usize;
            by_count.resize(by_count.len().max(count + 1), Vec::new());
            by_count[count].push(state);
        }
        for (done, level) in by_count.iter().enumerate().skip(1) {
            show(watch, Work::Plans, (done, by_count.len()))?;
            let found: Vec<Vec<Point>> =
                level.par_iter().map(|&state| front(states, &fronts, state)).collect();
            for (&state, front) in level.iter().zip(found) {
                fronts[state as usize] = front;
            }
        }
        Ok(Self { fronts })
    }

    /// The plans on all devices.
    pub(crate) fn last(&self) -> &[Point] {
        self.fronts.last().map_or(&[], Vec::as_slice)
    }

    /// A plan of the last front, in full.
    pub(crate) fn draft(&self, states: &States, point: &Point) -> Draft {
        let mut draft = Draft::new();
        let mut point = *point;
        loop {
            if point.group != 0 {
                draft.push(states.group(point.group, point.option));
            } else if point.rest == 0 {
                return draft;
            }
            point = self.fronts[point.rest as usize][point.at as usize];
        }
    }
}

fn front(states: &States, fronts: &[Vec<Point>], state: u32) -> Vec<Point> {
    let Some(first) = states.first_class(state) else { return Vec::new() };
    // With the first device idle.
    let rest = state - states.stride(first);
    let idle = |(at, point): (usize, &Point)| Point { group: 0, option: 0, rest, at: at as u32, ..*point };
    let mut front: Vec<Point> = fronts[rest as usize].iter().enumerate().map(idle).collect();
    states.parts(state, &mut |group| {
        let rest = state - group;
        for (option, of_group) in states.options[group as usize].iter().enumerate() {
            for (at, point) in fronts[rest as usize].iter().enumerate() {
                let (ps, ds) = (point.ps + of_group.ps, point.ds + of_group.ds);
                insert(&mut front, Point { ps, ds, group, option: option as u8, rest, at: at as u32 });
            }
        }
    });
    front
}

/// Keeps a front a front.
fn insert(front: &mut Vec<Point>, point: Point) {
    let at = front.partition_point(|other| other.ps < point.ps);
    if front.get(at).is_some_and(|other| other.ds >= point.ds) {
        return;
    }
    // Whoever has no more of both goes: they are just before.
    let from = front[..at].partition_point(|other| other.ds > point.ds);
    let to = at + usize::from(front.get(at).is_some_and(|other| other.ps <= point.ps));
    front.splice(from..to, [point]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn a_front_keeps_what_nothing_dominates() {
        let mut rng = Rng::new(5);
        for _ in 0..200 {
            let mut front = Vec::new();
            let all: Vec<(f64, f64)> =
                (0..40).map(|_| (rng.below(12) as f64, rng.below(12) as f64)).collect();
            for &(ps, ds) in &all {
                insert(&mut front, Point { ps, ds, group: 0, option: 0, rest: 0, at: 0 });
            }
            let mut expected: Vec<(f64, f64)> = all
                .iter()
                .filter(|a| !all.iter().any(|b| b.0 >= a.0 && b.1 >= a.1 && b != *a))
                .copied()
                .collect();
            expected.sort_by(|a, b| a.partial_cmp(b).unwrap());
            expected.dedup();
            assert_eq!(front.iter().map(|p| (p.ps, p.ds)).collect::<Vec<_>>(), expected);
        }
    }
}
