//! Local search on a grouping: moves one device, swaps two, splits or joins groups, as long as that helps.
//!
//! A move changes two groups at most. All other groups keep their roles meanwhile, so a move is judged by the sums of
//! the others' rates and the options of the two: no search over roles. Roles are assigned anew after each round.

use std::sync::Arc;

use cluster::Role;

use super::genetic::Context;
use crate::evaluate::GroupOption;
use crate::objective::{Rates, Score, WORST, better};
use crate::rng::Rng;

/// A grouping under improvement. Groups without options are idle.
pub(crate) struct Local<'c, 'a> {
    context: &'c Context<'a>,
    pub groups: Vec<Vec<u16>>,
    options: Vec<Arc<[GroupOption]>>,
    chosen: Vec<Option<u8>>,
    pub score: Score,
}

/// A change of two groups to two others, either of which may be empty.
struct Move {
    groups: [usize; 2],
    become_: [Vec<u16>; 2],
}

impl<'c, 'a> Local<'c, 'a> {
    pub(crate) fn new(context: &'c Context<'a>, groups: Vec<Vec<u16>>) -> Self {
        let mut local = Self { context, groups, options: Vec::new(), chosen: Vec::new(), score: WORST };
        local.assign();
        local
    }

    fn assign(&mut self) {
        self.groups.retain(|group| !group.is_empty());
        self.options = self.groups.iter().map(|group| self.context.options(group)).collect();
        let (chosen, score) = self.context.assign(&self.options);
        self.chosen = chosen;
        self.score = score;
    }

    /// Improves until nothing helps or `tries` moves have been looked at; returns how many were.
    pub(crate) fn improve(&mut self, rng: &mut Rng, tries: usize) -> usize {
        let mut looked = 0;
        loop {
            let before = self.score;
            let mut moves = self.moves(rng, tries.saturating_sub(looked));
            rng.shuffle(&mut moves);
            for (a, b, kind) in moves {
                if looked >= tries {
                    break;
                }
                looked += 1;
                if let Some(change) = self.make(a, b, kind) {
                    self.try_move(change);
                }
            }
            self.assign();
            if looked >= tries || !better(&self.score, &before) {
                return looked;
            }
        }
    }

    /// Moves worth a look, as device, other device and kind: all of them where there are few, else a sample.
    fn moves(&self, rng: &mut Rng, at_most: usize) -> Vec<(u16, u16, Kind)> {
        let n: usize = self.groups.iter().map(Vec::len).sum();
        let pairs = n * n * Kind::ALL.len();
        if pairs <= at_most {
            let all = (0..n as u16).flat_map(|a| (0..n as u16).map(move |b| (a, b)));
            return all.flat_map(|(a, b)| Kind::ALL.map(|kind| (a, b, kind))).collect();
        }
        let draw = |rng: &mut Rng| {
            let (a, b) = (rng.below(n) as u16, rng.below(n) as u16);
            (a, b, Kind::ALL[rng.below(Kind::ALL.len())])
        };
        (0..at_most).map(|_| draw(rng)).collect()
    }

    fn group_of(&self, device: u16) -> Option<usize> {
        self.groups.iter().position(|group| group.contains(&device))
    }

    /// The change that a move stands for, if it is one.
    fn make(&self, a: u16, b: u16, kind: Kind) -> Option<Move> {
        let (ga, gb) = (self.group_of(a)?, self.group_of(b)?);
        let without = |group: usize, device: u16| -> Vec<u16> {
            self.groups[group].iter().copied().filter(|&d| d != device).collect()
        };
        let with = |mut group: Vec<u16>, device: u16| {
            group.push(device);
            group.sort_unstable();
            group
        };
        match kind {
            Kind::Swap if ga < gb && self.context.differ(a, b) => {
                Some(Move { groups: [ga, gb], become_: [with(without(ga, a), b), with(without(gb, b), a)] })
            }
            Kind::Relocate if ga != gb => {
                Some(Move { groups: [ga, gb], become_: [without(ga, a), with(self.groups[gb].clone(), a)] })
            }
            Kind::Join if ga < gb && a == self.groups[ga][0] && b == self.groups[gb][0] => {
                let mut joined = [self.groups[ga].as_slice(), &self.groups[gb]].concat();
                joined.sort_unstable();
                Some(Move { groups: [ga, gb], become_: [joined, Vec::new()] })
            }
            // Everything up to device `b` in the group's order goes.
            Kind::Split if ga == gb && a == self.groups[ga][0] && self.groups[ga].len() > 1 => {
                let at = self.groups[ga].iter().position(|&d| d == b)?;
                let (left, right) = self.groups[ga].split_at((at + 1).min(self.groups[ga].len() - 1));
                Some(Move { groups: [ga, usize::MAX], become_: [left.to_vec(), right.to_vec()] })
            }
            Kind::Eject if ga == gb && a == b && self.groups[ga].len() > 1 => {
                Some(Move { groups: [ga, usize::MAX], become_: [without(ga, a), vec![a]] })
            }
            _ => None,
        }
    }

    /// Carries a move out if it helps.
    fn try_move(&mut self, change: Move) {
        let options = change.become_.each_ref().map(|group| self.context.options(group));
        let others = self.rates_without(change.groups);
        let mut best = (self.score, None);
        for a in choices(&options[0]) {
            for b in choices(&options[1]) {
                let rates = add(add(others, option(&options[0], a)), option(&options[1], b));
                let score = self.context.score(rates);
                if better(&score, &best.0) {
                    best = (score, Some([a, b]));
                }
            }
        }
        let (score, Some(chosen)) = best else { return };
        self.score = score;
        for ((group, become_), (options, chosen)) in
            change.groups.into_iter().zip(change.become_).zip(options.into_iter().zip(chosen))
        {
            if group == usize::MAX {
                self.groups.push(become_);
                self.options.push(options);
                self.chosen.push(chosen);
            } else {
                self.groups[group] = become_;
                self.options[group] = options;
                self.chosen[group] = chosen;
            }
        }
    }

    fn rates_without(&self, groups: [usize; 2]) -> Rates {
        let others = (0..self.groups.len()).filter(|g| !groups.contains(g));
        others.fold(Rates::default(), |rates, g| add(rates, option(&self.options[g], self.chosen[g])))
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Swap,
    Relocate,
    Join,
    Split,
    Eject,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Swap, Self::Relocate, Self::Join, Self::Split, Self::Eject];
}

fn choices(options: &[GroupOption]) -> impl Iterator<Item = Option<u8>> + use<> {
    let n = options.len() as u8;
    std::iter::once(None).chain((0..n).map(Some))
}

fn option(options: &[GroupOption], chosen: Option<u8>) -> Option<&GroupOption> {
    chosen.and_then(|c| options.get(usize::from(c)))
}

fn add(rates: Rates, option: Option<&GroupOption>) -> Rates {
    match option {
        None => rates,
        Some(of) => Rates {
            ps: rates.ps + of.ps,
            ds: rates.ds + of.ds,
            slots: rates.slots + if of.role == Role::Prefill { 0.0 } else { f64::from(of.slots) },
        },
    }
}
