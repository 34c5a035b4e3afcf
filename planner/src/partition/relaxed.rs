//! What no partition beats: blocks are shared out in fractions, any stage may be the master, and only the first call of a
//! stage counts. Takes a microsecond where a partition takes a millisecond, so that most need not be looked for.

use super::{Blocks, Master, StageModel, Tier, TokenHops};

/// Halvings of the interval in which the best limit lies; any number gives a bound.
const STEPS: usize = 16;

/// A group of devices, ready to be asked.
pub(crate) struct Relaxed {
    /// Seconds of each stage besides blocks.
    fixed: Vec<f64>,
    /// Seconds of a block, device, and blocks that fit; the cheapest first.
    pieces: Vec<(f64, usize, f64)>,
    /// Blocks, the types weighed by what they cost at least in proportion to the mean.
    blocks: f64,
    /// Seconds that some stage has on top: the head, and the look-up of embeddings.
    once: f64,
}

impl Relaxed {
    pub(crate) fn new(stages: &[StageModel<'_>], blocks: Blocks<'_>) -> Self {
        let mut counts = vec![0.0; blocks.need.len()];
        blocks.kind_of.iter().for_each(|&kind| counts[usize::from(kind)] += 1.0);
        let n = blocks.kind_of.len() as f64;
        let mean =
            |tier: &Tier<'_>| tier.cost.iter().zip(&counts).map(|(c, count)| c * count).sum::<f64>() / n;
        let usable = |tier: &&Tier<'_>| !tier.cost.is_empty() && tier.room(Master::No) >= 0.0;
        let tiers = || stages.iter().enumerate().flat_map(|(d, s)| [(d, &s.gpu), (d, &s.cpu)]);
        let tiers = || tiers().filter(|(_, tier)| usable(tier));
        let weights: Vec<f64> = (0..counts.len())
            .map(|kind| tiers().map(|(_, tier)| tier.cost[kind] / mean(tier)).fold(f64::INFINITY, f64::min))
            .collect();
        let per_byte =
            weights.iter().zip(blocks.need).map(|(weight, need)| weight / need).fold(0.0, f64::max);
        let mut pieces: Vec<(f64, usize, f64)> =
            tiers().map(|(d, tier)| (mean(tier), d, tier.room(Master::No) * per_byte)).collect();
        pieces.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let call = |stage: &StageModel<'_>| {
            let calls = [&stage.gpu, &stage.cpu].into_iter().filter(usable).map(|tier| tier.call);
            calls.fold(f64::INFINITY, f64::min)
        };
        let least = |of: fn(&StageModel<'_>) -> f64| stages.iter().map(of).fold(f64::INFINITY, f64::min);
        Self {
            fixed: stages.iter().map(|stage| stage.overhead + call(stage)).collect(),
            pieces,
            blocks: weights.iter().zip(&counts).filter(|(_, n)| **n > 0.0).map(|(w, n)| w * n).sum(),
            once: least(|stage| stage.head) + least(|stage| stage.embedding),
        }
    }

    /// No partition gives a token of so many micro-batches sooner; infinite if there is none.
    pub(crate) fn token(&self, hops: TokenHops) -> f64 {
        let TokenHops { g, links, link } = hops;
        let sum = |limit: f64| self.sum(limit) + links;
        let least = sum(f64::INFINITY);
        let mut bound = least.max(g * link);
        // Stages slower than a limit cost g times it, faster ones at least the sum that is possible within it.
        let (mut low, mut high) = (least / g, least);
        for _ in 0..STEPS {
            let middle = (low + high) / 2.0;
            let sum = sum(middle);
            bound = bound.max(sum.min(g * middle));
            if sum > g * middle { low = middle } else { high = middle }
        }
        bound * (1.0 - 1e-9)
    }

    /// The smallest sum of all stages, none of them above `limit`.
    fn sum(&self, limit: f64) -> f64 {
        let mut left: Vec<f64> = self.fixed.iter().map(|fixed| limit - fixed).collect();
        if left.iter().any(|left| *left < 0.0) {
            return f64::INFINITY;
        }
        let mut sum = self.fixed.iter().sum::<f64>() + self.once;
        let mut blocks = self.blocks;
        for &(cost, device, fit) in &self.pieces {
            let take = blocks.min(fit).min(left[device] / cost);
            left[device] -= take * cost;
            sum += take * cost;
            blocks -= take;
        }
        // What is left over is rounding, or does not fit.
        if blocks > self.blocks * 1e-9 { f64::INFINITY } else { sum }
    }
}
