//! The paper's dynamic program (E2LLM, section 3.2, algorithm 1), for blocks of any types and sizes:
//! `DP(i, k) = min over j of max(DP(j, k−1), ℓ_k(j, i))`, for every master, in O(M²N²).
//!
//! A second pass over the same table finds, among all partitions with that slowest stage, the one with the smallest
//! sum. A stage's blocks fill the GPU from its last block backwards, as llama.cpp's `n_gpu_layers` does; where the CPU
//! is the faster one, it is filled first. It does not know why a range of blocks is not allowed.

use super::token::{Fill, TokenHops, fastest};
use super::{Blocks, Cost, Master, Partition, Side, StageModel, Tier, rotation};

/// Steps of the bisection for the time per token: each is a pass over the table.
const TOKEN_BISECTIONS: usize = 10;
/// Costs are differences of sums, so one stage's may differ in the last digits between two chains.
const SLACK: f64 = 1e-9;

/// Which ranges of blocks may be a stage.
pub(crate) type Allowed<'a> = &'a dyn Fn(usize, usize) -> bool;

/// The partition with the fastest slowest stage and, among those, the smallest sum; the first master among equals.
pub(crate) fn partition(
    stages: &[StageModel<'_>],
    blocks: Blocks<'_>,
    allowed: Option<Allowed<'_>>,
) -> Option<Partition> {
    let (k, n) = (stages.len(), blocks.kind_of.len());
    if k == 0 || k > n {
        return None;
    }
    let tables = Tables::new(stages, blocks, allowed);
    let mut best: Option<Partition> = None;
    let mut bottleneck = f64::INFINITY;
    for master in 0..k {
        let chain = tables.chain(master);
        let Some(slowest) = slowest_of(&chain, n, allowed, bottleneck) else { continue };
        let most = Cost { slowest, sum: f64::INFINITY };
        let Some((cuts, sum)) = smallest_sum(&chain, n, allowed, most) else { continue };
        // `slowest` is at most a rounding error above the best so far.
        let better =
            best.as_ref().is_none_or(|b| slowest < b.slowest * (1.0 - SLACK) || sum < b.sum * (1.0 - SLACK));
        if better {
            bottleneck = slowest;
            best = Some(tables.partition(master, &cuts, Cost { sum, slowest }));
        }
    }
    best
}

/// Whether there is a partition at all.
pub(crate) fn fits(stages: &[StageModel<'_>], blocks: Blocks<'_>, allowed: Option<Allowed<'_>>) -> bool {
    let (k, n) = (stages.len(), blocks.kind_of.len());
    if k == 0 || k > n {
        return false;
    }
    let tables = Tables::new(stages, blocks, allowed);
    (0..k).any(|master| reaches_end(&tables.chain(master), n, allowed))
}

/// The partition that gives a token soonest, if that is below `target`: found by bisection, to about a thousandth of
/// what the best slowest stage and the best sum leave open.
pub(crate) fn fastest_token(
    stages: &[StageModel<'_>],
    blocks: Blocks<'_>,
    allowed: Option<Allowed<'_>>,
    (hops, target): (TokenHops, f64),
) -> Option<Partition> {
    let (k, n) = (stages.len(), blocks.kind_of.len());
    if k == 0 || k > n {
        return None;
    }
    let mut tables = Tables::new(stages, blocks, allowed);
    let (limit, master) = fastest(&mut tables, hops, (target, f64::MAX), TOKEN_BISECTIONS)?;
    let chain = tables.chain(master);
    let (cuts, sum) = smallest_sum(&chain, n, allowed, Cost { slowest: limit, sum: f64::INFINITY })?;
    let slowest = slowest_between(&chain, &cuts);
    Some(tables.partition(master, &cuts, Cost { sum, slowest }))
}

/// Every device's costs, as the master and not.
struct Tables<'a> {
    stages: Vec<[StageTable; 2]>,
    n_blocks: usize,
    allowed: Option<Allowed<'a>>,
}

impl<'a> Tables<'a> {
    fn new(stages: &[StageModel<'_>], blocks: Blocks<'_>, allowed: Option<Allowed<'a>>) -> Self {
        let both =
            |stage: &StageModel<'_>| [Master::No, Master::Yes].map(|m| StageTable::new(stage, blocks, m));
        Self { stages: stages.iter().map(both).collect(), n_blocks: blocks.kind_of.len(), allowed }
    }

    fn chain(&self, master: usize) -> Vec<&StageTable> {
        rotation(self.stages.len(), master)
            .map(|device| &self.stages[device][usize::from(device == master)])
            .collect()
    }

    fn partition(&self, master: usize, cuts: &[usize], cost: Cost) -> Partition {
        let mut shares = vec![(0, 0); self.stages.len()];
        let chain = self.chain(master);
        for (place, device) in rotation(self.stages.len(), master).enumerate() {
            shares[device] = chain[place].split(cuts[place], cuts[place + 1]);
        }
        Partition { master, blocks: shares, slowest: cost.slowest, sum: cost.sum }
    }
}

impl Fill for Tables<'_> {
    fn masters(&self) -> usize {
        self.stages.len()
    }

    fn least(&mut self, master: usize) -> f64 {
        let least = slowest_of(&self.chain(master), self.n_blocks, self.allowed, f64::INFINITY);
        least.unwrap_or(f64::INFINITY)
    }

    fn fill(&mut self, most: Cost, master: usize) -> Option<Cost> {
        let chain = self.chain(master);
        let (cuts, sum) = smallest_sum(&chain, self.n_blocks, self.allowed, most)?;
        Some(Cost { sum, slowest: slowest_between(&chain, &cuts) })
    }
}

/// A device's costs for every range of blocks.
struct StageTable {
    /// By end and then start, infinite where the range does not fit.
    costs: Vec<f64>,
    gpu: Prefix,
    cpu: Prefix,
    fixed: f64,
    embedding: f64,
    /// Seconds of calling each processor, and whether that is needed even without a block.
    gpu_call: (f64, bool),
    cpu_call: (f64, bool),
    gpu_first: bool,
}

/// Sums over the first blocks, and for each end how far back, or for each start how far on, the room reaches.
struct Prefix {
    cost: Vec<f64>,
    /// `reach_back[end]`: the first block of the longest range that ends there and fits.
    reach_back: Vec<usize>,
    /// `reach_on[start]`: one past the last block of the longest range that starts there and fits.
    reach_on: Vec<usize>,
}

impl Prefix {
    fn new(tier: &Tier<'_>, blocks: Blocks<'_>, master: Master) -> Self {
        let n = blocks.kind_of.len();
        let room = tier.room(master);
        let mut cost = vec![0.0; n + 1];
        let (mut reach_back, mut reach_on) = (vec![0; n + 1], vec![n; n + 1]);
        let need = |block: usize| blocks.need[usize::from(blocks.kind_of[block])];
        let (mut start, mut bytes) = (0, 0.0);
        for end in 1..=n {
            let kind = usize::from(blocks.kind_of[end - 1]);
            cost[end] = cost[end - 1] + tier.cost.get(kind).copied().unwrap_or(0.0);
            bytes += need(end - 1);
            while bytes > room && start < end {
                bytes -= need(start);
                reach_on[start] = end - 1;
                start += 1;
            }
            reach_back[end] = start;
        }
        if room < 0.0 {
            (0..=n).for_each(|i| (reach_back[i], reach_on[i]) = (i, i));
        }
        Self { cost, reach_back, reach_on }
    }

    fn between(&self, start: usize, end: usize) -> f64 {
        self.cost[end] - self.cost[start]
    }
}

impl StageTable {
    fn new(stage: &StageModel<'_>, blocks: Blocks<'_>, master: Master) -> Self {
        let mean = |tier: &Tier<'_>| {
            let all = tier.cost.iter().sum::<f64>() / tier.cost.len().max(1) as f64;
            if tier.cost.is_empty() { f64::INFINITY } else { all }
        };
        let is_master = master == Master::Yes;
        let call = |tier: &Tier<'_>, side: Side| (tier.call, is_master && stage.head_on == side);
        let mut table = Self {
            costs: Vec::new(),
            gpu: Prefix::new(&stage.gpu, blocks, master),
            cpu: Prefix::new(&stage.cpu, blocks, master),
            fixed: stage.overhead + if is_master { stage.head } else { 0.0 },
            embedding: stage.embedding,
            gpu_call: call(&stage.gpu, Side::Gpu),
            cpu_call: call(&stage.cpu, Side::Cpu),
            gpu_first: mean(&stage.gpu) <= mean(&stage.cpu),
        };
        let n = blocks.kind_of.len();
        table.costs = vec![f64::INFINITY; (n + 1) * (n + 1)];
        for end in 1..=n {
            for start in (0..end).rev() {
                // A range that does not fit does not fit with more before it either.
                let Some(cost) = table.cost_of(start, end) else { break };
                table.costs[end * (n + 1) + start] = cost;
            }
        }
        table
    }

    /// Costs of the ranges that end there, by start.
    fn costs(&self, end: usize) -> &[f64] {
        let width = self.gpu.cost.len();
        &self.costs[end * width..(end + 1) * width]
    }

    /// Where the GPU's part of blocks `[start, end)` begins, if they fit.
    fn gpu_start(&self, start: usize, end: usize) -> Option<usize> {
        let (back, on) = (self.gpu.reach_back[end], self.cpu.reach_on[start]);
        let at = if self.gpu_first { back.max(start) } else { on.min(end) };
        (back <= at && at <= on).then_some(at)
    }

    fn cost_of(&self, start: usize, end: usize) -> Option<f64> {
        let at = self.gpu_start(start, end)?;
        let called = |(seconds, always): (f64, bool), blocks: usize| {
            if always || blocks > 0 { seconds } else { 0.0 }
        };
        let calls = called(self.cpu_call, at - start) + called(self.gpu_call, end - at);
        let first = if start == 0 { self.embedding } else { 0.0 };
        Some(self.fixed + first + calls + self.cpu.between(start, at) + self.gpu.between(at, end))
    }

    fn split(&self, start: usize, end: usize) -> (u32, u32) {
        let at = self.gpu_start(start, end).unwrap_or(start);
        ((end - at) as u32, (at - start) as u32)
    }
}

/// Whether the stages of a chain can hold all blocks.
fn reaches_end(chain: &[&StageTable], n: usize, allowed: Option<Allowed<'_>>) -> bool {
    let mut before = vec![false; n + 1];
    before[0] = true;
    for (s, stage) in chain.iter().enumerate() {
        let mut now = vec![false; n + 1];
        for (end, now) in now.iter_mut().enumerate().skip(s + 1) {
            let mut fits = stage.costs(end)[s..end].iter().enumerate().rev().take_while(|c| c.1.is_finite());
            *now = fits.any(|(from, _)| before[s + from] && allowed.is_none_or(|may| may(s + from, end)));
        }
        before = now;
    }
    before[n]
}

/// The smallest possible slowest stage, if it is not above `limit`.
fn slowest_of(chain: &[&StageTable], n: usize, allowed: Option<Allowed<'_>>, limit: f64) -> Option<f64> {
    let k = chain.len();
    let limit = limit * (1.0 + SLACK);
    let mut before = vec![f64::INFINITY; n + 1];
    before[0] = 0.0;
    for (s, stage) in chain.iter().enumerate() {
        let mut now = vec![f64::INFINITY; n + 1];
        for end in ends(s, k, n) {
            let costs = stage.costs(end);
            let mut best = f64::INFINITY;
            for start in (s..end).rev() {
                // A range only grows from here, and so does its cost.
                let cost = costs[start];
                if cost >= best || cost > limit {
                    break;
                }
                if before[start] < best && allowed.is_none_or(|allowed| allowed(start, end)) {
                    best = cost.max(before[start]);
                }
            }
            now[end] = best;
        }
        before = now;
    }
    (before[n] <= limit && before[n].is_finite()).then_some(before[n])
}

/// Where the stage at a place may end: each after it has a block at least, and the last one ends the model.
fn ends(place: usize, k: usize, n: usize) -> std::ops::RangeInclusive<usize> {
    if place + 1 == k { n..=n } else { place + 1..=n - (k - 1 - place) }
}

fn slowest_between(chain: &[&StageTable], cuts: &[usize]) -> f64 {
    let costs = chain.iter().zip(cuts.windows(2)).map(|(stage, cut)| stage.costs(cut[1])[cut[0]]);
    costs.fold(0.0, f64::max)
}

/// Among partitions whose stages and sum all stay within `most`, the cuts of one with the smallest sum.
fn smallest_sum(
    chain: &[&StageTable],
    n: usize,
    allowed: Option<Allowed<'_>>,
    most: Cost,
) -> Option<(Vec<usize>, f64)> {
    let k = chain.len();
    let limit = most.slowest * (1.0 + SLACK);
    let mut sums = vec![f64::INFINITY; (k + 1) * (n + 1)];
    let mut from = vec![0; (k + 1) * (n + 1)];
    sums[0] = 0.0;
    for (s, stage) in chain.iter().enumerate() {
        let (before, now) = sums[s * (n + 1)..].split_at_mut(n + 1);
        for end in ends(s, k, n) {
            let costs = stage.costs(end);
            let (mut best, mut at) = (most.sum, 0);
            for start in (s..end).rev() {
                let cost = costs[start];
                if cost > limit || cost >= best {
                    break;
                }
                let sum = before[start] + cost;
                if sum < best && allowed.is_none_or(|allowed| allowed(start, end)) {
                    (best, at) = (sum, start);
                }
            }
            if best < most.sum {
                now[end] = best;
                from[(s + 1) * (n + 1) + end] = at;
            }
        }
    }
    let sum = sums[k * (n + 1) + n];
    let mut cuts = vec![n; k + 1];
    for s in (0..k).rev() {
        cuts[s] = from[(s + 1) * (n + 1) + cuts[s + 1]];
    }
    sum.is_finite().then_some((cuts, sum))
}
