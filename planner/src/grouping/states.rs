//! Sets of devices, counted by class: a mixed-radix number with one digit for each class. With devices that are all
//! different these are the subsets; with many alike there are far fewer.

use std::sync::Arc;

use rayon::prelude::*;

use crate::evaluate::{DraftGroup, Evaluator, GroupOption};
use crate::settings::Effort;
use crate::watch::{Stopped, Watch, Work, show};

/// States that are evaluated between two looks at whether to go on.
const ABREAST: usize = 256;

/// The states of a cluster and what a group of each is worth.
pub(crate) struct States {
    /// Devices of each class.
    sizes: Vec<u32>,
    strides: Vec<u32>,
    /// Options of the group that a state is, by state.
    pub options: Vec<Arc<[GroupOption]>>,
}

/// Steps that the exact search over these classes takes, if they are not too many to count.
fn steps(class_sizes: &[usize]) -> u64 {
    // Pairs of a state and a part of it with at least one device of its first class: below half of all pairs.
    let pairs = class_sizes.iter().map(|&c| ((c + 1) * (c + 2) / 2) as u64);
    pairs.fold(1, u64::saturating_mul) / 2
}

/// Whether the exact search over a cluster is within what may be spent.
pub(crate) fn affordable(evaluator: &Evaluator<'_>, effort: &Effort) -> bool {
    let sizes: Vec<usize> = evaluator.inst().classes.iter().map(Vec::len).collect();
    if steps(&sizes) > effort.exact_steps {
        return false;
    }
    // Ways to take so many devices, class by class.
    let mut ways: Vec<u64> = vec![1];
    for size in sizes {
        let mut next = vec![0; ways.len() + size];
        for (taken, count) in ways.iter().enumerate() {
            (0..=size).for_each(|more| next[taken + more] += count);
        }
        ways = next;
    }
    let work =
        ways.iter().enumerate().skip(1).map(|(taken, count)| count.saturating_mul(evaluator.work(taken)));
    work.fold(0, u64::saturating_add) <= effort.layout_steps
}

impl States {
    /// Evaluates every state, in parallel.
    pub(crate) fn new(evaluator: &Evaluator<'_>, watch: &dyn Watch) -> Result<Self, Stopped> {
        let sizes: Vec<u32> = evaluator.inst().classes.iter().map(|class| class.len() as u32).collect();
        let mut strides = Vec::with_capacity(sizes.len());
        let mut total = 1;
        for size in &sizes {
            strides.push(total);
            total *= size + 1;
        }
        let mut states = Self { sizes, strides, options: Vec::new() };
        let mut options: Vec<Arc<[GroupOption]>> = Vec::with_capacity(total as usize);
        while options.len() < total as usize {
            show(watch, Work::Groups, (options.len(), total as usize))?;
            let from = options.len() as u32;
            let chunk = (from..total.min(from + ABREAST as u32)).into_par_iter().with_min_len(8);
            let of = |state| {
                if state == 0 { Arc::from([]) } else { evaluator.options(&states.classes(state)) }
            };
            options.par_extend(chunk.map(of));
        }
        states.options = options;
        Ok(states)
    }

    /// All devices.
    pub(crate) fn full(&self) -> u32 {
        self.options.len() as u32 - 1
    }

    pub(crate) fn n_classes(&self) -> usize {
        self.sizes.len()
    }

    pub(crate) fn digit(&self, state: u32, class: usize) -> u32 {
        state / self.strides[class] % (self.sizes[class] + 1)
    }

    pub(crate) fn stride(&self, class: usize) -> u32 {
        self.strides[class]
    }

    /// The first class of which a state has a device.
    pub(crate) fn first_class(&self, state: u32) -> Option<usize> {
        (0..self.sizes.len()).find(|&class| self.digit(state, class) > 0)
    }

    /// Devices in a state.
    pub(crate) fn count(&self, state: u32) -> u32 {
        (0..self.sizes.len()).map(|class| self.digit(state, class)).sum()
    }

    /// The classes of a state's devices, rising.
    pub(crate) fn classes(&self, state: u32) -> Vec<u16> {
        (0..self.sizes.len()).flat_map(|c| (0..self.digit(state, c)).map(move |_| c as u16)).collect()
    }

    /// Calls `visit` with every part of `state` that has at least one device of its first class.
    pub(crate) fn parts(&self, state: u32, visit: &mut dyn FnMut(u32)) {
        let Some(first) = self.first_class(state) else { return };
        let digits: Vec<u32> = (0..self.sizes.len()).map(|class| self.digit(state, class)).collect();
        let mut part = vec![0; digits.len()];
        part[first] = 1;
        let mut index = self.strides[first];
        loop {
            visit(index);
            // Counts on, from the first class.
            let mut class = first;
            loop {
                if class == digits.len() {
                    return;
                }
                if part[class] < digits[class] {
                    part[class] += 1;
                    index += self.strides[class];
                    break;
                }
                let least = u32::from(class == first);
                index -= self.strides[class] * (part[class] - least);
                part[class] = least;
                class += 1;
            }
        }
    }

    /// A group of a state's devices in one of its options.
    pub(crate) fn group(&self, state: u32, option: u8) -> DraftGroup {
        let option = self.options[state as usize][usize::from(option)];
        DraftGroup { classes: self.classes(state).into(), option }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_subsets_with_the_first_class() {
        let states =
            States { sizes: vec![2, 1, 3], strides: vec![1, 3, 6], options: vec![Arc::from([]); 24] };
        let mut parts = Vec::new();
        // One of class 0, one of class 1, two of class 2.
        let state = 1 + 3 + 12;
        states.parts(state, &mut |part| parts.push(part));
        parts.sort_unstable();
        assert_eq!(parts, [1, 4, 7, 10, 13, 16]);
        assert_eq!(states.classes(state), [0, 1, 2, 2]);
        assert_eq!(states.count(state), 4);
        let mut none = 0;
        states.parts(0, &mut |_| none += 1);
        assert_eq!(none, 0);
    }

    #[test]
    fn like_devices_make_an_exact_search_small() {
        assert!(steps(&[1; 14]) <= 2_500_000);
        assert!(steps(&[1; 15]) > 2_500_000);
        assert!(steps(&[8, 8, 8]) < 100_000);
    }
}
