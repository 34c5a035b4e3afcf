//! Every plan there is, one by one: for objectives that depend on more than rates.

use super::states::States;

/// A group in an option: state and option.
pub(crate) type Choice = (u32, u8);

/// Many plans in one vector.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    choices: Vec<Choice>,
    ends: Vec<u32>,
}

impl Plans {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, index: usize) -> &[Choice] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.choices[start as usize..self.ends[index] as usize]
    }

    fn push(&mut self, plan: &[Choice]) {
        self.choices.extend_from_slice(plan);
        self.ends.push(self.choices.len() as u32);
    }
}

/// Which choices a listing makes for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listing {
    /// Every option of every group.
    Options,
    /// The grouping alone: option 0 stands for any.
    Groupings,
}

/// All plans with at least one group, or none if there are more than `limit`. A plan's groups come in falling order,
/// so that each is listed once; devices that are left over are idle.
pub(crate) fn all(states: &States, listing: Listing, limit: usize) -> Option<Plans> {
    let mut plans = Plans::default();
    let mut usable: Vec<u32> =
        (1..states.options.len() as u32).filter(|&s| !states.options[s as usize].is_empty()).collect();
    usable.reverse();
    let mut search = Search { states, listing, limit, usable, plans: &mut plans, plan: Vec::new() };
    search.extend(states.full(), 0).then_some(plans)
}

struct Search<'a> {
    states: &'a States,
    listing: Listing,
    limit: usize,
    /// Groups that can hold the model, falling.
    usable: Vec<u32>,
    plans: &'a mut Plans,
    plan: Vec<Choice>,
}

impl Search<'_> {
    /// Adds every plan that goes on with groups from `usable[from..]` on the devices left; false if the limit is met.
    fn extend(&mut self, left: u32, from: usize) -> bool {
        for index in from..self.usable.len() {
            let group = self.usable[index];
            let Some(rest) = self.minus(left, group) else { continue };
            let options = match self.listing {
                Listing::Options => self.states.options[group as usize].len() as u8,
                Listing::Groupings => 1,
            };
            for option in 0..options {
                // Two groups alike: their options do not rise either.
                if self.plan.last().is_some_and(|last| last.0 == group && last.1 < option) {
                    break;
                }
                if self.plans.len() >= self.limit {
                    return false;
                }
                self.plan.push((group, option));
                self.plans.push(&self.plan);
                let more = self.extend(rest, index);
                self.plan.pop();
                if !more {
                    return false;
                }
            }
        }
        true
    }

    /// `left` without `group`, if it is part of it.
    fn minus(&self, left: u32, group: u32) -> Option<u32> {
        let n = self.states.n_classes();
        (0..n).all(|c| self.states.digit(group, c) <= self.states.digit(left, c)).then(|| left - group)
    }
}
