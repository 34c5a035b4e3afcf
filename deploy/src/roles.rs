//! The desired plan with other roles. Pure.

use cluster::{Plan, Role};

use crate::deployment::{Goal, Seen};

/// The suffix of the objective of a plan whose roles were changed.
const ADAPTED: &str = " with other roles";

/// The desired plan, with these roles for replicas that are there; none if one of them is none of the plan's.
pub fn with_roles(goal: &Goal, seen: &[Seen], roles: &[(usize, Role)]) -> Option<Plan> {
    let mut plan = goal.plan.clone();
    let mut taken = Vec::new();
    for (number, role) in roles {
        let one = &seen.iter().find(|seen| seen.observed.number == *number)?.observed;
        let is_it = |place: &usize| {
            let wanted = &goal.replicas[*place];
            !taken.contains(place) && wanted.chain == one.chain && wanted.role == one.role
        };
        let place = (0..goal.replicas.len()).find(is_it)?;
        taken.push(place);
        plan.replicas.get_mut(place)?.role = *role;
    }
    plan.objective = format!("{}{ADAPTED}", plan.objective.trim_end_matches(ADAPTED));
    Some(plan)
}

#[cfg(test)]
mod tests {
    use registry::PlanOrigin;

    use super::*;
    use crate::chain::Chain;
    use crate::difference::{Health, Leaving, Observed, Wanted};
    use crate::testing::plan_file;

    #[test]
    fn a_replicas_role_is_changed_where_the_plan_has_it() {
        let replica = |node: &str, role: &str| {
            format!(
                r#"{{"role": "{role}", "slots": 4, "limit": "memory",
                     "stages": [{{"device": "{node}", "start": 0, "end": 30, "gpu_blocks": 0}}]}}"#
            )
        };
        let all = [replica("a", "prefill"), replica("b", "prefill"), replica("c", "decode")];
        let plan = plan_file(&format!("[{}]", all.join(","))).plan().unwrap();
        let wanted = |one: &cluster::ReplicaPlan| Wanted { chain: Chain::of(one), role: one.role };
        let replicas: Vec<Wanted> = plan.replicas.iter().map(wanted).collect();
        // They were started in another order, as numbers 7, 8 and 9.
        let seen: Vec<Seen> = [(7, 2), (8, 0), (9, 1)]
            .map(|(number, place): (usize, usize)| {
                let Wanted { chain, role } = replicas[place].clone();
                let (health, leaving) = (Health::Serving, Leaving::No);
                Seen {
                    observed: Observed { number, chain, role, health, leaving, decision: 1 },
                    reason: None,
                }
            })
            .to_vec();
        let goal = Goal { plan, replicas, id: 1, origin: PlanOrigin::Given, decision: 1 };
        let roles = |changed: &[(usize, Role)]| -> Option<Vec<Role>> {
            Some(with_roles(&goal, &seen, changed)?.replicas.iter().map(|one| one.role).collect())
        };
        assert_eq!(roles(&[(9, Role::Decode)]), Some(vec![Role::Prefill, Role::Decode, Role::Decode]));
        let both = [(8, Role::Mixed), (7, Role::Prefill)];
        assert_eq!(roles(&both), Some(vec![Role::Mixed, Role::Prefill, Role::Prefill]));
        assert_eq!(roles(&[(3, Role::Decode)]), None);
        let twice = with_roles(&goal, &seen, &both).unwrap();
        assert_eq!(twice.objective, "by hand with other roles");
        let goal = Goal { plan: twice, ..goal.clone() };
        assert_eq!(with_roles(&goal, &seen, &[]).unwrap().objective, "by hand with other roles");
    }
}
