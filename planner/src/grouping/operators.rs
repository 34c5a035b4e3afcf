//! The paper's chromosomes and operators (E2LLM, section 3.4): one chromosome orders the devices, the other cuts the
//! order into groups, `[(0,1,2,3,4,5), (3,1,2)]`; and a crossover of our own that keeps groups whole.

use crate::rng::Rng;

/// How often a child is mutated, and how (E2LLM, section 3.4).
const MUTATION: f64 = 0.3;
const SWAP: f64 = 0.20;
const REGROUP_FROM: f64 = 0.50;
const REGROUP: f64 = 0.15;

/// A plan's grouping as two chromosomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Individual {
    /// Every device once.
    pub order: Vec<u16>,
    /// Sizes of groups, in sum the number of devices.
    pub sizes: Vec<u16>,
}

impl Individual {
    /// Its groups, each in rising order.
    pub(crate) fn groups(&self) -> Vec<Vec<u16>> {
        let mut start = 0;
        let sizes = self.sizes.iter().map(|&size| {
            let mut group = self.order[start..start + usize::from(size)].to_vec();
            start += usize::from(size);
            group.sort_unstable();
            group
        });
        sizes.collect()
    }

    pub(crate) fn from_groups(groups: &[Vec<u16>]) -> Self {
        Self {
            order: groups.iter().flatten().copied().collect(),
            sizes: groups.iter().filter(|g| !g.is_empty()).map(|g| g.len() as u16).collect(),
        }
    }

    pub(crate) fn random(n: usize, rng: &mut Rng) -> Self {
        let mut order: Vec<u16> = (0..n as u16).collect();
        rng.shuffle(&mut order);
        Self { order, sizes: random_sizes(n, rng) }
    }
}

/// Group sizes that add up to `n`.
fn random_sizes(n: usize, rng: &mut Rng) -> Vec<u16> {
    let largest = n.min(8);
    let mut left = n;
    let mut sizes = Vec::new();
    while left > 0 {
        let size = 1 + rng.below(largest.min(left));
        sizes.push(size as u16);
        left -= size;
    }
    sizes
}

/// The paper's crossover: part of one parent's order, the rest in the other's order; the first parent's sizes. The
/// repair pass that removes devices that come twice is the skipping of those already taken.
pub(crate) fn cross_orders(a: &Individual, b: &Individual, rng: &mut Rng) -> Individual {
    let n = a.order.len();
    let (mut from, mut to) = (rng.below(n), rng.below(n));
    if from > to {
        std::mem::swap(&mut from, &mut to);
    }
    let mut taken = vec![false; n];
    a.order[from..=to].iter().for_each(|&d| taken[usize::from(d)] = true);
    let mut others = b.order.iter().copied().filter(|&d| !taken[usize::from(d)]);
    let order =
        (0..n).filter_map(|i| if (from..=to).contains(&i) { Some(a.order[i]) } else { others.next() });
    Individual { order: order.collect(), sizes: a.sizes.clone() }
}

/// Keeps about half of one parent's groups whole, then the other's groups of devices that are left.
pub(crate) fn cross_groups(a: &Individual, b: &Individual, rng: &mut Rng) -> Individual {
    let mut taken = vec![false; a.order.len()];
    let mut groups: Vec<Vec<u16>> = a.groups().into_iter().filter(|_| rng.unit() < 0.5).collect();
    groups.iter().flatten().for_each(|&d| taken[usize::from(d)] = true);
    let mut loose = Vec::new();
    for group in b.groups() {
        let left: Vec<u16> = group.iter().copied().filter(|&d| !taken[usize::from(d)]).collect();
        if left.len() == group.len() || left.len() > 1 && rng.unit() < 0.5 {
            groups.push(left);
        } else {
            loose.extend(left);
        }
    }
    // Devices of broken groups join others or stay alone.
    for device in loose {
        if groups.is_empty() || rng.unit() < 0.3 {
            groups.push(vec![device]);
        } else {
            let at = rng.below(groups.len());
            groups[at].push(device);
        }
    }
    Individual::from_groups(&groups)
}

/// The paper's mutation.
pub(crate) fn mutate(individual: &mut Individual, rng: &mut Rng) {
    if rng.unit() >= MUTATION {
        return;
    }
    let n = individual.order.len();
    let kind = rng.unit();
    if kind < SWAP {
        individual.order.swap(rng.below(n), rng.below(n));
    } else if kind < SWAP + REGROUP_FROM {
        let keep = rng.below(individual.sizes.len());
        individual.sizes.truncate(keep);
        let kept: usize = individual.sizes.iter().map(|&s| usize::from(s)).sum();
        individual.sizes.extend(random_sizes(n - kept, rng));
    } else if kind < SWAP + REGROUP_FROM + REGROUP {
        individual.sizes = random_sizes(n, rng);
    } else {
        *individual = Individual::random(n, rng);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_keeps_every_device_once() {
        let mut rng = Rng::new(2);
        for _ in 0..500 {
            let n = 2 + rng.below(14);
            let (a, b) = (Individual::random(n, &mut rng), Individual::random(n, &mut rng));
            let mut mutated = a.clone();
            mutate(&mut mutated, &mut rng);
            for child in [cross_orders(&a, &b, &mut rng), cross_groups(&a, &b, &mut rng), mutated] {
                let mut order = child.order.clone();
                order.sort_unstable();
                assert_eq!(order, (0..n as u16).collect::<Vec<_>>());
                assert_eq!(child.sizes.iter().sum::<u16>(), n as u16);
                assert!(child.sizes.iter().all(|&size| size > 0));
            }
        }
    }

    #[test]
    fn the_papers_example_decodes_to_its_groups() {
        let individual = Individual { order: vec![0, 1, 2, 3, 4, 5], sizes: vec![3, 1, 2] };
        assert_eq!(individual.groups(), [vec![0, 1, 2], vec![3], vec![4, 5]]);
    }
}
