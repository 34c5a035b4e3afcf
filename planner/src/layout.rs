//! Finds the layout of one group of devices for one role: order of the chain, master, blocks, slots, link encoding.
//!
//! It knows nothing of other groups.

use cluster::LinkEncoding;

use crate::chain::{Chain, forward_hops, hops};
use crate::instance::{Buffers, Instance, Processor, Visit};
use crate::partition::dp::{self, Allowed};
use crate::partition::relaxed::Relaxed;
use crate::partition::waterfill::Waterfill;
use crate::partition::{Blocks, Master, Partition, Side, StageModel, Tier, TokenHops, rotation};
use crate::ring::ring;
use crate::settings::{EncodingRule, SlotRule};

/// A role's smaller encodings must gain this much to be worth their rounding.
const ENCODING_GAIN: f64 = 1.01;

/// Rates closer than this, relatively, are equal.
const EQUAL: f64 = 1e-9;

/// Steps of the dynamic program that take as long as one of the algorithm for blocks that are alike.
const STEPS: u64 = 4000;

/// Steps that dynamic programs may take for one group, but for the few most hopeful ones.
const MOST_STEPS: usize = 32_000_000;
const FEW: usize = 4;

/// A group that is to decode: its order, what it needs room for, the most slots that fit, and how rows travel.
#[derive(Debug, Clone, Copy)]
struct Asked<'o> {
    order: &'o [usize],
    buffers: Buffers,
    most: usize,
    encoding: LinkEncoding,
}

/// How a group may be laid out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layouter<'a> {
    pub inst: &'a Instance,
    pub encoding: EncodingRule,
}

impl<'a> Layouter<'a> {
    /// The layout with the fastest slowest stage for prompts, and prompt tokens per second with all stages busy.
    pub(crate) fn prefill(&self, group: &[usize]) -> Option<(Chain, f64)> {
        let order = ring(self.inst, group)?;
        let slots = order.len().min(self.inst.work.max_slots);
        let stages = self.stages(&order, Buffers::Prefill, Visit::Prompt, slots);
        let partition = self.fastest_slowest(&stages, slots)?;
        self.encoded(|encoding, _| {
            let chain = chain_of(&order, &partition, slots, encoding);
            let links = forward_hops(self.inst, &chain.devices, encoding, self.inst.work.prompt);
            let rate = self.inst.work.prompt / partition.slowest.max(links.slowest);
            (rate.is_finite() && rate > 0.0).then_some((chain, rate))
        })
    }

    /// The layout for decoding under a rule for slots, and generated tokens per second with all slots busy.
    pub(crate) fn decode(&self, group: &[usize], rule: SlotRule, buffers: Buffers) -> Option<(Chain, f64)> {
        let order = ring(self.inst, group)?;
        let most = self.most_slots(&order, buffers)?;
        let asked = |encoding| Asked { order: &order, buffers, most, encoding };
        self.encoded(|encoding, above| match rule {
            SlotRule::Largest => self.largest(asked(encoding)),
            SlotRule::MostTokens | SlotRule::Either => self.most_tokens(asked(encoding), above),
        })
    }

    /// About how many steps it takes to lay a group of so many devices out: where blocks are all alike few for each
    /// device, else a dynamic program for each master.
    pub(crate) fn work(&self, devices: usize) -> u64 {
        let (k, n) = (devices as u64, self.inst.n_blocks() as u64);
        if self.fast() { k } else { k + k * k * k * n * n / STEPS }
    }

    /// One run of the partition, for the bench.
    pub(crate) fn partition_once(&self, group: &[usize], buffers: Buffers) -> Option<Partition> {
        let stages = self.stages(group, buffers, Visit::Decode(1), 1);
        self.fastest_slowest(&stages, 1)
    }

    /// The layout with the encoding that the rule says. `layout` is told the rate that it must be above to be of use.
    fn encoded(&self, layout: impl Fn(LinkEncoding, f64) -> Option<(Chain, f64)>) -> Option<(Chain, f64)> {
        match self.encoding {
            EncodingRule::Fixed(encoding) => layout(encoding, 0.0),
            EncodingRule::WhereItBinds => {
                let mut best: Option<(Chain, f64)> = None;
                for encoding in LinkEncoding::ALL {
                    let above = best.as_ref().map_or(0.0, |(_, rate)| rate * ENCODING_GAIN);
                    let found = layout(encoding, above);
                    best = found.filter(|(_, rate)| *rate > above).or(best);
                    if best.as_ref().is_some_and(|(chain, rate)| !self.links_bind(chain, *rate)) {
                        break;
                    }
                }
                best
            }
        }
    }

