//! What it takes to get from what runs to another plan: what has to be loaded where, and who has to go for it first. Pure.

use std::collections::BTreeSet;

use cluster::{Bytes, ModelShape};

use crate::deployment::{Goal, Seen};
use crate::difference::{Act, Memory, Step, Wait};

/// What it takes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReloadNeeds {
    /// Weights that each node has to load.
    pub loads: Memory,
    /// Slots of the replicas that have to stop before, because their memory is needed.
    pub stopped_slots: u32,
    /// Slots of all that are there.
    pub slots: u32,
}

impl ReloadNeeds {
    pub(crate) fn of(steps: &[Step], goal: &Goal, seen: &[Seen], model: &ModelShape) -> Self {
        let slots = |one: &Seen| one.observed.chain.slots;
        let mut needs = Self { slots: seen.iter().map(slots).sum(), ..Self::default() };
        let mut stopped = BTreeSet::new();
        for step in steps {
            let Act::Start(place) = step.act else { continue };
            if let Wait::Stopped(replicas) = &step.wait {
                stopped.extend(replicas.iter().copied());
            }
            for stage in goal.replicas.get(place).iter().flat_map(|wanted| &wanted.chain.stages) {
                *needs.loads.entry(stage.node.clone()).or_insert(Bytes::ZERO) +=
                    model.slice_bytes(stage.layers);
            }
        }
        let has_to_go = |one: &&Seen| stopped.contains(&one.observed.number);
        needs.stopped_slots = seen.iter().filter(has_to_go).map(slots).sum();
        needs
    }

    /// The most that one node has to load.
    pub fn most(&self) -> Bytes {
        self.loads.values().copied().max().unwrap_or(Bytes::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use cluster::{NodeId, Role};
    use registry::PlanOrigin;

    use super::*;
    use crate::chain::Chain;
    use crate::difference::{Health, Leaving, Observed, Wanted};
    use crate::testing::{model, plan_file};

    #[test]
    fn what_starts_is_loaded_and_who_makes_room_is_away() {
        let stages = r#"{"device": "a", "start": 0, "end": 20, "gpu_blocks": 0},
                        {"device": "b", "start": 20, "end": 30, "gpu_blocks": 0}"#;
        let plan = plan_file(&format!(
            r#"[{{"role": "mixed", "slots": 4, "limit": "memory", "stages": [{stages}]}}]"#
        ));
        let plan = plan.plan().unwrap();
        let chain = Chain::of(&plan.replicas[0]);
        let replicas = vec![Wanted { chain: chain.clone(), role: Role::Mixed }];
        let goal = Goal { plan, replicas, id: 0, origin: PlanOrigin::Adapted, decision: 1 };
        let seen = [(3, 4), (5, 12)].map(|(number, slots)| {
            let chain = Chain { slots, ..chain.clone() };
            let (role, health, leaving) = (Role::Mixed, Health::Serving, Leaving::No);
            Seen { observed: Observed { number, chain, role, health, leaving, decision: 1 }, reason: None }
        });
        let start = |wait| [Step { act: Act::Start(0), wait }];
        let shape = model(30);
        let needs = |steps: &[Step]| ReloadNeeds::of(steps, &goal, &seen, &shape);
        let blocked = needs(&start(Wait::Stopped(vec![3])));
        assert_eq!((blocked.stopped_slots, blocked.slots), (4, 16));
        assert_eq!(blocked.loads[&NodeId("a".into())], Bytes::from_mib(40));
        assert_eq!(blocked.loads[&NodeId("b".into())], Bytes::from_mib(50));
        assert_eq!(blocked.most(), Bytes::from_mib(50));
        assert_eq!(needs(&start(Wait::Nothing)).stopped_slots, 0);
        assert_eq!(needs(&[]), ReloadNeeds { slots: 16, ..ReloadNeeds::default() });
    }
}
