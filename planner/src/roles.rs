//! Which of a grouping's replicas prefill, decode or do both.
//!
//! Objectives on rates: replicas are added one by one and only plans whose pair of rates nothing reaches are kept, which
//! is as good as trying every assignment; with many replicas the kept plans are thinned out, which bounds the search.
//! Splitwise has its own rule.

use cluster::Role;

use crate::evaluate::GroupOption;
use crate::instance::Work;
use crate::objective::{Objective, Rates, Score, Splitwise, WORST, better, prefill_replicas};
use crate::settings::ObjectiveKind;

/// Plans kept on the way: with up to six replicas nothing is ever thinned out.
const KEPT: usize = 96;

/// An assignment: for each group the number of its option, or none where it is idle.
pub(crate) type Assignment = Vec<Option<u8>>;

/// The best assignment for groups with these options, and its score.
pub(crate) fn assign(
    kind: ObjectiveKind,
    objective: &dyn Objective,
    work: &Work,
    groups: &[&[GroupOption]],
) -> (Assignment, Score) {
    match kind {
        ObjectiveKind::Splitwise => by_strength(work, groups),
        _ => by_rates(objective, work, groups),
    }
}

#[derive(Debug, Clone, Copy)]
struct Step {
    rates: Rates,
    option: Option<u8>,
    from: u32,
}

fn by_rates(objective: &dyn Objective, work: &Work, groups: &[&[GroupOption]]) -> (Assignment, Score) {
    let mut layers: Vec<Vec<Step>> = vec![vec![Step { rates: Rates::default(), option: None, from: 0 }]];
    for options in groups {
        let before = &layers[layers.len() - 1];
        let mut next: Vec<Step> = Vec::with_capacity(before.len() * (options.len() + 1));
        for (from, step) in (0..).zip(before) {
            // No use is never better than some use, so an idle group is one without options.
            if options.is_empty() {
                next.push(Step { option: None, from, ..*step });
            }
            for (option, of) in options.iter().enumerate() {
                let slots = if of.role == Role::Prefill { 0.0 } else { f64::from(of.slots) };
                let rates = Rates {
                    ps: step.rates.ps + of.ps,
                    ds: step.rates.ds + of.ds,
                    slots: step.rates.slots + slots,
                };
                next.push(Step { rates, option: Some(option as u8), from });
            }
        }
        layers.push(thinned(undominated(next)));
    }
    let last = &layers[layers.len() - 1];
    let mut best = (0, WORST);
    for (at, step) in last.iter().enumerate() {
        let score = objective.score(work, step.rates);
        if better(&score, &best.1) {
            best = (at, score);
        }
    }
    let mut at = best.0;
    let mut assignment: Assignment = layers[1..]
        .iter()
        .rev()
        .map(|layer| {
            let step = layer[at];
            at = step.from as usize;
            step.option
        })
        .collect();
    assignment.reverse();
    (assignment, best.1)
}

/// Without those that have less of both rates than another, by falling ΣPS.
fn undominated(mut steps: Vec<Step>) -> Vec<Step> {
    steps.sort_by(|a, b| b.rates.ps.total_cmp(&a.rates.ps).then(b.rates.ds.total_cmp(&a.rates.ds)));
    let mut most = f64::NEG_INFINITY;
    steps.retain(|step| {
        let keep = step.rates.ds > most;
        most = most.max(step.rates.ds);
        keep
    });
    steps
}

/// Every so manieth, the ends always.
fn thinned(steps: Vec<Step>) -> Vec<Step> {
    if steps.len() <= KEPT {
        return steps;
    }
    let last = steps.len() - 1;
    (0..KEPT).map(|i| steps[i * last / (KEPT - 1)]).collect()
}

/// The strongest prefill, as many as the ratio of tokens says.
fn by_strength(work: &Work, groups: &[&[GroupOption]]) -> (Assignment, Score) {
    let option = |group: usize, role| {
        let of_role = groups[group].iter().enumerate().filter(|(_, o)| o.role == role);
        of_role.fold(None, |best: Option<(usize, GroupOption)>, (at, o)| match best {
            Some((_, b)) if b.ps + b.ds >= o.ps + o.ds => best,
            _ => Some((at, *o)),
        })
    };
    let mut by_speed: Vec<(usize, f64)> = (0..groups.len())
        .filter_map(|g| {
            let prefill = option(g, Role::Prefill)?;
            option(g, Role::Decode).map(|_| (g, prefill.1.ps))
        })
        .collect();
    by_speed.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut assignment = vec![None; groups.len()];
    let mut rates = Rates::default();
    let n_prefill = prefill_replicas(work, by_speed.len());
    for (place, &(group, _)) in by_speed.iter().enumerate() {
        let role = if place < n_prefill { Role::Prefill } else { Role::Decode };
        if let Some((at, option)) = option(group, role) {
            assignment[group] = Some(at as u8);
            rates.ps += option.ps;
            rates.ds += option.ds;
        }
    }
    (assignment, Splitwise.score(work, rates))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::{Els, Ft};
    use crate::rng::Rng;
    use crate::settings::SlotRule;

    fn random_groups(rng: &mut Rng, n: usize) -> Vec<Vec<GroupOption>> {
        let option = |role, ps, ds| GroupOption { role, rule: SlotRule::MostTokens, slots: 4, ps, ds };
        (0..n)
            .map(|_| {
                let (ps, ds) = (rng.between(50.0, 2000.0), rng.between(5.0, 100.0));
                vec![
                    option(Role::Prefill, ps, 0.0),
                    option(Role::Decode, 0.0, ds),
                    option(Role::Mixed, ps / 3.0, ds / 3.0),
                ]
            })
            .collect()
    }

    #[test]
    fn the_assignment_is_the_best_of_all() {
        let mut rng = Rng::new(9);
        for round in 0..100 {
            let groups = random_groups(&mut rng, 1 + round % 6);
            let slices: Vec<&[GroupOption]> = groups.iter().map(Vec::as_slice).collect();
            let work = Work {
                prompt: 600.0,
                output: 700.0,
                interval: rng.between(0.1, 5.0),
                requests: 100.0,
                max_tpot: 0.2,
                max_slots: 32,
            };
            for objective in [&Els as &dyn Objective, &Ft] {
                let found = by_rates(objective, &work, &slices).1;
                let mut best = WORST;
                for mut code in 0..3_usize.pow(groups.len() as u32) {
                    let mut rates = Rates::default();
                    for group in &groups {
                        rates.ps += group[code % 3].ps;
                        rates.ds += group[code % 3].ds;
                        code /= 3;
                    }
                    let score = objective.score(&work, rates);
                    if better(&score, &best) {
                        best = score;
                    }
                }
                assert!(
                    (found[0] - best[0]).abs() <= 1e-9 * best[0].max(1.0) || found == best,
                    "{found:?} {best:?}"
                );
            }
        }
    }
}
