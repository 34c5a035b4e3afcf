//! Partition of blocks that are all alike.
//!
//! A stage's time then is convex in its number of blocks: the faster processor is filled first, then the slower one.
//! So the fastest slowest stage is found by bisection over a limit, all masters at once, and the smallest sum under
//! a limit by handing out blocks in the order of their cost. O(M log M) for each limit tried, whatever the number of
//! blocks.

use super::{Master, Partition, StageModel};

/// Steps of a bisection; each halves the interval, so that what is left is far below any measurement.
const BISECTIONS: usize = 44;
/// The time per token is needed less exactly: no curve is measured to a millionth.
const TOKEN_BISECTIONS: usize = 24;
const TOKEN_SLACK: f64 = 1e-6;
/// Room for rounding when a limit is a stage's own time.
const SLACK: f64 = 1e-9;

/// Sum and maximum over stages.
#[derive(Debug, Clone, Copy)]
struct Cost {
    sum: f64,
    slowest: f64,
}

/// Micro-batches in flight, and what links add to a token's way and take at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenHops {
    pub g: f64,
    pub links: f64,
    pub link: f64,
}

/// A stage as two linear pieces.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    /// Cost of a block and how many there can be, the cheaper processor first.
    fast: (f64, u32),
    slow: (f64, u32),
    /// Time without any block.
    fixed: f64,
    gpu_is_fast: bool,
}

impl Pieces {
    fn new(stage: &StageModel<'_>, need: f64, master: Master) -> Self {
        let piece = |tier: &super::Tier<'_>| {
            let room = tier.room(master);
            let fit = if room < 0.0 { 0.0 } else { (room / need).floor().min(1e6) };
            (tier.cost.first().copied().unwrap_or(f64::INFINITY), fit as u32)
        };
        let (gpu, cpu) = (piece(&stage.gpu), piece(&stage.cpu));
        let gpu_is_fast = gpu.0 <= cpu.0;
        let (fast, slow) = if gpu_is_fast { (gpu, cpu) } else { (cpu, gpu) };
        let head = if master == Master::Yes { stage.head } else { 0.0 };
        Self { fast, slow, fixed: stage.overhead + head, gpu_is_fast }
    }

    /// The most blocks it takes within `limit`.
    fn within(&self, limit: f64) -> u32 {
        let left = limit * (1.0 + SLACK) - self.fixed;
        if left < 0.0 {
            return 0;
        }
        let fast = if self.fast.1 == 0 { 0 } else { ((left / self.fast.0) as u32).min(self.fast.1) };
        if fast < self.fast.1 || self.slow.1 == 0 {
            return fast;
        }
        let left = left - f64::from(fast) * if fast == 0 { 0.0 } else { self.fast.0 };
        fast + ((left / self.slow.0) as u32).min(self.slow.1)
    }

    fn time(&self, blocks: u32) -> f64 {
        let fast = blocks.min(self.fast.1);
        let slow = blocks - fast;
        let of = |count: u32, cost: f64| if count == 0 { 0.0 } else { f64::from(count) * cost };
        self.fixed + of(fast, self.fast.0) + of(slow, self.slow.0)
    }

    fn split(&self, blocks: u32) -> (u32, u32) {
        let fast = blocks.min(self.fast.1);
        if self.gpu_is_fast { (fast, blocks - fast) } else { (blocks - fast, fast) }
    }
}

/// A group of devices, ready to be asked.
pub(crate) struct Waterfill {
    plain: Vec<Pieces>,
    as_master: Vec<Pieces>,
    blocks: u32,
    /// Pieces in the order of their cost: cost, device, whether it is the slow piece.
    by_cost: Vec<(f64, u32, bool)>,
}

