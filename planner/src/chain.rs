//! One replica, laid out: its stages in order, the master last, with the times that follow from the curves.
//!
//! It does not know how the layout was found, nor what other replicas there are.

use cluster::LinkEncoding;

use crate::instance::{DEPTH_GRID, Handed, Instance, PREFILL_GRID, Processor, Visit, at_depth, at_tokens};
use crate::prefill::PrefillTimes;
use crate::sim::Handover;

/// Rounds, and what is left between two of them, after which the time of cold calls is known well enough.
const COLD_ROUNDS: usize = 24;
const COLD_SLACK: f64 = 1e-4;

/// Bytes of a token id on its way back to the first stage.
const TOKEN_BYTES: f64 = 4.0;

/// A replica's layout.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Chain {
    /// Devices in order; the last is the master.
    pub devices: Vec<usize>,
    /// Blocks on GPU and CPU of each.
    pub blocks: Vec<(u32, u32)>,
    pub slots: usize,
    pub encoding: LinkEncoding,
}

/// Sum and maximum over a chain's stages and links, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pass {
    /// One pass through every stage and link.
    pub sum: f64,
    /// The slowest stage or link.
    pub slowest: f64,
}

/// Links of a chain: the sum of all and the slowest, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Hops {
    pub sum: f64,
    pub slowest: f64,
}

impl Chain {
    pub(crate) fn len(&self) -> usize {
        self.devices.len()
    }