    /// Whether a chain that computes so many tokens per second would be faster by more than [`ENCODING_GAIN`] if rows took no
    /// bandwidth at all.
    fn links_bind(&self, chain: &Chain, rate: f64) -> bool {
        let tokens = chain.slots as f64;
        let of_rows = |rows: f64| forward_hops(self.inst, &chain.devices, chain.encoding, rows);
        // The same for a prompt's rows as for those of all slots: whichever way they are batched, they pass each link once.
        let (all, none) = (of_rows(tokens), of_rows(0.0));
        let gain = (all.sum - none.sum).max(all.slowest - none.slowest);
        gain * ENCODING_GAIN > (ENCODING_GAIN - 1.0) * tokens / rate
    }

    /// The most slots whose caches fit beside the blocks, of those allowed.
    fn most_slots(&self, order: &[usize], buffers: Buffers) -> Option<usize> {
        let fits = |slots: usize| {
            let stages = self.stages(order, buffers, Visit::Decode(1), slots);
            if self.fast() {
                self.waterfill(&stages, slots).fits()
            } else {
                self.with_allowed(|allowed| dp::fits(&stages, self.blocks(slots), allowed))
            }
        };
        if order.len() > self.inst.n_blocks() || !fits(1) {
            return None;
        }
        let (mut low, mut high) = (1, self.inst.work.max_slots + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        Some(low)
    }

    /// The paper's rule: the largest number of slots at which the partition with the fastest slowest stage keeps the
    /// speed asked for.
    fn largest(&self, asked: Asked<'_>) -> Option<(Chain, f64)> {
        let Asked { order, buffers, most, encoding } = asked;
        let max_tpot = self.inst.work.max_tpot;
        for slots in (1..=most).rev() {
            let least = |g: usize| self.least_tpot(&asked, (slots, g), max_tpot);
            if !self.micro_batches(slots, order.len()).any(|g| least(g) <= max_tpot) {
                continue;
            }
            let rows = self.rows(slots, order.len());
            let stages = self.stages(order, buffers, Visit::Decode(rows), slots);
            let Some(partition) = self.fastest_slowest(&stages, slots) else { continue };
            let chain = chain_of(order, &partition, slots, encoding);
            let tpot = self.tpot(&chain, slots);
            if tpot <= max_tpot {
                return Some((chain, slots as f64 / tpot));
            }
        }
        None
    }

    /// Shoal's rule: slots, micro-batches and partition with the most tokens per second at the speed asked for, if they are
    /// more than `above`; the most slots among equals.
    fn most_tokens(&self, asked: Asked<'_>, above: f64) -> Option<(Chain, f64)> {
        let Asked { order, buffers, encoding, .. } = asked;
        let max_tpot = self.inst.work.max_tpot;
        let mut best: Option<(Chain, f64)> = None;
        let steps = (order.len() * self.inst.n_blocks()).pow(2);
        let tries = if self.fast() { usize::MAX } else { (MOST_STEPS / steps).max(FEW) };
        for (hoped, slots, g) in self.hopeful(&asked, above).into_iter().take(tries) {
            let rate_now = best.as_ref().map_or(above, |(_, rate)| *rate);
            if hoped < rate_now * (1.0 - EQUAL) {
                break;
            }
            // As many tokens at least, and speed enough at all.
            let target = max_tpot.min(slots as f64 / rate_now * (1.0 + EQUAL));
            let rows = if self.inst.serial { 1 } else { slots.div_ceil(g) };
            let stages = self.stages(order, buffers, Visit::Decode(rows), slots);
            let hops = self.token_hops(&asked, (rows, g));
            let Some(partition) = self.fastest_token(&stages, slots, hops, target) else { continue };
            let chain = chain_of(order, &partition, slots, encoding);
            let tpot = self.tpot(&chain, slots);
            let rate = slots as f64 / tpot;
            let better = best.as_ref().is_none_or(|(chain, best)| {
                rate > best * (1.0 + EQUAL) || (rate >= best * (1.0 - EQUAL) && slots > chain.slots)
            });
            if tpot <= max_tpot && rate > above && better {
                best = Some((chain, rate));
            }
        }
        best
    }

    /// Slots and micro-batches that may give more than `above` tokens per second, with what they give at most, the most
    /// hopeful first.
    fn hopeful(&self, asked: &Asked<'_>, above: f64) -> Vec<(f64, usize, usize)> {
        let mut hopeful = Vec::new();
        for slots in (1..=asked.most).rev() {
            let most = self.inst.work.max_tpot.min(slots as f64 / above);
            for g in self.micro_batches(slots, asked.order.len()) {
                // One row more in a micro-batch costs the same for all; where partitions are dear, only full ones are tried.
                if !self.fast() && slots != asked.most && !slots.is_multiple_of(g) {
                    continue;
                }
                let least = self.least_tpot(asked, (slots, g), most);
                if least <= most {
                    hopeful.push((slots as f64 / least, slots, g));
                }
            }
        }
        hopeful.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(a.2.cmp(&b.2)));
        hopeful
    }

