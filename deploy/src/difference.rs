//! From what runs to what is desired: which steps there are, and for what each has to wait. Pure; it is asked anew whenever
//! anything has changed, so a step that failed, a node that left or another plan needs no case of its own.
//!
//! What can be relied on, each with a property test below:
//! - A replica whose [chain](Chain) the plan keeps is left alone. That its role is another is told to the router only.
//! - An old replica is drained when all that the plan asks for serves, or when its memory is needed by a replica that else has no
//!   room, or when it does not serve anyway. So where there is room for both, as many serve as before.
//! - Where there is not, replicas are replaced one after the other.
//! - What is drained is stopped when it generates nothing any more.

use std::collections::BTreeMap;

use cluster::{Bytes, NodeId, Role};

use crate::chain::Chain;

/// A replica that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// What it is.
    pub chain: Chain,
    /// For what it is used.
    pub role: Role,
}

/// A replica that is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Observed {
    /// By which it is known.
    pub number: usize,
    /// What it is.
    pub chain: Chain,
    /// For what it is used.
    pub role: Role,
    /// How it is.
    pub health: Health,
    /// Whether it is to go.
    pub leaving: Leaving,
    /// The decision it was started for.
    pub decision: u64,
}

/// How a replica is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Its stages are being started or loaded, for the first time.
    Loading,
    /// It answers.
    Serving,
    /// It does not, and its agent does what it can.
    Down,
    /// It does not, and its agent has given it up.
    GivenUp,
}

/// How far a replica is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// It stays.
    No,
    /// It gets no more requests.
    Draining,
    /// And it generates nothing any more.
    Drained,
}

/// Memory by node: what is free, of those that are there; or what a replica takes.
pub type Memory = BTreeMap<NodeId, Bytes>;

/// Something to be done.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// What.
    pub act: Act,
    /// For what it has to wait.
    pub wait: Wait,
}

/// What can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Start the replica at this place of the plan.
    Start(usize),
    /// Tell the router that a replica has this role.
    SetRole(usize, Role),
    /// Let a replica stay that was on its way out.
    Resume(usize),
    /// Send a replica no more requests.
    Drain(usize),
    /// Stop a replica.
    Stop(usize),
}

/// For what a step waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait {
    /// It can be done now.
    Nothing,
    /// For nodes to be there.
    Nodes(Vec<NodeId>),
    /// For the replicas at these places of the plan to serve.
    Serving(Vec<usize>),
    /// For these replicas to be stopped, whose memory is needed.
    Stopped(Vec<usize>),
    /// For a replica to generate nothing any more.
    Vacant,
}

/// What is desired, and the number of the decision for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Desired<'a> {
    /// The replicas, in the plan's order.
    pub(crate) replicas: &'a [Wanted],
    /// A later one gives replicas that were given up another chance.
    pub(crate) decision: u64,
}

/// All steps from what is observed to what is desired. `free` is the nodes' memory beside all that is there, what still loads
/// included; `needs` what a chain takes.
pub(crate) fn difference(
    desired: Desired<'_>,
    observed: &[Observed],
    free: &Memory,
    needs: &dyn Fn(&Chain) -> Memory,
) -> Vec<Step> {
    let matched = Matched::new(desired, observed);
    let mut steps = matched.kept();
    let (starts, victims) = matched.starts(free, needs);
    steps.extend(starts);
    steps.extend(matched.ends(&victims));
    steps
}

/// Which replica is which of the plan's.
struct Matched<'a> {
    wanted: &'a [Wanted],
    /// For each that is wanted, the one that is there.
    by: Vec<Option<&'a Observed>>,
    leaving: Vec<&'a Observed>,
}

impl<'a> Matched<'a> {
    fn new(desired: Desired<'a>, observed: &'a [Observed]) -> Self {
        let mut left: Vec<&Observed> = observed.iter().collect();
        let mut by = Vec::new();
        for wanted in desired.replicas {
            let is_same = |one: &&&Observed| {
                let had_its_chance = one.health == Health::GivenUp && one.decision < desired.decision;
                one.chain == wanted.chain && one.leaving != Leaving::Drained && !had_its_chance
            };
            let best = left.iter().filter(is_same).min_by_key(|one| preference(one, wanted)).copied();
            left.retain(|one| best.is_none_or(|best| one.number != best.number));
            by.push(best);
        }
        Self { wanted: desired.replicas, by, leaving: left }
    }

