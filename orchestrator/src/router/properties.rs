//! What can be relied on of policies, for any views.

use proptest::prelude::*;

use super::*;

fn view() -> impl Strategy<Value = ReplicaView> {
    let loads = (0_usize..9, 0_usize..9, 1_usize..9, 0_u64..100_000, 0_u32..4096);
    let seconds = (0.0..600.0_f64, 0.0..60.0_f64, 0.0..120.0_f64);
    (loads, seconds).prop_map(|((waiting, held, slots, tokens, prefix), (backlog, service, decode))| {
        ReplicaView {
            replica: 0,
            waiting,
            held: held.min(slots),
            slots,
            backlog,
            service,
            decode,
            tokens,
            prefix,
        }
    })
}

/// Some replicas of 16, in their order.
fn views() -> impl Strategy<Value = Vec<ReplicaView>> {
    prop::collection::btree_map(0_usize..16, view(), 1..16).prop_map(|by_number| {
        by_number.into_iter().map(|(replica, view)| ReplicaView { replica, ..view }).collect()
    })
}

proptest! {
    #[test]
    fn every_policy_chooses_one_that_can_serve(rounds in prop::collection::vec(views(), 1..20), seed: u64) {
        for name in PolicyName::ALL {
            let mut policy = name.policy(seed);
            for views in &rounds {
                prop_assert!(policy.place(views) < views.len(), "{name}");
            }
        }
    }

    #[test]
    fn jsq_never_chooses_one_with_more_predicted_work(views in views()) {
        let chosen = views[ShortestWork.place(&views)];
        prop_assert!(views.iter().all(|view| chosen.work() <= view.work()));
    }

    #[test]
    fn the_literal_jsq_never_chooses_a_longer_line(views in views()) {
        let chosen = views[ShortestCount.place(&views)];
        prop_assert!(views.iter().all(|view| chosen.waiting <= view.waiting));
        let chosen = views[ShortestTokens.place(&views)];
        prop_assert!(views.iter().all(|view| chosen.tokens <= view.tokens));
    }

    #[test]
    fn affinity_adds_no_more_than_its_bound(views in views()) {
        let chosen = views[PrefixAffinity.place(&views)];
        let least = views.iter().map(ReplicaView::work).fold(f64::INFINITY, f64::min);
        let bound = (least * MOST_IMBALANCE_SHARE).max(MOST_IMBALANCE_SECONDS);
        prop_assert!(chosen.work() <= least + bound);
        let near = views.iter().filter(|view| view.work() <= least + bound);
        prop_assert_eq!(chosen.prefix, near.map(|view| view.prefix).max().unwrap());
    }

    #[test]
    fn round_robin_is_fair_to_those_that_stay(views in views(), rounds in 1_usize..5) {
        let mut policy = RoundRobin::default();
        let mut times = vec![0; views.len()];
        for _ in 0..rounds * views.len() {
            times[policy.place(&views)] += 1;
        }
        prop_assert!(times.iter().all(|&times| times == rounds), "{:?}", times);
    }

    #[test]
    fn the_same_seed_draws_the_same(views in views(), seed: u64) {
        let (mut one, mut other) = (Random::new(seed), Random::new(seed));
        for _ in 0..20 {
            prop_assert_eq!(one.place(&views), other.place(&views));
        }
    }
}

#[test]
fn of_replicas_alike_the_emptier_is_joined() {
    let view =
        |replica, held| ReplicaView { replica, held, slots: 4, service: 1.0, ..ReplicaView::default() };
    assert_eq!(ShortestWork.place(&[view(0, 2), view(1, 1), view(2, 1)]), 1);
}

#[test]
fn random_reaches_every_replica() {
    let views: Vec<_> = (0..4).map(|replica| ReplicaView { replica, ..ReplicaView::default() }).collect();
    let mut policy = Random::new(1);
    let mut seen = [false; 4];
    for _ in 0..100 {
        seen[policy.place(&views)] = true;
    }
    assert_eq!(seen, [true; 4]);
}

#[test]
fn the_fastest_decodes_and_of_equals_the_emptier() {
    let view = |replica, held, speed| DecodeView { replica, free: 1, held, speed };
    assert_eq!(ShortestWork.decode(&[view(0, 0, 5.0), view(1, 3, 9.0)]), 1);
    assert_eq!(ShortestWork.decode(&[view(0, 2, 9.0), view(1, 1, 9.0)]), 1);
}

#[test]
fn every_policy_has_a_name_by_which_it_is_found() {
    for name in PolicyName::ALL {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    assert!("shortest".parse::<PolicyName>().unwrap_err().to_string().contains("prefix-affinity"));
}