    /// No partition has a shorter time per token; looked at closely only where it may be within `most`.
    fn least_tpot(&self, asked: &Asked<'_>, (slots, g): (usize, usize), most: f64) -> f64 {
        let rows = if self.inst.serial { 1 } else { slots.div_ceil(g) };
        let ideal = self.ideal_tpot(asked, (rows, g));
        if self.fast() || ideal > most {
            return ideal;
        }
        let stages = self.stages(asked.order, asked.buffers, Visit::Decode(rows), slots);
        Relaxed::new(&stages, self.blocks(slots)).token(self.token_hops(asked, (rows, g))).max(ideal)
    }

    fn token_hops(&self, asked: &Asked<'_>, (rows, g): (usize, usize)) -> TokenHops {
        let hops = hops(self.inst, asked.order, asked.encoding, rows as f64);
        TokenHops { g: g as f64, links: hops.sum, link: hops.slowest }
    }

    /// The time per token if blocks could be shared out in fractions and all fitted where they are fastest.
    fn ideal_tpot(&self, asked: &Asked<'_>, (rows, g): (usize, usize)) -> f64 {
        let (inst, n) = (self.inst, self.inst.n_blocks() as f64);
        let (mut sum, mut most, mut overheads) = (0.0, 0.0_f64, 0.0);
        // Blocks that a device could compute in the time that it has other things to do.
        let (mut missed, mut head, mut missed_for_head) = (0.0, f64::INFINITY, f64::INFINITY);
        for &d in asked.order {
            let (device, rate) = (&inst.devices[d], inst.block_rate(d, rows));
            let overhead = if asked.order.len() > 1 { device.overhead } else { 0.0 };
            let of_head = device.head_processor(inst.head_bytes).map_or(0.0, |p| p.head[rows]);
            (sum, most) = (sum + rate, most.max(rate));
            (overheads, missed) = (overheads + overhead, missed + overhead * rate);
            (head, missed_for_head) = (head.min(of_head), missed_for_head.min(of_head * rate));
        }
        let TokenHops { g, links, link } = self.token_hops(asked, (rows, g));
        let slowest = (n + missed + missed_for_head) / sum;
        (g * slowest.max(link)).max(n / most + overheads + head + links)
    }

    /// Numbers of micro-batches worth trying: up to one more than fills the chain.
    fn micro_batches(&self, slots: usize, stages: usize) -> std::ops::RangeInclusive<usize> {
        if self.inst.serial { slots..=slots } else { 1..=slots.min(stages + 1) }
    }

    fn rows(&self, slots: usize, stages: usize) -> usize {
        if self.inst.serial { 1 } else { slots.div_ceil(stages.min(slots)) }
    }

    fn tpot(&self, chain: &Chain, slots: usize) -> f64 {
        chain.time_per_token(self.inst, slots).0
    }

    /// Whether the fast algorithm applies.
    fn fast(&self) -> bool {
        self.inst.uniform && self.inst.free_cuts()
    }