    /// Adds up what a stage's blocks cost on GPU and CPU, by type and for every processor that it uses.
    fn over_blocks<'a>(
        &self,
        inst: &'a Instance,
        place: usize,
        cost: &dyn Fn(&'a Processor, BlocksOn) -> f64,
    ) -> f64 {
        let device = &inst.devices[self.devices[place]];
        let (gpu, cpu) = self.blocks[place];
        let start: u32 = self.blocks[..place].iter().map(|b| b.0 + b.1).sum();
        let of = |processor: Option<&'a Processor>, start: u32, count: u32| {
            processor.filter(|_| count > 0).map_or(0.0, |p| cost(p, BlocksOn { start, count }))
        };
        of(device.cpu.as_ref(), start, cpu) + of(device.gpu.as_ref(), start + cpu, gpu)
    }

    /// Time of one visit of a stage.
    pub(crate) fn stage(&self, inst: &Instance, place: usize, visit: Visit) -> f64 {
        let device = &inst.devices[self.devices[place]];
        let mut time = self.over_blocks(inst, place, &|processor, blocks| {
            let costs = processor.costs(visit);
            costs.call + blocks.sum(inst, costs.blocks)
        });
        if self.len() > 1 {
            time += device.overhead;
        }
        if place == 0 {
            time += device.embedding(visit);
        }
        if place + 1 == self.len()
            && let Some(processor) = device.head_processor(inst.head_bytes)
        {
            let (gpu, cpu) = self.blocks[place];
            let costs = processor.costs(visit);
            let has_blocks = if device.head_on_gpu(inst.head_bytes) { gpu > 0 } else { cpu > 0 };
            time += costs.head + if has_blocks { 0.0 } else { costs.call };
        }
        time
    }

    /// Time of one stage in a decode step of `rows` rows.
    pub(crate) fn decode_stage(&self, inst: &Instance, place: usize, rows: usize) -> f64 {
        self.stage(inst, place, Visit::Decode(rows))
    }

    /// One decode step of `rows` rows, the token's way back included.
    pub(crate) fn decode(&self, inst: &Instance, rows: usize) -> Pass {
        let hops = hops(inst, &self.devices, self.encoding, rows as f64);
        self.pass(hops, |place| self.stage(inst, place, Visit::Decode(rows)))
    }

    fn pass(&self, hops: Hops, stage: impl Fn(usize) -> f64) -> Pass {
        let links = Pass { sum: hops.sum, slowest: hops.slowest };
        (0..self.len())
            .map(stage)
            .fold(links, |pass, time| Pass { sum: pass.sum + time, slowest: pass.slowest.max(time) })
    }

    /// Time of one stage for the mean prompt.
    pub(crate) fn prefill_stage(&self, inst: &Instance, place: usize) -> f64 {
        self.stage(inst, place, Visit::Prompt)
    }

    /// Times of prompts of any length, in chunks of so many tokens.
    pub(crate) fn prefill(&self, inst: &Instance, chunk: f64) -> PrefillTimes {
        let forward = |tokens: f64| forward_hops(inst, &self.devices, self.encoding, tokens);
        let stages: Vec<Vec<f64>> = (0..PREFILL_GRID.len())
            .map(|point| (0..self.len()).map(|place| self.stage(inst, place, Visit::Chunk(point))).collect())
            .collect();
        let points = PREFILL_GRID.iter().zip(&stages);
        let points = points.map(|(&tokens, stages)| (tokens, self.pass(forward(tokens), |p| stages[p])));
        let times = PrefillTimes::new(chunk, points.collect());
        // What a token costs on top at each depth, for each stage.
        let on_top: Vec<Vec<f64>> = (0..self.len())
            .map(|p| (0..DEPTH_GRID.len()).map(|d| self.on_top(inst, p, d)).collect())
            .collect();
        if on_top.iter().flatten().all(|seconds| *seconds == 0.0) {
            return times;
        }
        let hops = forward(chunk);
        times.deeper(inst.context, |depth| {
            self.pass(hops, |place| {
                let shallow = at_tokens(chunk, |point| stages[point][place]);
                (shallow + chunk * at_depth(depth, |point| on_top[place][point])).max(0.0)
            })
        })
    }

    /// Seconds that a prompt token costs a stage on top at a point of [`DEPTH_GRID`].
    fn on_top(&self, inst: &Instance, place: usize, point: usize) -> f64 {
        self.over_blocks(inst, place, &|processor, blocks| {
            processor.deeper(point).map_or(0.0, |costs| blocks.sum(inst, costs))
        })
    }

    /// Time per token with `n` requests running, for each `n` from 1 to the slots; index 0 repeats the first.
    pub(crate) fn tpot(&self, inst: &Instance) -> Vec<f64> {
        let passes: Vec<Pass> = (0..=self.slots.max(1))
            .map(|rows| self.decode(inst, if inst.serial { 1 } else { rows.max(1) }))
            .collect();
        let step = |rows: usize, g: usize| self.with_cold_calls(inst, passes[rows], (rows, g));
        (0..=self.slots.max(1)).map(|n| time_per_token(inst.serial, n.max(1), &step).0).collect()
    }

    /// Time per token with `n` requests running, and in how many micro-batches.
    pub(crate) fn time_per_token(&self, inst: &Instance, n: usize) -> (f64, usize) {
        let step = |rows: usize, g: usize| self.with_cold_calls(inst, self.decode(inst, rows), (rows, g));
        time_per_token(inst.serial, n, &step)
    }

    /// Time per token of `g` micro-batches of `rows` rows: that of a warm pass, and what stages take longer that have idled
    /// meanwhile (DySCo, the controlled idle-gap experiment). The longer a token takes, the longer they idle, so that is
    /// found step by step, from below.
    fn with_cold_calls(&self, inst: &Instance, pass: Pass, (rows, g): (usize, usize)) -> f64 {
        let warm = pass.sum.max(g as f64 * pass.slowest);
        let cools = |device: &usize| inst.devices[*device].cold.is_some();
        if self.len() == 1 || !self.devices.iter().any(cools) {
            return warm;
        }
        let stages: Vec<f64> = (0..self.len()).map(|place| self.decode_stage(inst, place, rows)).collect();
        let mut time = warm;
        for _ in 0..COLD_ROUNDS {
            let period = time / g as f64;
            let places = self.devices.iter().zip(&stages);
            let longer: f64 = places.map(|(&d, seconds)| inst.devices[d].cold_call(period - seconds)).sum();
            let next = warm.max(pass.sum + longer);
            if next <= time * (1.0 + COLD_SLACK) {
                break;
            }
            time = next;
        }
        time
    }

    /// What handing a prompt's cache over to another replica takes: the time of the busiest network card on either side.
    pub(crate) fn handover(&self, inst: &Instance, to: &Self) -> Handover {
        let none = Handover { window: inst.window, ..Handover::default() };
        let (mut sent, mut received) = (vec![none; self.len()], vec![none; to.len()]);
        let mut latency: f64 = 0.0;
        let (mine, theirs) = (self.ranges(), to.ranges());
        for (i, a) in mine.iter().enumerate() {
            for (j, b) in theirs.iter().enumerate() {
                let overlap = a.0.max(b.0)..a.1.min(b.1);
                if overlap.is_empty() || self.devices[i] == to.devices[j] {
                    continue;
                }
                let (per_byte, lag) = inst.link(self.devices[i], to.devices[j]);
                for block in overlap {
                    let bytes = inst.handed[usize::from(inst.kind_of[block])];
                    add_bytes(&mut sent[i], bytes, per_byte);
                    add_bytes(&mut received[j], bytes, per_byte);
                }
                latency = latency.max(lag);
            }
        }
        let busy = |card: &Handover| card.seconds(inst.work.prompt);
        let cards = sent.into_iter().chain(received);
        let busiest = cards.fold(none, |a, b| if busy(&b) > busy(&a) { b } else { a });
        Handover { fixed: busiest.fixed + latency, ..busiest }
    }

    /// First block and one past the last of each stage.
    pub(crate) fn ranges(&self) -> Vec<(usize, usize)> {
        let mut start = 0;
        let lengths = self.blocks.iter().map(|b| (b.0 + b.1) as usize);
        lengths
            .map(|n| {
                start += n;
                (start - n, start)
            })
            .collect()
    }
}

