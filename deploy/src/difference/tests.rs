//! Single differences, and whole ways from anything to anything in a cluster that does what the steps say.

use cluster::LayerRange;
use proptest::prelude::*;

use super::*;
use crate::chain::Place;

const LAYERS: u32 = 12;

/// A chain over nodes, cut evenly.
fn chain(nodes: &[u8], slots: u32) -> Chain {
    let each = LAYERS / nodes.len() as u32;
    let place = |(i, node): (u32, &u8)| Place {
        node: NodeId(format!("n{node}")),
        gpu: None,
        layers: LayerRange::new(i * each, if i + 1 == nodes.len() as u32 { LAYERS } else { (i + 1) * each })
            .unwrap(),
        gpu_blocks: 0,
    };
    Chain { stages: (0..).zip(nodes).map(place).collect(), slots }
}

fn wanted(nodes: &[u8], slots: u32) -> Wanted {
    Wanted { chain: chain(nodes, slots), role: Role::Mixed }
}

fn observed(number: usize, nodes: &[u8], slots: u32) -> Observed {
    Observed {
        number,
        chain: chain(nodes, slots),
        role: Role::Mixed,
        health: Health::Serving,
        leaving: Leaving::No,
        decision: 1,
    }
}

/// A byte for each block and each slot of a stage.
fn needs(chain: &Chain) -> Memory {
    let mut needs = Memory::new();
    for place in &chain.stages {
        *needs.entry(place.node.clone()).or_insert(Bytes::ZERO) +=
            Bytes(u64::from(place.layers.len()) + u64::from(chain.slots));
    }
    needs
}

fn room(bytes: u64) -> Memory {
    (0..6).map(|node| (NodeId(format!("n{node}")), Bytes(bytes))).collect()
}

fn steps(plan: &[Wanted], there: &[Observed], free: u64) -> Vec<(Act, Wait)> {
    let desired = Desired { replicas: plan, decision: 2 };
    difference(desired, there, &room(free), &needs).into_iter().map(|step| (step.act, step.wait)).collect()
}

#[test]
fn what_is_as_desired_is_left_alone_and_another_role_reloads_nothing() {
    let there = [observed(3, &[0, 1], 4), observed(5, &[2], 2)];
    assert_eq!(steps(&[wanted(&[2], 2), wanted(&[0, 1], 4)], &there, 0), []);
    let decode = Wanted { role: Role::Decode, ..wanted(&[2], 2) };
    assert_eq!(
        steps(&[decode, wanted(&[0, 1], 4)], &there, 0),
        [(Act::SetRole(5, Role::Decode), Wait::Nothing)]
    );
}

#[test]
fn other_slots_or_cuts_are_another_replica_which_serves_before_the_old_one_goes() {
    let there = [observed(0, &[0, 1], 4)];
    for plan in [wanted(&[0, 1], 5), wanted(&[1, 0], 4), wanted(&[0, 2], 4)] {
        assert_eq!(
            steps(&[plan], &there, 100),
            [
                (Act::Start(0), Wait::Nothing),
                (Act::Drain(0), Wait::Serving(vec![0])),
                (Act::Stop(0), Wait::Vacant),
            ]
        );
    }
}

#[test]
fn two_alike_are_two() {
    let there = [observed(0, &[0], 4)];
    assert_eq!(steps(&[wanted(&[0], 4), wanted(&[0], 4)], &there, 100), [(Act::Start(1), Wait::Nothing)]);
    let there = [observed(0, &[0], 4), observed(1, &[0], 4)];
    assert_eq!(
        steps(&[wanted(&[0], 4)], &there, 100),
        [(Act::Drain(1), Wait::Nothing), (Act::Stop(1), Wait::Vacant)]
    );
}

