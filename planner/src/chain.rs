//! One replica, laid out: its stages in order, the master last, with the times that follow from the curves.
//!
//! It does not know how the layout was found, nor what other replicas there are.

use cluster::LinkEncoding;

use crate::instance::{Instance, PREFILL_GRID, Processor, chunks};

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

/// Times of a prefill on a chain, for prompts of any length.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillTimes {
    chunk: f64,
    /// At each point of the grid up to the chunk: tokens, slowest stage, whole pass.
    points: Vec<(f64, Pass)>,
}

impl PrefillTimes {
    /// Seconds between prompts when they follow each other, and from a prompt's start to its end.
    pub(crate) fn of(&self, tokens: f64) -> Pass {
        let (full, rest) = chunks(tokens, self.chunk);
        let last = if rest > 0.0 { self.at(rest) } else { Pass { sum: 0.0, slowest: 0.0 } };
        if full == 0.0 {
            return last;
        }
        let whole = self.at(self.chunk);
        // Chunks follow each other through the chain as a wave.
        Pass {
            sum: whole.sum + (full - 1.0) * whole.slowest + last.slowest,
            slowest: full * whole.slowest + last.slowest,
        }
    }

    /// Tokens of a chunk.
    pub(crate) fn chunk(&self) -> f64 {
        self.chunk
    }

    /// Times that grow in proportion to the prompt, the same for the whole pass as for the slowest stage.
    pub(crate) fn proportional(seconds_per_token: f64, chunk: f64) -> Self {
        let point = |tokens: f64| {
            let seconds = tokens * seconds_per_token;
            (tokens, Pass { sum: seconds, slowest: seconds })
        };
        Self { chunk, points: vec![point(0.0), point(chunk)] }
    }

    fn at(&self, tokens: f64) -> Pass {
        let above = self.points.partition_point(|p| p.0 < tokens).clamp(1, self.points.len().max(2) - 1);
        let (Some(&(a, low)), Some(&(b, high))) = (self.points.get(above - 1), self.points.get(above)) else {
            return self.points.first().map_or(Pass { sum: 0.0, slowest: 0.0 }, |p| p.1);
        };
        let share = ((tokens - a) / (b - a)).max(0.0);
        let between = |x: f64, y: f64| x + (y - x) * share;
        Pass { sum: between(low.sum, high.sum), slowest: between(low.slowest, high.slowest) }
    }
}

impl Chain {
    pub(crate) fn len(&self) -> usize {
        self.devices.len()
    }