/// Blocks of a stage that one processor computes.
#[derive(Debug, Clone, Copy)]
struct BlocksOn {
    start: u32,
    count: u32,
}

impl BlocksOn {
    fn sum(self, inst: &Instance, costs: &[f64]) -> f64 {
        if inst.uniform {
            return f64::from(self.count) * costs[0];
        }
        let kinds = &inst.kind_of[self.start as usize..(self.start + self.count) as usize];
        kinds.iter().map(|&kind| costs[usize::from(kind)]).sum()
    }
}

fn add_bytes(card: &mut Handover, bytes: Handed, per_byte: f64) {
    // Times of a link that is not there must not become 0 · ∞.
    let seconds = |bytes: f64| if bytes > 0.0 { bytes * per_byte } else { 0.0 };
    card.per_token += seconds(bytes.per_token);
    card.per_token_in_window += seconds(bytes.per_token_in_window);
    card.fixed += seconds(bytes.fixed);
}

/// `min over g of max(Λ(b), g · T_slowest(b))` with `b = ⌈n/g⌉`, and the best g; `step` is the maximum, by b and g. In the
/// serial reading every request is a micro-batch of its own.
fn time_per_token(serial: bool, n: usize, step: &dyn Fn(usize, usize) -> f64) -> (f64, usize) {
    let of = |g: usize| step(n.div_ceil(g), g);
    if serial {
        return (of(n), n);
    }
    // Of all g with one number of rows the smallest is the best.
    let mut best = (of(1), 1);
    for rows in (1..n).rev() {
        let g = n.div_ceil(rows);
        if n.div_ceil(g) == rows {
            let time = of(g);
            if time < best.0 {
                best = (time, g);
            }
        }
    }
    best
}