    /// What changes about those that stay.
    fn kept(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (wanted, one) in self.wanted.iter().zip(&self.by) {
            let Some(one) = one else { continue };
            if one.leaving != Leaving::No {
                steps.push(Step { act: Act::Resume(one.number), wait: Wait::Nothing });
            }
            if one.role != wanted.role {
                steps.push(Step { act: Act::SetRole(one.number, wanted.role), wait: Wait::Nothing });
            }
        }
        steps
    }

    /// What is to be started, and who has to go for it first.
    fn starts(&self, free: &Memory, needs: &dyn Fn(&Chain) -> Memory) -> (Vec<Step>, Vec<usize>) {
        let mut free = free.clone();
        let loading = self.places(|one| one.is_some_and(|one| one.health == Health::Loading));
        let (mut steps, mut victims, mut is_blocked) = (Vec::new(), Vec::new(), false);
        for place in self.places(|one| one.is_none()) {
            let needed = needs(&self.wanted[place].chain);
            let away: Vec<NodeId> = needed.keys().filter(|node| !free.contains_key(node)).cloned().collect();
            let short = short_of(&needed, &free);
            let wait = if !away.is_empty() {
                Wait::Nodes(away)
            } else if short.is_empty() {
                take(&mut free, &needed);
                Wait::Nothing
            } else if !loading.is_empty() {
                // They may be what takes the memory, or what replaces somebody who goes then.
                Wait::Serving(loading.clone())
            } else if is_blocked {
                Wait::Stopped(victims.clone())
            } else {
                is_blocked = true;
                victims = self.victims(&short, needs);
                // If nobody can make room, the node may have more than it seems; else it says what is missing.
                if victims.is_empty() { Wait::Nothing } else { Wait::Stopped(victims.clone()) }
            };
            steps.push(Step { act: Act::Start(place), wait });
        }
        (steps, victims)
    }

    /// Of those that leave, who makes room: first whoever serves nobody.
    fn victims(&self, short: &Memory, needs: &dyn Fn(&Chain) -> Memory) -> Vec<usize> {
        let mut candidates = self.leaving.clone();
        candidates.sort_by_key(|one| (serves(one), one.number));
        let (mut short, mut victims) = (short.clone(), Vec::new());
        for one in candidates {
            let freed = needs(&one.chain);
            if short.keys().any(|node| freed.contains_key(node)) {
                victims.push(one.number);
                short = short_of(&short, &freed);
            }
            if short.is_empty() {
                break;
            }
        }
        victims
    }

    /// How those go that are not wanted any more.
    fn ends(&self, victims: &[usize]) -> Vec<Step> {
        let missing = self.places(|one| one.is_none_or(|one| one.health != Health::Serving));
        let mut steps = Vec::new();
        for one in &self.leaving {
            let number = one.number;
            match one.leaving {
                Leaving::Drained => steps.push(Step { act: Act::Stop(number), wait: Wait::Nothing }),
                Leaving::Draining => steps.push(Step { act: Act::Stop(number), wait: Wait::Vacant }),
                Leaving::No => {
                    let may_go = missing.is_empty() || !serves(one) || victims.contains(&number);
                    let wait = if may_go { Wait::Nothing } else { Wait::Serving(missing.clone()) };
                    steps.push(Step { act: Act::Drain(number), wait });
                    steps.push(Step { act: Act::Stop(number), wait: Wait::Vacant });
                }
            }
        }
        steps
    }

    fn places(&self, is: impl Fn(Option<&Observed>) -> bool) -> Vec<usize> {
        let all = self.by.iter().enumerate();
        all.filter(|(_, one)| is(one.as_deref())).map(|(place, _)| place).collect()
    }
}

/// Lower is better: who stays anyway, serves, and has the role.
fn preference(one: &Observed, wanted: &Wanted) -> (bool, u8, bool, usize) {
    let health = match one.health {
        Health::Serving => 0,
        Health::Loading => 1,
        Health::Down => 2,
        Health::GivenUp => 3,
    };
    (one.leaving != Leaving::No, health, one.role != wanted.role, one.number)
}

fn serves(one: &Observed) -> bool {
    one.health == Health::Serving
}

/// By how much each node has too little.
fn short_of(needed: &Memory, free: &Memory) -> Memory {
    let short = needed.iter().map(|(node, needed)| {
        let free = free.get(node).copied().unwrap_or(Bytes::ZERO);
        (node.clone(), Bytes(needed.0.saturating_sub(free.0)))
    });
    short.filter(|(_, short)| *short > Bytes::ZERO).collect()
}

fn take(free: &mut Memory, needed: &Memory) {
    for (node, needed) in needed {
        if let Some(free) = free.get_mut(node) {
            *free = Bytes(free.0.saturating_sub(needed.0));
        }
    }
}

#[cfg(test)]
mod tests;