#[test]
fn without_room_for_both_the_old_one_goes_first_and_one_after_the_other() {
    let there = [observed(0, &[0], 4), observed(1, &[1], 4)];
    let plan = [wanted(&[0], 5), wanted(&[1], 5)];
    assert_eq!(
        steps(&plan, &there, 3),
        [
            (Act::Start(0), Wait::Stopped(vec![0])),
            (Act::Start(1), Wait::Stopped(vec![0])),
            (Act::Drain(0), Wait::Nothing),
            (Act::Stop(0), Wait::Vacant),
            (Act::Drain(1), Wait::Serving(vec![0, 1])),
            (Act::Stop(1), Wait::Vacant),
        ]
    );
    // The first one's replacement loads: the other goes on serving.
    let loading = Observed { health: Health::Loading, ..observed(2, &[0], 5) };
    assert_eq!(
        steps(&plan, &[there[1].clone(), loading], 3),
        [
            (Act::Start(1), Wait::Serving(vec![0])),
            (Act::Drain(1), Wait::Serving(vec![0, 1])),
            (Act::Stop(1), Wait::Vacant),
        ]
    );
}

#[test]
fn where_nobody_can_make_room_it_is_tried() {
    assert_eq!(steps(&[wanted(&[0], 5)], &[], 3), [(Act::Start(0), Wait::Nothing)]);
}

#[test]
fn a_replica_waits_for_its_nodes_and_the_old_one_serves_on() {
    let there = [observed(0, &[0], 4)];
    assert_eq!(
        steps(&[wanted(&[0, 9], 4)], &there, 100),
        [
            (Act::Start(0), Wait::Nodes(vec![NodeId("n9".into())])),
            (Act::Drain(0), Wait::Serving(vec![0])),
            (Act::Stop(0), Wait::Vacant),
        ]
    );
}

#[test]
fn one_on_its_way_out_is_kept_if_it_is_wanted_again() {
    let draining = Observed { leaving: Leaving::Draining, ..observed(0, &[0], 4) };
    assert_eq!(steps(&[wanted(&[0], 4)], &[draining], 0), [(Act::Resume(0), Wait::Nothing)]);
}

#[test]
fn one_that_was_given_up_is_started_again_by_the_next_decision() {
    let given_up = |decision| Observed { health: Health::GivenUp, decision, ..observed(0, &[0], 4) };
    assert_eq!(steps(&[wanted(&[0], 4)], &[given_up(2)], 100), []);
    assert_eq!(
        steps(&[wanted(&[0], 4)], &[given_up(1)], 100),
        [(Act::Start(0), Wait::Nothing), (Act::Drain(0), Wait::Nothing), (Act::Stop(0), Wait::Vacant),]
    );
}

/// A cluster in which all goes well.
struct Sandbox {
    there: Vec<Observed>,
    next: usize,
    size: u64,
}

impl Sandbox {
    fn free(&self) -> Memory {
        let mut free = room(self.size);
        for one in &self.there {
            take(&mut free, &needs(&one.chain));
        }
        free
    }

    fn steps(&self, plan: &[Wanted]) -> Vec<Step> {
        difference(Desired { replicas: plan, decision: 2 }, &self.there, &self.free(), &needs)
    }

    fn one(&mut self, number: usize) -> &mut Observed {
        self.there.iter_mut().find(|one| one.number == number).unwrap()
    }

    fn act(&mut self, act: Act, plan: &[Wanted]) {
        match act {
            Act::Start(place) => {
                let Wanted { chain, role } = plan[place].clone();
                let (health, leaving) = (Health::Loading, Leaving::No);
                self.there.push(Observed { number: self.next, chain, role, health, leaving, decision: 2 });
                self.next += 1;
            }
            Act::SetRole(number, role) => self.one(number).role = role,
            Act::Resume(number) => self.one(number).leaving = Leaving::No,
            Act::Drain(number) => self.one(number).leaving = Leaving::Draining,
            Act::Stop(number) => self.there.retain(|one| one.number != number),
        }
    }

    /// What loads has loaded; who drains is vacant.
    fn pass(&mut self) {
        for one in &mut self.there {
            if one.health == Health::Loading {
                one.health = Health::Serving;
            }
            if one.leaving == Leaving::Draining {
                one.leaving = Leaving::Drained;
            }
        }
    }

    fn serving(&self) -> usize {
        self.there.iter().filter(|one| serves(one) && one.leaving == Leaving::No).count()
    }
}

fn any_chain() -> impl Strategy<Value = Chain> {
    let nodes = prop::sample::subsequence((0..4_u8).collect::<Vec<_>>(), 1..=3);
    (nodes, 1_u32..3).prop_map(|(nodes, slots)| chain(&nodes, slots))
}

fn any_role() -> impl Strategy<Value = Role> {
    prop::sample::select(vec![Role::Prefill, Role::Decode, Role::Mixed])
}