impl Waterfill {
    pub(crate) fn new(stages: &[StageModel<'_>], need: f64, blocks: usize) -> Self {
        let pieces = |master| stages.iter().map(|stage| Pieces::new(stage, need, master)).collect::<Vec<_>>();
        let plain = pieces(Master::No);
        let mut by_cost: Vec<(f64, u32, bool)> = (plain.iter().zip(0..))
            .flat_map(|(p, d)| [(p.fast.0, d, false), (p.slow.0, d, true)])
            .filter(|piece| piece.0.is_finite())
            .collect();
        by_cost.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        Self { plain, as_master: pieces(Master::Yes), blocks: blocks as u32, by_cost }
    }

    /// Whether the blocks fit at all, with some master.
    pub(crate) fn fits(&self) -> bool {
        self.feasible(f64::MAX).is_some()
    }

    /// The fastest slowest stage and, among those partitions, the smallest sum.
    pub(crate) fn fastest_slowest(&self) -> Option<Partition> {
        self.feasible(f64::MAX)?;
        let (mut low, mut high) = (0.0, self.upper_bound());
        for _ in 0..BISECTIONS {
            let middle = (low + high) / 2.0;
            if self.feasible(middle).is_some() {
                high = middle
            } else {
                low = middle
            }
            if high - low <= high * SLACK {
                break;
            }
        }
        let mut counts = self.counts();
        let mut best: Option<(Cost, usize)> = None;
        for master in 0..self.plain.len() {
            let Some(found) = self.fill(high, master, &mut counts) else { continue };
            let better = best.is_none_or(|(b, _)| {
                found.slowest < b.slowest * (1.0 - SLACK)
                    || (found.slowest <= b.slowest * (1.0 + SLACK) && found.sum < b.sum * (1.0 - SLACK))
            });
            if better {
                best = Some((found, master));
            }
        }
        best.and_then(|(_, master)| self.partition(high, master))
    }

    /// The partition with the smallest `max(sum + links, g · max(slowest, link))`, which is the time per token of `g`
    /// micro-batches in flight, if that is below `target`.
    pub(crate) fn fastest_token(&self, hops: TokenHops, target: f64) -> Option<Partition> {
        let TokenHops { g, links, link } = hops;
        self.feasible(f64::MAX)?;
        let most = self.upper_bound();
        let mut counts = self.counts();
        let mut best: Option<(f64, usize)> = None;
        let mut target = target;
        for master in 0..self.plain.len() {
            // Whatever meets the target has its stages within this limit, and at it the smallest sum.
            let mut high = (target / g).min(most);
            match self.fill(high, master, &mut counts) {
                Some(cost) if cost.sum + links < target && g * link < target => {}
                _ => continue,
            }
            let mut low = 0.0;
            let mut consider = |cost: Cost, limit: f64| {
                let time = (cost.sum + links).max(g * cost.slowest.max(link));
                if time < target * (1.0 - SLACK) {
                    target = time;
                    best = Some((limit, master));
                }
            };
            for _ in 0..TOKEN_BISECTIONS {
                let middle = (low + high) / 2.0;
                let found = self.fill(middle, master, &mut counts);
                if let Some(cost) = found {
                    consider(cost, middle);
                }
                match found {
                    Some(cost) if cost.sum + links <= g * middle.max(link) => high = cost.slowest.min(middle),
                    _ => low = middle,
                }
                if high - low <= high * TOKEN_SLACK {
                    break;
                }
            }
            if let Some(cost) = self.fill(high, master, &mut counts) {
                consider(cost, high);
            }
        }
        best.and_then(|(limit, master)| self.partition(limit, master))
    }

    fn counts(&self) -> Vec<(u32, u32)> {
        vec![(0, 0); self.plain.len()]
    }

    /// A limit that every partition stays within.
    fn upper_bound(&self) -> f64 {
        let all = self.plain.iter().zip(&self.as_master).map(|(p, m)| {
            let longest = |p: &Pieces| p.time(self.blocks.min(p.fast.1.saturating_add(p.slow.1)));
            longest(p).max(longest(m))
        });
        all.fold(0.0, f64::max)
    }

    /// Whether some master makes all blocks fit within `limit`.
    fn feasible(&self, limit: f64) -> Option<()> {
        if self.plain.len() > self.blocks as usize {
            return None;
        }
        let (mut total, mut gain, mut empty) = (0_u64, i64::MIN, 0);
        let mut empty_gain = None;
        for (plain, master) in self.plain.iter().zip(&self.as_master) {
            let (p, m) = (plain.within(limit).min(self.blocks), master.within(limit).min(self.blocks));
            total += u64::from(p);
            if p == 0 {
                empty += 1;
                empty_gain = (m > 0).then_some(i64::from(m));
            }
            if m > 0 {
                gain = gain.max(i64::from(m) - i64::from(p));
            }
        }
        let gain = match empty {
            0 => gain,
            1 => empty_gain.unwrap_or(i64::MIN),
            _ => return None,
        };
        (gain != i64::MIN && total as i64 + gain >= i64::from(self.blocks)).then_some(())
    }

    /// The smallest sum whose stages all stay within `limit`, for a given master. `counts` is left with each device's
    /// blocks, and how many more it could take.
    fn fill(&self, limit: f64, master: usize, counts: &mut [(u32, u32)]) -> Option<Cost> {
        let piece = |d: usize| if d == master { &self.as_master[d] } else { &self.plain[d] };
        let mut left = self.blocks.checked_sub(counts.len() as u32)?;
        let mut room = 0_u64;
        for (d, count) in counts.iter_mut().enumerate() {
            // Every stage has one block at least.
            *count = (1, piece(d).within(limit).checked_sub(1)?);
            room += u64::from(count.1);
        }
        if room < u64::from(left) {
            return None;
        }
        for &(_, device, slow) in &self.by_cost {
            if left == 0 {
                break;
            }
            let d = device as usize;
            let (have, more) = &mut counts[d];
            let fast = piece(d).fast.1.max(1);
            let room = if slow { *more } else { (*more).min(fast.saturating_sub(*have)) };
            let take = room.min(left);
            *have += take;
            *more -= take;
            left -= take;
        }
        if left > 0 {
            return None;
        }
        let times = counts.iter().enumerate().map(|(d, &(have, _))| piece(d).time(have));
        Some(times.fold(Cost { sum: 0.0, slowest: 0.0 }, |cost, time| Cost {
            sum: cost.sum + time,
            slowest: cost.slowest.max(time),
        }))
    }

    /// What [`Self::fill`] finds, in full.
    fn partition(&self, limit: f64, master: usize) -> Option<Partition> {
        let mut counts = self.counts();
        let cost = self.fill(limit, master, &mut counts)?;
        let piece = |d: usize| if d == master { &self.as_master[d] } else { &self.plain[d] };
        let blocks = counts.iter().enumerate().map(|(d, &(have, _))| piece(d).split(have)).collect();
        Some(Partition { master, blocks, slowest: cost.slowest, sum: cost.sum })
    }
}
