//! Finds the layout of one group of devices for one role: order of the chain, master, blocks, slots, link encoding.
//!
//! It knows nothing of other groups.

use cluster::LinkEncoding;

use crate::chain::{Chain, Pass, forward_hops, hops, time_per_token};
use crate::instance::{Buffers, Instance, Processor, Visit};
use crate::partition::dp::{self, Allowed};
use crate::partition::waterfill::Waterfill;
use crate::partition::{Blocks, Master, Partition, Side, StageModel, Tier, TokenHops, rotation};
use crate::ring::ring;
use crate::settings::{EncodingRule, SlotRule};

/// A role's smaller encodings must gain this much to be worth their rounding.
const ENCODING_GAIN: f64 = 1.01;

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
        self.encoded(|encoding| {
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
        self.encoded(|encoding| match rule {
            SlotRule::Largest => self.largest(&order, buffers, most, encoding),
            SlotRule::MostTokens | SlotRule::Either => self.most_tokens(&order, buffers, most, encoding),
        })
    }

    /// One run of the partition, for the bench.
    pub(crate) fn partition_once(&self, group: &[usize], buffers: Buffers) -> Option<Partition> {
        let stages = self.stages(group, buffers, Visit::Decode(1), 1);
        self.fastest_slowest(&stages, 1)
    }

    fn encoded(&self, layout: impl Fn(LinkEncoding) -> Option<(Chain, f64)>) -> Option<(Chain, f64)> {
        match self.encoding {
            EncodingRule::Fixed(encoding) => layout(encoding),
            EncodingRule::WhereItBinds => {
                let all: Vec<_> = LinkEncoding::ALL.into_iter().filter_map(layout).collect();
                let best = all.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
                all.into_iter().find(|(_, rate)| rate * ENCODING_GAIN >= best)
            }
        }
    }

    /// The most slots whose caches fit beside the blocks, of those allowed.
    fn most_slots(&self, order: &[usize], buffers: Buffers) -> Option<usize> {
        let fits = |slots: usize| {
            let stages = self.stages(order, buffers, Visit::Decode(1), slots);
            if self.fast() {
                self.waterfill(&stages, slots).fits()
            } else {
                self.fastest_slowest(&stages, slots).is_some()
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
    fn largest(
        &self,
        order: &[usize],
        buffers: Buffers,
        most: usize,
        encoding: LinkEncoding,
    ) -> Option<(Chain, f64)> {
        let max_tpot = self.inst.work.max_tpot;
        for slots in (1..=most).rev() {
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

    /// Shoal's rule: slots, micro-batches and partition with the most tokens per second at the speed asked for; the
    /// most slots among equals.
    fn most_tokens(
        &self,
        order: &[usize],
        buffers: Buffers,
        most: usize,
        encoding: LinkEncoding,
    ) -> Option<(Chain, f64)> {
        let max_tpot = self.inst.work.max_tpot;
        let mut best: Option<(Chain, f64)> = None;
        for slots in (1..=most).rev() {
            for g in self.micro_batches(slots, order.len()) {
                let rows = if self.inst.serial { 1 } else { slots.div_ceil(g) };
                // Strictly more tokens, or speed enough at all.
                let target = best.as_ref().map_or(max_tpot, |(_, rate)| max_tpot.min(slots as f64 / rate));
                if self.ideal_tpot(order, rows, g) > target {
                    continue;
                }
                let stages = self.stages(order, buffers, Visit::Decode(rows), slots);
                let hops = hops(self.inst, order, encoding, rows as f64);
                let hops = TokenHops { g: g as f64, links: hops.sum, link: hops.slowest };
                let Some(partition) = self.fastest_token(&stages, slots, hops, target) else { continue };
                let chain = chain_of(order, &partition, slots, encoding);
                let tpot = self.tpot(&chain, slots);
                let rate = slots as f64 / tpot;
                if tpot <= max_tpot && best.as_ref().is_none_or(|(_, r)| rate > r * (1.0 + 1e-9)) {
                    best = Some((chain, rate));
                }
            }
        }
        best
    }

    /// The time per token if blocks could be shared out in fractions and all fitted where they are fastest.
    fn ideal_tpot(&self, order: &[usize], rows: usize, g: usize) -> f64 {
        let n = self.inst.n_blocks() as f64;
        let rates = order.iter().map(|&d| self.inst.block_rate(d, rows));
        let (sum, most) = rates.fold((0.0, 0.0_f64), |(sum, most), rate| (sum + rate, most.max(rate)));
        (g as f64 * n / sum).max(n / most)
    }

    /// Numbers of micro-batches worth trying: up to one more than fills the chain.
    fn micro_batches(&self, slots: usize, stages: usize) -> std::ops::RangeInclusive<usize> {
        if self.inst.serial { slots..=slots } else { 1..=slots.min(stages + 1) }
    }

    fn rows(&self, slots: usize, stages: usize) -> usize {
        if self.inst.serial { 1 } else { slots.div_ceil(stages.min(slots)) }
    }

    fn tpot(&self, chain: &Chain, slots: usize) -> f64 {
        time_per_token(self.inst.serial, slots, &|rows| -> Pass { chain.decode(self.inst, rows) }).0
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
        let allowed = |start: usize, end: usize| self.inst.allows(start, end);
        let allowed: Option<Allowed<'_>> = (!self.inst.free_cuts()).then_some(&allowed);
        dp::partition(stages, self.blocks(slots), allowed)
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
            let allowed = |start: usize, end: usize| self.inst.allows(start, end);
            let allowed: Option<Allowed<'_>> = (!self.inst.free_cuts()).then_some(&allowed);
            return dp::fastest_token(stages, self.blocks(slots), allowed, (hops, target));
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