fn any_plan() -> impl Strategy<Value = Vec<Wanted>> {
    let replica = (any_chain(), any_role()).prop_map(|(chain, role)| Wanted { chain, role });
    prop::collection::vec(replica, 1..4)
}

fn any_observed() -> impl Strategy<Value = Vec<Observed>> {
    let health = prop::sample::select(vec![Health::Loading, Health::Serving, Health::Down, Health::GivenUp]);
    let leaving = prop::sample::select(vec![Leaving::No, Leaving::No, Leaving::Draining, Leaving::Drained]);
    let one = (any_chain(), any_role(), health, leaving, 1_u64..3);
    prop::collection::vec(one, 0..5).prop_map(|all| {
        let number = |(number, (chain, role, health, leaving, decision))| Observed {
            number,
            chain,
            role,
            health,
            leaving,
            decision,
        };
        all.into_iter().enumerate().map(number).collect()
    })
}

proptest! {
    #[test]
    fn a_healthy_replica_that_the_plan_keeps_is_never_touched(
        plan in any_plan(), there in any_observed(), size in 0_u64..80,
    ) {
        let touched: Vec<usize> = difference(Desired { replicas: &plan, decision: 2 }, &there, &room(size), &needs)
            .into_iter()
            .filter_map(|step| match step.act {
                Act::Drain(number) | Act::Stop(number) => Some(number),
                Act::Start(_) | Act::SetRole(..) | Act::Resume(_) => None,
            })
            .collect();
        let healthy = |one: &&Observed| one.health == Health::Serving && one.leaving == Leaving::No;
        for chain in plan.iter().map(|wanted| &wanted.chain) {
            let asked = plan.iter().filter(|wanted| wanted.chain == *chain).count();
            let of_chain: Vec<_> = there.iter().filter(healthy).filter(|one| one.chain == *chain).collect();
            let left = of_chain.iter().filter(|one| !touched.contains(&one.number)).count();
            prop_assert_eq!(left, asked.min(of_chain.len()));
        }
    }

    #[test]
    fn every_way_ends_where_it_should_and_takes_no_more_memory_than_there_is(
        plan in any_plan(), there in any_observed(), extra in 0_u64..40,
    ) {
        // Room enough for either, one after the other.
        let sum = |chains: Vec<&Chain>| {
            let mut all = Memory::new();
            for (node, bytes) in chains.into_iter().flat_map(needs) {
                *all.entry(node).or_insert(Bytes::ZERO) += bytes;
            }
            all.values().map(|bytes| bytes.0).max().unwrap_or(0)
        };
        let size = sum(plan.iter().map(|one| &one.chain).collect())
            .max(sum(there.iter().map(|one| &one.chain).collect())) + extra;
        let next = there.len();
        let mut sandbox = Sandbox { there, next, size };
        // Agents get a replica that is down to serve again, but for those that they gave up.
        for one in &mut sandbox.there {
            if one.health == Health::Down || one.decision == 2 { one.health = Health::Serving }
        }
        for _ in 0..40 {
            let due = sandbox.steps(&plan).into_iter().filter(|step| step.wait == Wait::Nothing);
            for step in due.collect::<Vec<_>>() {
                sandbox.act(step.act, &plan);
            }
            let used = sandbox.there.iter().map(|one| &one.chain).collect();
            prop_assert!(sum(used) <= size, "a node has too much");
            sandbox.pass();
        }
        prop_assert_eq!(sandbox.steps(&plan), []);
        prop_assert_eq!(sandbox.there.len(), plan.len());
        prop_assert!(sandbox.there.iter().all(serves));
    }

    #[test]
    fn with_room_for_both_no_fewer_serve_than_before_or_than_planned(
        plan in any_plan(), there in any_observed(),
    ) {
        let next = there.len();
        let mut sandbox = Sandbox { there, next, size: 10_000 };
        let least = sandbox.serving().min(plan.len());
        for _ in 0..20 {
            for step in sandbox.steps(&plan).into_iter().filter(|step| step.wait == Wait::Nothing) {
                sandbox.act(step.act, &plan);
                prop_assert!(sandbox.serving() >= least, "{:?}", sandbox.there);
            }
            sandbox.pass();
        }
    }
}
