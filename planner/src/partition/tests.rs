//! The two algorithms against every partition there is, and against each other.

use proptest::prelude::*;

use super::dp;
use super::relaxed::Relaxed;
use super::waterfill::Waterfill;
use super::*;
use crate::rng::Rng;

/// A device's costs and room, owned.
#[derive(Debug, Clone)]
struct Device {
    gpu: Vec<f64>,
    cpu: Vec<f64>,
    gpu_room: f64,
    cpu_room: f64,
    gpu_call: f64,
    cpu_call: f64,
    head: f64,
    head_on: Side,
    embedding: f64,
    overhead: f64,
}

#[derive(Debug, Clone)]
struct Case {
    devices: Vec<Device>,
    kind_of: Vec<u16>,
    need: Vec<f64>,
}

const HEAD_BYTES: f64 = 1.3;

fn case(seed: u64, kinds: usize) -> Case {
    let mut rng = Rng::new(seed);
    let n = 3 + rng.below(6);
    let devices = (0..1 + rng.below(4))
        .map(|_| {
            let speed = rng.between(0.5, 4.0);
            let slower = rng.between(1.0, 6.0);
            let costs: Vec<f64> = (0..kinds).map(|_| speed * rng.between(0.5, 1.5)).collect();
            let with_cpu = rng.unit() < 0.5;
            // Half of all devices have calls and embeddings measured apart.
            let apart = if rng.unit() < 0.5 { 1.0 } else { 0.0 };
            Device {
                cpu: if with_cpu { costs.iter().map(|c| c * slower).collect() } else { Vec::new() },
                gpu: costs,
                gpu_room: rng.between(0.0, 8.0),
                cpu_room: if with_cpu { rng.between(0.0, 8.0) } else { 0.0 },
                gpu_call: apart * rng.between(0.0, 1.5),
                cpu_call: apart * rng.between(0.0, 4.0),
                head: rng.between(0.0, 2.0),
                head_on: if with_cpu && rng.unit() < 0.2 { Side::Cpu } else { Side::Gpu },
                embedding: apart * rng.between(0.0, 1.0),
                overhead: rng.between(0.0, 0.3),
            }
        })
        .collect();
    Case {
        devices,
        kind_of: (0..n).map(|_| rng.below(kinds) as u16).collect(),
        need: (0..kinds).map(|_| rng.between(0.5, 1.5)).collect(),
    }
}