    /// Time of stage `place`, with costs by type for GPU and CPU read by `cost`, and of the head by `head`.
    fn stage<'a>(
        &self,
        inst: &'a Instance,
        place: usize,
        cost: &dyn Fn(&'a Processor) -> &'a [f64],
        head: &dyn Fn(&Processor) -> f64,
    ) -> f64 {
        let device = &inst.devices[self.devices[place]];
        let (gpu, cpu) = self.blocks[place];
        let start: u32 = self.blocks[..place].iter().map(|b| b.0 + b.1).sum();
        let of = |processor: Option<&'a Processor>, from: u32, count: u32| {
            let Some(costs) = processor.map(cost).filter(|_| count > 0) else { return 0.0 };
            if inst.uniform {
                return f64::from(count) * costs[0];
            }
            let kinds = &inst.kind_of[from as usize..(from + count) as usize];
            kinds.iter().map(|&kind| costs[usize::from(kind)]).sum()
        };
        let mut time = of(device.cpu.as_ref(), start, cpu) + of(device.gpu.as_ref(), start + cpu, gpu);
        if self.len() > 1 {
            time += device.overhead;
        }
        if place + 1 == self.len() {
            time += head_processor(inst, self.devices[place]).map_or(0.0, head);
        }
        time
    }

    /// Time of one stage in a decode step of `rows` rows.
    pub(crate) fn decode_stage(&self, inst: &Instance, place: usize, rows: usize) -> f64 {
        self.stage(inst, place, &|p| p.decode(rows), &|p| p.head[rows])
    }

    /// One decode step of `rows` rows, the token's way back included.
    pub(crate) fn decode(&self, inst: &Instance, rows: usize) -> Pass {
        let hops = hops(inst, &self.devices, self.encoding, rows as f64);
        let mut pass = Pass { sum: hops.sum, slowest: hops.slowest };
        for place in 0..self.len() {
            let time = self.decode_stage(inst, place, rows);
            pass.sum += time;
            pass.slowest = pass.slowest.max(time);
        }
        pass
    }

    /// Time of one stage for the mean prompt.
    pub(crate) fn prefill_stage(&self, inst: &Instance, place: usize) -> f64 {
        self.stage(inst, place, &|p| &p.prefill, &|p| p.head[1])
    }

    /// Times of prompts of any length.
    pub(crate) fn prefill(&self, inst: &Instance, chunk: f64) -> PrefillTimes {
        let mut points: Vec<(f64, Pass)> = Vec::with_capacity(PREFILL_GRID.len());
        for (point, &tokens) in PREFILL_GRID.iter().enumerate() {
            let forward = forward_hops(inst, &self.devices, self.encoding, tokens);
            let mut pass = Pass { sum: forward.sum, slowest: forward.slowest };
            for place in 0..self.len() {
                let time = self.stage(inst, place, &|p| p.prefill_at(point), &|p| p.head[1]);
                pass.sum += time;
                pass.slowest = pass.slowest.max(time);
            }
            points.push((tokens, pass));
        }
        PrefillTimes { chunk, points }
    }

    /// Time per token with `n` requests running, for each `n` from 1 to the slots; index 0 repeats the first.
    pub(crate) fn tpot(&self, inst: &Instance) -> Vec<f64> {
        let passes: Vec<Pass> = (0..=self.slots.max(1))
            .map(|rows| self.decode(inst, if inst.serial { 1 } else { rows.max(1) }))
            .collect();
        (0..=self.slots.max(1))
            .map(|n| time_per_token(inst.serial, n.max(1), &|rows| passes[rows]).0)
            .collect()
    }

    /// Seconds per prompt token, and fixed seconds, to hand a prompt's cache over to another replica: what the
    /// busiest network card on either side takes.
    pub(crate) fn handover(&self, inst: &Instance, to: &Self) -> (f64, f64) {
        let (mut sent, mut received) = (vec![0.0; self.len()], vec![0.0; to.len()]);
        let mut latency: f64 = 0.0;
        let (mine, theirs) = (self.ranges(), to.ranges());
        for (i, a) in mine.iter().enumerate() {
            for (j, b) in theirs.iter().enumerate() {
                let overlap = a.0.max(b.0)..a.1.min(b.1);
                let bytes: f64 = overlap.map(|l| inst.kv_per_token[usize::from(inst.kind_of[l])]).sum();
                if bytes > 0.0 && self.devices[i] != to.devices[j] {
                    let (per_byte, lag) = inst.link(self.devices[i], to.devices[j]);
                    sent[i] += bytes * per_byte;
                    received[j] += bytes * per_byte;
                    latency = latency.max(lag);
                }
            }
        }
        (sent.into_iter().chain(received).fold(0.0, f64::max), latency)
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

/// The processor that computes norm and head when a device is the master.
pub(crate) fn head_processor(inst: &Instance, device: usize) -> Option<&Processor> {
    let device = &inst.devices[device];
    if device.head_on_gpu(inst.head_bytes) { device.gpu.as_ref() } else { device.cpu.as_ref() }
}

/// `min over g of max(Λ(b), g · T_slowest(b))` with `b = ⌈n/g⌉`, and the best g. In the serial reading every request
/// is a micro-batch of its own.
pub(crate) fn time_per_token(serial: bool, n: usize, pass: &dyn Fn(usize) -> Pass) -> (f64, usize) {
    let of = |g: usize| {
        let pass = pass(n.div_ceil(g));
        pass.sum.max(g as f64 * pass.slowest)
    };
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
