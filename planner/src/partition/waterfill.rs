//! Partition of blocks that are all alike.
//!
//! A stage's time then is convex in its number of blocks, but for a jump where its slower processor is called too: the
//! faster one is filled first, then the slower. So the fastest slowest stage is found by bisection over a limit, all
//! masters at once, and the smallest sum under a limit by handing out blocks in the order of their cost, with a search
//! over which slower processors are worth their call. O(M log M) for each limit tried, whatever the number of blocks.

use super::token::{Fill, TokenHops, fastest};
use super::{Cost, Master, Partition, Side, StageModel};

/// Steps of a bisection; each halves the interval, so that what is left is far below any measurement.
const BISECTIONS: usize = 44;
/// The time per token is needed less exactly.
const TOKEN_BISECTIONS: usize = 24;
/// Room for rounding when a limit is a stage's own time.
const SLACK: f64 = 1e-9;
/// Choices of slower processors that are looked at for one limit: far more than any group of a dozen devices needs.
const CHOICES: u32 = 256;

/// More blocks than any model has.
const MOST_FIT: u32 = 1_000_000;

/// A stage as two linear pieces.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    /// Cost of a block and how many there can be, the cheaper processor first.
    fast: (f64, u32),
    slow: (f64, u32),
    /// Time on top of blocks.
    fixed: f64,
    /// Time on top once the slower processor has a block too.
    jump: f64,
    gpu_is_fast: bool,
}

/// Whether a stage is its replica's first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Yes,
    No,
}

impl Pieces {
    fn new(stage: &StageModel<'_>, need: f64, (master, first): (Master, First)) -> Self {
        let piece = |tier: &super::Tier<'_>| {
            let room = tier.room(master);
            let fit = if room < 0.0 { 0 } else { ((room / need) as u32).min(MOST_FIT) };
            (tier.cost.first().copied().unwrap_or(f64::INFINITY), fit)
        };
        let (gpu, cpu) = (piece(&stage.gpu), piece(&stage.cpu));
        let gpu_is_fast = gpu.0 <= cpu.0;
        let (fast, slow) = if gpu_is_fast { (gpu, cpu) } else { (cpu, gpu) };
        let (fast_side, fast_call, slow_call) = if gpu_is_fast {
            (Side::Gpu, stage.gpu.call, stage.cpu.call)
        } else {
            (Side::Cpu, stage.cpu.call, stage.gpu.call)
        };
        let head = (master == Master::Yes).then_some(stage.head_on);
        // Every stage has a block, and the faster processor has it if it can.
        let calls_fast = fast.1 > 0 || head == Some(fast_side);
        let calls_slow = fast.1 == 0 || head.is_some_and(|side| side != fast_side);
        let mut fixed = stage.overhead;
        fixed += if head.is_some() { stage.head } else { 0.0 };
        fixed += if first == First::Yes { stage.embedding } else { 0.0 };
        fixed += if calls_fast { fast_call } else { 0.0 } + if calls_slow { slow_call } else { 0.0 };
        let jump = if calls_slow || slow.1 == 0 { 0.0 } else { slow_call };
        Self { fast, slow, fixed, jump, gpu_is_fast }
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
        let left = left - self.jump - f64::from(fast) * if fast == 0 { 0.0 } else { self.fast.0 };
        fast + ((left / self.slow.0) as u32).min(self.slow.1)
    }

    fn time(&self, blocks: u32) -> f64 {
        let fast = blocks.min(self.fast.1);
        let slow = blocks - fast;
        let of = |count: u32, cost: f64| if count == 0 { 0.0 } else { f64::from(count) * cost };
        let jump = if slow > 0 { self.jump } else { 0.0 };
        self.fixed + jump + of(fast, self.fast.0) + of(slow, self.slow.0)
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
    /// As the stage after the master, which is the first.
    as_first: Vec<Pieces>,
    blocks: u32,
    /// Pieces in the order of their cost: cost, device, whether it is the slow piece.
    by_cost: Vec<(f64, u32, bool)>,
    /// Whether any slower processor costs a call of its own.
    jumps: bool,
    /// Each device's blocks in the last filling, and how many more it could take.
    counts: Vec<(u32, u32)>,
}