impl Case {
    fn stages(&self) -> Vec<StageModel<'_>> {
        self.devices
            .iter()
            .map(|d| {
                let master = |room: f64, side| if d.head_on == side { room - HEAD_BYTES } else { room };
                let tier =
                    |cost, call, room, side| Tier { cost, call, room, room_as_master: master(room, side) };
                StageModel {
                    gpu: tier(&d.gpu, d.gpu_call, d.gpu_room, Side::Gpu),
                    cpu: tier(&d.cpu, d.cpu_call, d.cpu_room, Side::Cpu),
                    head: d.head,
                    head_on: d.head_on,
                    embedding: d.embedding,
                    overhead: d.overhead,
                }
            })
            .collect()
    }

    fn blocks(&self) -> Blocks<'_> {
        Blocks { kind_of: &self.kind_of, need: &self.need }
    }

    /// Time of a stage of blocks `[start, end)`, by trying the GPU's part from the largest down: none if it fits nowhere.
    fn stage(&self, device: usize, master: bool, start: usize, end: usize) -> Option<f64> {
        let d = &self.devices[device];
        let head = |side| if master && d.head_on == side { HEAD_BYTES } else { 0.0 };
        let sum = |of: &[f64], from: usize, to: usize| -> f64 {
            self.kind_of[from..to].iter().map(|&k| of[usize::from(k)]).sum()
        };
        let room = d.gpu_room - head(Side::Gpu);
        let at = (start..=end).find(|&at| at == end || sum(&self.need, at, end) <= room)?;
        if at > start && (d.cpu.is_empty() || sum(&self.need, start, at) > d.cpu_room - head(Side::Cpu)) {
            return None;
        }
        let mut time = d.overhead + sum(&d.gpu, at, end);
        time += if at > start { sum(&d.cpu, start, at) } else { 0.0 };
        time += if master { d.head } else { 0.0 };
        time += if start == 0 { d.embedding } else { 0.0 };
        for (side, call, has_blocks) in
            [(Side::Gpu, d.gpu_call, end > at), (Side::Cpu, d.cpu_call, at > start)]
        {
            time += if has_blocks || (master && d.head_on == side) { call } else { 0.0 };
        }
        Some(time)
    }

    /// Calls `visit` with slowest stage and sum of every partition.
    fn all(&self, visit: &mut dyn FnMut(f64, f64)) {
        let k = self.devices.len();
        for master in 0..k {
            let chain: Vec<usize> = rotation(k, master).collect();
            self.extend(&chain, 0, (0.0, 0.0), visit);
        }
    }

    fn extend(&self, chain: &[usize], start: usize, cost: (f64, f64), visit: &mut dyn FnMut(f64, f64)) {
        let n = self.kind_of.len();
        let Some((&device, rest)) = chain.split_first() else {
            if start == n {
                visit(cost.0, cost.1);
            }
            return;
        };
        for end in start + 1..=n {
            if let Some(time) = self.stage(device, rest.is_empty(), start, end) {
                self.extend(rest, end, (cost.0.max(time), cost.1 + time), visit);
            }
        }
    }

    /// The best slowest stage, and the best sum with it.
    fn brute_force(&self) -> Option<(f64, f64)> {
        let mut best: Option<(f64, f64)> = None;
        self.all(&mut |slowest, sum| {
            let better =
                best.is_none_or(|(s, t)| slowest < s - 1e-12 || (slowest <= s + 1e-12 && sum < t - 1e-12));
            if better {
                best = Some((slowest, sum));
            }
        });
        best
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-8 * a.abs().max(b.abs())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_dynamic_program_equals_brute_force(seed: u64, kinds in 1_usize..4) {
        let case = case(seed, kinds);
        let found = dp::partition(&case.stages(), case.blocks(), None);
        match (found, case.brute_force()) {
            (None, None) => {}
            (Some(found), Some((slowest, sum))) => {
                prop_assert!(near(found.slowest, slowest), "{} instead of {slowest}", found.slowest);
                prop_assert!(near(found.sum, sum), "{} instead of {sum}", found.sum);
                let blocks: u32 = found.blocks.iter().map(|b| b.0 + b.1).sum();
                prop_assert_eq!(blocks as usize, case.kind_of.len());
                prop_assert!(found.blocks.iter().all(|b| b.0 + b.1 > 0));
            }
            (found, best) => prop_assert!(false, "{found:?} instead of {best:?}"),
        }
    }

    #[test]
    fn blocks_all_alike_are_shared_out_as_by_the_dynamic_program(seed: u64) {
        let case = case(seed, 1);
        let stages = case.stages();
        let mut filled = Waterfill::new(&stages, case.need[0], case.kind_of.len());
        let expected = dp::partition(&stages, case.blocks(), None);
        prop_assert_eq!(filled.fits(), expected.is_some());
        if let (Some(found), Some(expected)) = (filled.fastest_slowest(), expected) {
            prop_assert!(near(found.slowest, expected.slowest), "{found:?} {expected:?}");
            prop_assert!(near(found.sum, expected.sum), "{found:?} {expected:?}");
        }
    }

    #[test]
    fn no_partition_gives_a_token_sooner(seed: u64, g in 1_u32..6, kinds in 1_usize..4) {
        let case = case(seed, kinds);
        let stages = case.stages();
        let hops = TokenHops { g: f64::from(g), links: 0.2, link: 0.1 };
        let mut best = f64::INFINITY;
        case.all(&mut |slowest, sum| best = best.min((sum + hops.links).max(hops.g * slowest.max(hops.link))));
        let mut found = vec![(dp::fastest_token(&stages, case.blocks(), None, (hops, f64::MAX)), 2e-3)];
        if kinds == 1 {
            let mut filled = Waterfill::new(&stages, case.need[0], case.kind_of.len());
            found.push((filled.fastest_token(hops, f64::MAX), 3e-6));
        }
        prop_assert_eq!(dp::fits(&stages, case.blocks(), None), best.is_finite());
        // The bound is below the best, and not by much where there is room.
        let bound = Relaxed::new(&stages, case.blocks()).token(hops);
        prop_assert!(bound <= best, "{bound} is above {best}");
        prop_assert!(bound > 0.0);
        for (found, tolerance) in found {
            prop_assert_eq!(found.is_some(), best.is_finite());
            if let Some(p) = found {
                let time = (p.sum + hops.links).max(hops.g * p.slowest.max(hops.link));
                let near = time <= best * (1.0 + tolerance) && time >= best * (1.0 - 1e-9);
                prop_assert!(near, "{time} instead of {best}");
            }
        }
    }

    #[test]
    fn cuts_fall_only_where_they_may(seed: u64, step in 2_usize..4) {
        let case = case(seed, 2);
        let allowed = |start: usize, _end: usize| start.is_multiple_of(step);
        if let Some(found) = dp::partition(&case.stages(), case.blocks(), Some(&allowed)) {
            let mut start = 0;
            for device in rotation(case.devices.len(), found.master) {
                prop_assert!(start % step == 0);
                start += (found.blocks[device].0 + found.blocks[device].1) as usize;
            }
        }
    }
}

#[test]
fn the_bound_is_reached_where_nothing_is_in_the_way() {
    // Two devices alike, room for all, no calls and heads: half of the blocks each.
    let mut case = case(1, 1);
    let free = Device {
        gpu_room: 100.0,
        cpu: Vec::new(),
        cpu_room: 0.0,
        gpu_call: 0.0,
        head: 0.0,
        head_on: Side::Gpu,
        embedding: 0.0,
        overhead: 0.0,
        ..case.devices[0].clone()
    };
    case.devices = vec![free.clone(), free];
    case.kind_of = vec![0; 8];
    let bound = |g: f64| {
        let hops = TokenHops { g, links: 0.0, link: 0.0 };
        Relaxed::new(&case.stages(), case.blocks()).token(hops) / case.devices[0].gpu[0]
    };
    assert!(near(bound(1.0), 8.0) && near(bound(2.0), 8.0), "{} {}", bound(1.0), bound(2.0));
    assert!((bound(4.0) / 16.0 - 1.0).abs() < 1e-4, "{}", bound(4.0));
}

#[test]
fn fewer_blocks_than_devices_is_no_partition() {
    let mut case = case(1, 1);
    case.devices = vec![case.devices[0].clone(); 3];
    case.devices.iter_mut().for_each(|device| device.gpu_room = 100.0);
    case.kind_of = vec![0; 2];
    assert_eq!(dp::partition(&case.stages(), case.blocks(), None), None);
    assert!(!Waterfill::new(&case.stages(), 1.0, 2).fits());
}
