//! A tournament: every pair of nodes meets once, and in a round each node is in one pair at most, so that no measurement
//! takes another's bandwidth or processor.

/// Pairs of the nodes `0..n`, in rounds: as few as there can be, by the circle method.
pub(super) fn rounds(n: usize) -> Vec<Vec<(usize, usize)>> {
    // The last seat stays where it is and the others move on by one each round; of an odd number, it is empty.
    let seats = n + n % 2;
    let circle = seats.saturating_sub(1);
    let round = |turn: usize| {
        let at = |seat: usize| (seat + turn) % circle;
        let opposite = (1..seats / 2).map(|i| (at(i), at(circle - i)));
        let pairs = [(at(0), circle)].into_iter().chain(opposite);
        pairs.filter(|&(a, b)| a < n && b < n).map(|(a, b)| (a.min(b), a.max(b))).collect()
    };
    if n < 2 { Vec::new() } else { (0..circle).map(round).collect() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_nodes_meet_once() {
        assert_eq!(rounds(2), [[(0, 1)]]);
        assert!(rounds(1).is_empty() && rounds(0).is_empty());
    }

    proptest! {
        #[test]
        fn every_pair_meets_once_and_no_node_is_in_two_pairs_of_a_round(n in 2..40_usize) {
            let rounds = rounds(n);
            prop_assert_eq!(rounds.len(), if n % 2 == 0 { n - 1 } else { n });
            let mut met = BTreeSet::new();
            for round in rounds {
                let mut busy = BTreeSet::new();
                for (a, b) in round {
                    prop_assert!(a < b && b < n);
                    prop_assert!(busy.insert(a) && busy.insert(b), "a node is in two pairs");
                    prop_assert!(met.insert((a, b)), "a pair meets twice");
                }
            }
            prop_assert_eq!(met.len(), n * (n - 1) / 2);
        }
    }
}
