//! The partition that gives a token soonest: neither the one with the fastest slowest stage nor the one with the smallest
//! sum, but one between them. It does not know how stages are filled under a limit.

use super::Cost;

/// What is left of an interval is not worth a step: no curve is measured to a millionth.
const SLACK: f64 = 1e-6;
/// Room for rounding.
const ROUNDING: f64 = 1e-9;

/// Micro-batches in flight, and what links add to a token's way and take at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenHops {
    pub g: f64,
    pub links: f64,
    pub link: f64,
}

/// Shares blocks out under a limit on every stage.
pub(super) trait Fill {
    /// Devices, each of which may be the master.
    fn masters(&self) -> usize;

    /// No partition has a faster slowest stage; above every limit that has none.
    fn least(&mut self, master: usize) -> f64;

    /// The smallest sum whose stages all stay within a limit; none is needed whose sum is not below the other.
    fn fill(&mut self, most: Cost, master: usize) -> Option<Cost>;
}

/// Limit and master of the partition with the smallest `max(sum + links, g · max(slowest, link))`, which is the time per
/// token of `g` micro-batches in flight, if that is below `target`. No stage takes longer than `most`.
pub(super) fn fastest(
    stages: &mut dyn Fill,
    hops: TokenHops,
    (mut target, most): (f64, f64),
    steps: usize,
) -> Option<(f64, usize)> {
    let TokenHops { g, links, link } = hops;
    let mut best: Option<(f64, usize)> = None;
    let mut consider = |target: &mut f64, cost: Cost, at: (f64, usize)| {
        let time = (cost.sum + links).max(g * cost.slowest.max(link));
        if time < *target * (1.0 - ROUNDING) {
            *target = time;
            best = Some(at);
        }
    };
    for master in 0..stages.masters() {
        let within = |target: f64, limit: f64| Cost { slowest: limit, sum: target - links };
        // Whatever meets the target has its stages within this limit, and at it the smallest sum.
        let mut high = (target / g).min(most);
        match stages.fill(within(target, high), master) {
            Some(cost) if cost.sum + links < target && g * link < target => {}
            _ => continue,
        }
        let mut low = stages.least(master).min(high);
        if low > 0.0
            && let Some(cost) = stages.fill(within(target, low), master)
        {
            consider(&mut target, cost, (low, master));
        }
        for _ in 0..steps {
            let middle = (low + high) / 2.0;
            let found = stages.fill(within(target, middle), master);
            if let Some(cost) = found {
                consider(&mut target, cost, (middle, master));
            }
            match found {
                Some(cost) if cost.sum + links <= g * middle.max(link) => high = cost.slowest.min(middle),
                // Within a smaller limit no sum is smaller.
                _ => low = middle,
            }
            if high - low <= high * SLACK {
                break;
            }
        }
        if let Some(cost) = stages.fill(within(target, high), master) {
            consider(&mut target, cost, (high, master));
        }
    }
    best
}