/// All hops of a decode step: rows forward, a token id back to the first stage.
pub(crate) fn hops(inst: &Instance, chain: &[usize], encoding: LinkEncoding, rows: f64) -> Hops {
    let forward = forward_hops(inst, chain, encoding, rows);
    match chain {
        [first, .., last] => {
            let (per_byte, latency) = inst.link(*last, *first);
            let back = per_byte * rows * TOKEN_BYTES + latency;
            Hops { sum: forward.sum + back, slowest: forward.slowest.max(back) }
        }
        _ => forward,
    }
}

/// The hops from the first stage to the last.
pub(crate) fn forward_hops(inst: &Instance, chain: &[usize], encoding: LinkEncoding, rows: f64) -> Hops {
    let bytes = rows * inst.row_bytes * encoding.share();
    let times = chain.windows(2).map(|pair| {
        let (per_byte, latency) = inst.link(pair[0], pair[1]);
        per_byte * bytes + latency
    });
    times.fold(Hops { sum: 0.0, slowest: 0.0 }, |all, time| Hops {
        sum: all.sum + time,
        slowest: all.slowest.max(time),
    })
}

#[cfg(test)]
mod tests {
    use cluster::{ColdCall, Millis};

    use super::*;
    use crate::exactness::common::{self, Detail, Shape};
    use crate::settings::Settings;

    /// Three devices in a chain, eight blocks each, with what idling costs them.
    fn chain(cold: Option<&ColdCall>) -> (Instance, Chain) {
        let mut problem = common::problem(Shape { detail: Detail::Full, ..Shape::of(3) }, 4);
        problem.profiles.iter_mut().for_each(|profile| profile.cold_call = cold.cloned());
        let chain =
            Chain { devices: vec![0, 1, 2], blocks: vec![(8, 0); 3], slots: 12, encoding: LinkEncoding::F32 };
        (Instance::new(&problem, &Settings::default()).unwrap(), chain)
    }

    #[test]
    fn stages_that_wait_for_their_turn_start_cold() {
        let cold = ColdCall::new(vec![Millis(5.0), Millis(25.0)], vec![Millis(1.0), Millis(8.0)]).unwrap();
        let ((inst, chain), (warm, _)) = (chain(Some(&cold)), chain(None));
        let (time, g) = chain.time_per_token(&inst, 1);
        assert_eq!(g, 1);
        // Each stage idles while the others work, and is so much longer as its own curve says for that gap.
        let mut expected = chain.decode(&inst, 1).sum;
        for place in 0..3 {
            let slack = time - chain.decode_stage(&inst, place, 1);
            let (mut low, mut high) = (0.0, slack);
            for _ in 0..60 {
                let middle = (low + high) / 2.0;
                let longer = cold.after(Millis((slack - middle) * 1e3)).0 / 1e3;
                if longer > middle { low = middle } else { high = middle }
            }
            assert!(low > 0.0);
            expected += low;
        }
        assert!((time / expected - 1.0).abs() < 1e-3, "{time} instead of {expected}");
        let tpot = chain.tpot(&inst);
        assert_eq!(tpot[1], time);
        assert!(tpot.iter().zip(chain.tpot(&warm)).all(|(cold, warm)| *cold >= warm));
    }

    #[test]
    fn a_stage_that_is_never_idle_is_never_cold() {
        let cold = ColdCall::new(vec![Millis(0.001)], vec![Millis(50.0)]).unwrap();
        let (inst, chain) = chain(Some(&cold));
        let alone = Chain { devices: vec![0], blocks: vec![(24, 0)], ..chain.clone() };
        assert_eq!(alone.time_per_token(&inst, 4).0, alone.decode(&inst, 4).sum);
        // With enough micro-batches the slowest stage has no gap, and the time per token is what it takes for all of them.
        let slowest = chain.decode(&inst, 1).slowest;
        let busy = chain.with_cold_calls(&inst, chain.decode(&inst, 1), (1, 200));
        assert!((busy / (200.0 * slowest) - 1.0).abs() < 1e-6, "{busy}");
    }
}