/// Devices, one bit each, whose slower processor is not used, and those for which that is not asked any more.
#[derive(Debug, Clone, Copy, Default)]
struct Choice {
    closed: u64,
    open: u64,
}

/// The best filling found so far.
struct Best {
    cost: Cost,
    closed: u64,
    looked: u32,
}

impl Waterfill {
    pub(crate) fn new(stages: &[StageModel<'_>], need: f64, blocks: usize) -> Self {
        let pieces = |as_: (Master, First)| -> Vec<Pieces> {
            stages.iter().map(|stage| Pieces::new(stage, need, as_)).collect()
        };
        let plain = pieces((Master::No, First::No));
        // A single stage is first and last.
        let alone = if stages.len() == 1 { First::Yes } else { First::No };
        let as_master = pieces((Master::Yes, alone));
        let mut by_cost: Vec<(f64, u32, bool)> = (plain.iter().zip(0..))
            .flat_map(|(p, d)| [(p.fast.0, d, false), (p.slow.0, d, true)])
            .filter(|piece| piece.0.is_finite())
            .collect();
        by_cost.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        Self {
            jumps: plain.iter().chain(&as_master).any(|p| p.jump > 0.0),
            as_first: pieces((Master::No, First::Yes)),
            counts: vec![(0, 0); stages.len()],
            plain,
            as_master,
            blocks: blocks as u32,
            by_cost,
        }
    }

    /// Whether the blocks fit at all, with some master.
    pub(crate) fn fits(&self) -> bool {
        self.feasible(f64::MAX).is_some()
    }

    /// The fastest slowest stage and, among those partitions, the smallest sum.
    pub(crate) fn fastest_slowest(&mut self) -> Option<Partition> {
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
        let mut best: Option<(Cost, usize)> = None;
        for master in 0..self.plain.len() {
            let Some((found, _)) = self.smallest_sum(high, master) else { continue };
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

    /// The partition that gives a token soonest, if that is below `target`.
    pub(crate) fn fastest_token(&mut self, hops: TokenHops, target: f64) -> Option<Partition> {
        self.feasible(f64::MAX)?;
        let most = self.upper_bound();
        let (limit, master) = fastest(self, hops, (target, most), TOKEN_BISECTIONS)?;
        self.partition(limit, master)
    }

    /// A limit that every partition stays within.
    fn upper_bound(&self) -> f64 {
        let longest = |p: &Pieces| p.time(self.blocks.min(p.fast.1.saturating_add(p.slow.1)));
        let all = self.plain.iter().chain(&self.as_master).chain(&self.as_first);
        all.map(longest).fold(0.0, f64::max)
    }

    fn piece(&self, device: usize, master: usize) -> &Pieces {
        if device == master {
            &self.as_master[device]
        } else if device == (master + 1) % self.plain.len() {
            &self.as_first[device]
        } else {
            &self.plain[device]
        }
    }

    /// Whether some master makes all blocks fit within `limit`.
    fn feasible(&self, limit: f64) -> Option<()> {
        let k = self.plain.len();
        if k > self.blocks as usize {
            return None;
        }
        let within = |of: &[Pieces], d: usize| i64::from(of[d].within(limit).min(self.blocks));
        let n = i64::from(self.blocks);
        if k == 1 {
            return (within(&self.as_master, 0) >= n).then_some(());
        }
        let (mut total, mut empty) = (0, 0);
        for device in 0..k {
            let plain = within(&self.plain, device);
            total += plain;
            empty += i64::from(plain == 0);
        }
        let mut here = within(&self.plain, 0);
        for master in 0..k {
            let first = (master + 1) % k;
            let next = within(&self.plain, first);
            let (as_master, as_first) = (within(&self.as_master, master), within(&self.as_first, first));
            let others_empty = empty - i64::from(here == 0) - i64::from(next == 0);
            let room = total - here - next + as_master + as_first;
            if others_empty == 0 && as_master > 0 && as_first > 0 && room >= n {
                return Some(());
            }
            here = next;
        }
        None
    }

    /// The smallest sum under a limit, with the slower processors of some devices closed. `counts` is left with each
    /// device's blocks.
    fn greedy(&mut self, limit: f64, master: usize, closed: u64) -> Option<Cost> {
        let mut counts = std::mem::take(&mut self.counts);
        let cost = self.greedy_into(&mut counts, limit, (master, closed));
        self.counts = counts;
        cost
    }

    fn greedy_into(
        &self,
        counts: &mut [(u32, u32)],
        limit: f64,
        (master, closed): (usize, u64),
    ) -> Option<Cost> {
        let mut left = self.blocks.checked_sub(counts.len() as u32)?;
        let mut room = 0_u64;
        for (d, count) in counts.iter_mut().enumerate() {
            let piece = self.piece(d, master);
            let within = piece.within(limit);
            let most = if is_in(closed, d) { within.min(piece.fast.1) } else { within };
            // Every stage has one block at least.
            *count = (1, most.checked_sub(1)?);
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
            let fast = self.piece(d, master).fast.1.max(1);
            let (have, more) = &mut counts[d];
            let room = if slow { *more } else { (*more).min(fast.saturating_sub(*have)) };
            let take = room.min(left);
            *have += take;
            *more -= take;
            left -= take;
        }
        if left > 0 {
            return None;
        }
        let times = counts.iter().enumerate().map(|(d, &(have, _))| self.piece(d, master).time(have));
        Some(times.fold(Cost { sum: 0.0, slowest: 0.0 }, |cost, time| Cost {
            sum: cost.sum + time,
            slowest: cost.slowest.max(time),
        }))
    }

    /// The smallest sum under a limit, and the devices whose slower processors are closed for it.
    fn smallest_sum(&mut self, limit: f64, master: usize) -> Option<(Cost, u64)> {
        let cost = self.greedy(limit, master, 0)?;
        if !self.jumps {
            return Some((cost, 0));
        }
        let mut best = Best { cost, closed: 0, looked: 0 };
        self.choose((limit, master), Choice::default(), &mut best);
        Some((best.cost, best.closed))
    }

    /// Branches over whether the device with the dearest call in use does without it. Blocks without calls are shared
    /// out at the smallest sum, so that sum and the calls decided on bound what can be found further down.
    fn choose(&mut self, at: (f64, usize), choice: Choice, best: &mut Best) {
        best.looked += 1;
        let Some(cost) = self.greedy(at.0, at.1, choice.closed) else { return };
        if cost.sum < best.cost.sum * (1.0 - SLACK) {
            (best.cost, best.closed) = (cost, choice.closed);
        }
        let (mut undecided, mut dearest) = (0.0, None);
        for d in 0..self.plain.len().min(u64::BITS as usize) {
            let piece = self.piece(d, at.1);
            let in_use = piece.jump > 0.0 && self.counts[d].0 > piece.fast.1;
            if in_use && !is_in(choice.open, d) {
                undecided += piece.jump;
                dearest = dearest.filter(|&(jump, _)| jump >= piece.jump).or(Some((piece.jump, d)));
            }
        }
        let Some((_, device)) = dearest else { return };
        if best.looked >= CHOICES || cost.sum - undecided >= best.cost.sum * (1.0 - SLACK) {
            return;
        }
        self.choose(at, Choice { closed: choice.closed | 1 << device, ..choice }, best);
        self.choose(at, Choice { open: choice.open | 1 << device, ..choice }, best);
    }

    /// What filling under a limit finds, in full.
    fn partition(&mut self, limit: f64, master: usize) -> Option<Partition> {
        let (_, closed) = self.smallest_sum(limit, master)?;
        let cost = self.greedy(limit, master, closed)?;
        let counts = self.counts.iter().enumerate();
        let blocks = counts.map(|(d, &(have, _))| self.piece(d, master).split(have)).collect();
        Some(Partition { master, blocks, slowest: cost.slowest, sum: cost.sum })
    }
}

impl Fill for Waterfill {
    fn masters(&self) -> usize {
        self.plain.len()
    }

    fn least(&mut self, _master: usize) -> f64 {
        0.0
    }

    fn fill(&mut self, most: Cost, master: usize) -> Option<Cost> {
        Some(self.smallest_sum(most.slowest, master)?.0)
    }
}

fn is_in(set: u64, device: usize) -> bool {
    device < u64::BITS as usize && set >> device & 1 == 1
}
