//! The order of a group's devices in its chain. Where all links are alike any order will do; where they are not, the
//! ring whose slowest link is the fastest, and among those the one with the smallest sum, since a token's way through
//! the chain and back is a ring.

use crate::instance::Instance;

/// Up to here all rings are looked at, by a dynamic program over subsets.
const EXACT: usize = 9;

/// Slowest link and sum of a path.
type Cost = (f64, f64);

/// The group as a ring; none if its devices cannot all talk.
pub(crate) fn ring(inst: &Instance, group: &[usize]) -> Option<Vec<usize>> {
    let k = group.len();
    let cost = |a: usize, b: usize| {
        let (per_byte, latency) = inst.link(a, b);
        per_byte * inst.row_bytes + latency
    };
    let order = match k {
        0 => return None,
        1..=2 => group.to_vec(),
        _ if inst.uniform_links => group.to_vec(),
        3..=EXACT => exact(group, &cost),
        _ => greedy(group, &cost),
    };
    let connected = k == 1 || (0..k).all(|i| cost(order[i], order[(i + 1) % k]).is_finite());
    connected.then_some(order)
}

/// Held and Karp's dynamic program, on (slowest, sum).
fn exact(group: &[usize], cost: &dyn Fn(usize, usize) -> f64) -> Vec<usize> {
    let k = group.len();
    let full = 1 << (k - 1);
    let none = (f64::INFINITY, f64::INFINITY);
    // Paths from device 0 through a set of the others, by where they end.
    let mut best: Vec<Vec<Cost>> = vec![vec![none; k - 1]; full];
    let mut from = vec![vec![0; k - 1]; full];
    let add = |path: Cost, link: f64| (path.0.max(link), path.1 + link);
    for end in 0..k - 1 {
        best[1 << end][end] = add((0.0, 0.0), cost(group[0], group[end + 1]));
    }
    for set in 1..full {
        for end in (0..k - 1).filter(|end| set & (1 << end) != 0) {
            for next in (0..k - 1).filter(|next| set & (1 << next) == 0) {
                let path = add(best[set][end], cost(group[end + 1], group[next + 1]));
                let other = set | (1 << next);
                if path < best[other][next] {
                    best[other][next] = path;
                    from[other][next] = end;
                }
            }
        }
    }
    let closed = |end: usize| add(best[full - 1][end], cost(group[end + 1], group[0]));
    let mut end = (0..k - 1).fold(0, |a, b| if closed(b) < closed(a) { b } else { a });
    let mut order = vec![group[0]];
    let mut set = full - 1;
    for _ in 0..k - 1 {
        order.insert(1, group[end + 1]);
        let before = from[set][end];
        set &= !(1 << end);
        end = before;
    }
    order
}

/// The nearest next device, again and again.
fn greedy(group: &[usize], cost: &dyn Fn(usize, usize) -> f64) -> Vec<usize> {
    let mut left = group[1..].to_vec();
    let mut order = vec![group[0]];
    while !left.is_empty() {
        let last = order[order.len() - 1];
        let nearest =
            (0..left.len()).fold(0, |a, b| if cost(last, left[b]) < cost(last, left[a]) { b } else { a });
        order.push(left.remove(nearest));
    }
    order
}