    fn waterfill(&self, stages: &[StageModel<'_>], slots: usize) -> Waterfill {
        Waterfill::new(stages, self.inst.need(slots)[0], self.inst.n_blocks())
    }

    fn fastest_slowest(&self, stages: &[StageModel<'_>], slots: usize) -> Option<Partition> {
        if stages.len() > self.inst.n_blocks() {
            return None;
        }
        if self.fast() {
            return self.waterfill(stages, slots).fastest_slowest();
        }
        self.with_allowed(|allowed| dp::partition(stages, self.blocks(slots), allowed))
    }

    /// Calls with the ranges of blocks that may be stages, if not all may.
    fn with_allowed<T>(&self, call: impl FnOnce(Option<Allowed<'_>>) -> T) -> T {
        let allowed = |start: usize, end: usize| self.inst.allows(start, end);
        call((!self.inst.free_cuts()).then_some(&allowed))
    }

    fn fastest_token(
        &self,
        stages: &[StageModel<'_>],
        slots: usize,
        hops: TokenHops,
        target: f64,
    ) -> Option<Partition> {
        let target = target * (1.0 + 1e-9);
        if !self.fast() {
            return self.with_allowed(|allowed| {
                dp::fastest_token(stages, self.blocks(slots), allowed, (hops, target))
            });
        }
        self.waterfill(stages, slots).fastest_token(hops, target)
    }

    fn blocks(&self, slots: usize) -> Blocks<'a> {
        Blocks { kind_of: &self.inst.kind_of, need: self.inst.need(slots) }
    }

    /// The devices as stages with so many slots.
    fn stages(&self, order: &[usize], buffers: Buffers, visit: Visit, slots: usize) -> Vec<StageModel<'a>> {
        let inst = self.inst;
        let of = |&d: &usize| {
            let device = &inst.devices[d];
            let [room, as_master] = [Master::No, Master::Yes].map(|m| inst.room(d, buffers, m, slots));
            let tier = |processor: Option<&'a Processor>, room: f64, room_as_master: f64| {
                let costs = processor.map(|p| p.costs(visit));
                Tier {
                    cost: costs.map_or(&[][..], |c| c.blocks),
                    call: costs.map_or(0.0, |c| c.call),
                    room,
                    room_as_master,
                }
            };
            StageModel {
                gpu: tier(device.gpu.as_ref(), room.gpu, as_master.gpu),
                cpu: tier(device.cpu.as_ref(), room.cpu, as_master.cpu),
                head: device.head_processor(inst.head_bytes).map_or(0.0, |p| p.costs(visit).head),
                head_on: if device.head_on_gpu(inst.head_bytes) { Side::Gpu } else { Side::Cpu },
                embedding: device.embedding(visit),
                overhead: if order.len() > 1 { device.overhead } else { 0.0 },
            }
        };
        order.iter().map(of).collect()
    }
}

/// Rotates a partition so that its master is last.
fn chain_of(order: &[usize], partition: &Partition, slots: usize, encoding: LinkEncoding) -> Chain {
    let places: Vec<usize> = rotation(order.len(), partition.master).collect();
    Chain {
        devices: places.iter().map(|&p| order[p]).collect(),
        blocks: places.iter().map(|&p| partition.blocks[p]).collect(),
        slots,
        encoding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exactness::common::{self, Detail, LinkKind, Shape, TwoKinds};
    use crate::settings::Settings;

    #[test]
    fn a_partition_costs_what_the_chain_it_becomes_costs() {
        for seed in 0..40 {
            let two_kinds = if seed % 2 == 0 { TwoKinds::Yes } else { TwoKinds::No };
            let shape = Shape {
                two_kinds,
                detail: Detail::Full,
                links: LinkKind::Random,
                ..Shape::of(1 + (seed % 4) as usize)
            };
            let problem = common::problem(shape, seed);
            let inst = Instance::new(&problem, &Settings::default()).unwrap();
            let layouter = Layouter { inst: &inst, encoding: Settings::default().encoding };
            let group: Vec<usize> = (0..inst.devices.len()).collect();
            let Some(partition) = layouter.partition_once(&group, Buffers::Decode) else { continue };
            let chain = chain_of(&group, &partition, 1, LinkEncoding::F32);
            let stages: Vec<f64> =
                (0..chain.len()).map(|place| chain.decode_stage(&inst, place, 1)).collect();
            let (slowest, sum) = (stages.iter().copied().fold(0.0, f64::max), stages.iter().sum::<f64>());
            assert!(
                (slowest / partition.slowest - 1.0).abs() < 1e-9,
                "seed {seed}: {partition:?} {stages:?}"
            );
            assert!((sum / partition.sum - 1.0).abs() < 1e-9, "seed {seed}: {partition:?} {stages:?}");
        }
    }

    #[test]
    fn a_gpu_that_was_not_measured_lends_its_memory_to_nobody() {
        let mut problem = common::problem(Shape::of(1), 1);
        problem.profiles[0].cpu = problem.profiles[0].gpu.take();
        let bytes = cluster::Bytes(20_000_000_000);
        problem.devices[0].memory = cluster::DeviceMemory::Discrete { vram: bytes, ram: cluster::Bytes(1) };
        let inst = Instance::new(&problem, &Settings::default()).unwrap();
        let room = |inst: &Instance| inst.room(0, Buffers::Decode, Master::No, 1);
        assert!(room(&inst).gpu < 0.0 && room(&inst).cpu < 0.0);
        problem.devices[0].memory = cluster::DeviceMemory::Unified { total: bytes };
        let inst = Instance::new(&problem, &Settings::default()).unwrap();
        assert_eq!(room(&inst).cpu, 20_000_000_000.0 - inst.devices[0].decode_buffer);
    }
}
