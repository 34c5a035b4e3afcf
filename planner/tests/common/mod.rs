//! Random clusters, models and workloads.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)] // each test binary uses some of it

use cluster::*;
use planner::{Problem, Rng};

/// What a random cluster is like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub devices: usize,
    pub blocks: u32,
    /// Kinds of devices; 0 makes every device different.
    pub types: usize,
    /// Whether half of the blocks have a sliding window and other costs.
    pub two_kinds: TwoKinds,
    /// Whether links differ.
    pub links: LinkKind,
    /// What was measured.
    pub detail: Detail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Decode by depth, prefill and head.
    Plain,
    /// Also calls, embeddings, prefill by depth and a process's memory; and tensors that every stage holds.
    Full,
    /// Also what idling costs.
    Cold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TwoKinds {
    Yes,
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkKind {
    Uniform,
    Random,
}

impl Shape {
    pub const fn of(devices: usize) -> Self {
        Self {
            devices,
            blocks: 24,
            types: 0,
            two_kinds: TwoKinds::No,
            links: LinkKind::Uniform,
            detail: Detail::Plain,
        }
    }
}

const FULL: BlockKind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };
const SLIDING: BlockKind =
    BlockKind { attention: Attention::SlidingWindow { window: 512 }, feed_forward: FeedForward::Dense };
const RECURRENT: BlockKind =
    BlockKind { attention: Attention::Recurrent, feed_forward: FeedForward::MixtureOfExperts };

/// Speed and memory of a device, in units of a block of about 300 MB.
#[derive(Debug, Clone, Copy)]
struct Power {
    /// Blocks that fit, on the GPU and beside it.
    gpu_blocks: f64,
    cpu_blocks: f64,
    decode_ms: f64,
    prefill_ms: f64,
}

fn power(rng: &mut Rng) -> Power {
    Power {
        gpu_blocks: rng.between(5.0, 34.0),
        cpu_blocks: if rng.unit() < 0.4 { rng.between(10.0, 60.0) } else { 0.0 },
        decode_ms: rng.between(0.2, 3.0),
        prefill_ms: rng.between(0.01, 0.2),
    }
}

fn curves(power: &Power, slowdown: f64, kinds: &[BlockKind], detail: Detail) -> ProcessorProfile {
    let rows = vec![1, 2, 4, 8, 16, 32];
    let depths = vec![0, 8192];
    let blocks = kinds.iter().enumerate().map(|(k, &kind)| {
        let base = power.decode_ms * slowdown * (1.0 - 0.3 * k as f64);
        let times = rows.iter().flat_map(|&n| {
            let at = |depth: f64| Millis(base * f64::from(n).powf(0.6) * (1.0 + depth / 16384.0));
            [at(0.0), at(8192.0)]
        });
        let tokens: Vec<u32> = vec![128, 512, 2048];
        let time = |t: u32| slowdown.sqrt() * (2.0 * power.decode_ms + power.prefill_ms * f64::from(t));
        let (prefill_depths, deeper) = match detail {
            Detail::Plain => (vec![0], vec![1.0]),
            Detail::Full | Detail::Cold => (vec![0, 2048, 8192], vec![1.0, 1.2, 2.1]),
        };
        let prefill = tokens.iter().flat_map(|&t| deeper.iter().map(move |factor| Millis(time(t) * factor)));
        BlockCurves {
            kind,
            decode: Surface::new(rows.clone(), depths.clone(), times.collect()).unwrap(),
            prefill: Surface::new(tokens.clone(), prefill_depths, prefill.collect()).unwrap(),
        }
    });
    let head = rows.iter().map(|&n| Millis(power.decode_ms * slowdown * (2.0 + 0.1 * f64::from(n))));
    ProcessorProfile {
        blocks: blocks.collect(),
        head: Surface::flat(rows.clone(), head.collect()).unwrap(),
        call: (detail != Detail::Plain).then(|| by_rows(0.3 * power.decode_ms * slowdown.sqrt())),
    }
}

fn cold_call(ms: f64) -> ColdCall {
    ColdCall::new(vec![Millis(2.0), Millis(25.0)], vec![Millis(0.5 * ms), Millis(6.0 * ms)]).unwrap()
}

fn by_rows(ms: f64) -> Surface {
    Surface::flat(vec![1, 32, 2048], vec![Millis(ms), Millis(ms * 1.5), Millis(ms * 6.0)]).unwrap()
}

fn kind(shape: Shape, block: u32) -> BlockKind {
    match (shape.two_kinds, shape.detail, block % 4) {
        (TwoKinds::Yes, Detail::Full | Detail::Cold, 3) => RECURRENT,
        (TwoKinds::Yes, _, 1 | 3) => SLIDING,
        _ => FULL,
    }
}

pub fn model(shape: Shape) -> ModelShape {
    let block = |i: u32| {
        let kind = kind(shape, i);
        let recurrent = kind == RECURRENT;
        BlockShape {
            kind,
            weight_bytes: Bytes(if kind == FULL { 300_000_000 } else { 250_000_000 }),
            kv_elements_per_token: if recurrent { 0 } else { 1024 },
            state_bytes_per_slot: Bytes(if recurrent { 9_000_000 } else { 0 }),
        }
    };
    ModelShape {
        architecture: "random".into(),
        name: None,
        n_embd: 2048,
        n_vocab: 32_000,
        n_ctx_train: 8192,
        n_head: Vec::new(),
        n_head_kv: Vec::new(),
        blocks: (0..shape.blocks).map(block).collect(),
        embedding_bytes: Bytes(200_000_000),
        head_bytes: Bytes(200_000_000),
        tied: false,
        global_bytes: Bytes(if shape.detail == Detail::Plain { 0 } else { 40_000_000 }),
        experts: None,
        range_rules: Vec::new(),
    }
}

pub fn problem(shape: Shape, seed: u64) -> Problem {
    let mut rng = Rng::fork(seed, shape.devices as u64);
    let types: Vec<Power> = (0..shape.types.max(1)).map(|_| power(&mut rng)).collect();
    let all = [FULL, SLIDING, RECURRENT];
    let kinds = if shape.two_kinds == TwoKinds::Yes { &all[..] } else { &all[..1] };
    let full = shape.detail != Detail::Plain;
    let (mut devices, mut profiles) = (Vec::new(), Vec::new());
    for d in 0..shape.devices {
        let power = if shape.types == 0 { power(&mut rng) } else { types[rng.below(types.len())] };
        let block = |n: f64| Bytes((n * 317_000_000.0) as u64);
        let memory = if power.cpu_blocks > 0.0 {
            DeviceMemory::Discrete { vram: block(power.gpu_blocks), ram: block(power.cpu_blocks) }
        } else {
            DeviceMemory::Unified { total: block(power.gpu_blocks) }
        };
        let id = DeviceId(format!("device-{d:03}"));
        devices.push(Device { id: id.clone(), node: NodeId(format!("node-{d:03}")), memory });
        profiles.push(DeviceProfile {
            device: id,
            model: "random".into(),
            runtime: "test".into(),
            gpu: Some(curves(&power, 1.0, kinds, shape.detail)),
            cpu: (power.cpu_blocks > 0.0).then(|| curves(&power, 6.0, kinds, shape.detail)),
            hop_overhead: Millis(0.5),
            buffers: ComputeBuffers { prefill: Bytes(600_000_000), decode: Bytes(300_000_000) },
            embedding: full.then(|| by_rows(0.2)),
            cold_call: (shape.detail == Detail::Cold).then(|| cold_call(power.decode_ms)),
            memory: full.then(|| MemoryCosts::assumed(&model(shape))),
        });
    }
    let links = links(shape, &devices, &mut rng);
    Problem { model: model(shape), devices, profiles, links, workload: workload(&mut rng) }
}

fn links(shape: Shape, devices: &[Device], rng: &mut Rng) -> Links {
    let quality = |mbit: f64, ms: f64| LinkQuality {
        bandwidth: BytesPerSecond::from_mbit(mbit),
        one_way_latency: Millis(ms),
    };
    let mut links = Links::uniform(quality(920.0, 0.15));
    if shape.links == LinkKind::Random {
        for a in devices {
            for b in devices.iter().filter(|b| b.id != a.id) {
                let quality = quality(rng.between(50.0, 1000.0), rng.between(0.1, 2.0));
                links.measured.push(Link { from: a.node.clone(), to: b.node.clone(), quality });
            }
        }
    }
    links
}

fn workload(rng: &mut Rng) -> Workload {
    Workload {
        arrivals: Arrivals::Every(Millis([100.0, 1000.0, 3000.0][rng.below(3)])),
        prompt: Lengths::log_normal(rng.between(200.0, 2500.0).round(), 0.3),
        output: Lengths::log_normal(rng.between(200.0, 2000.0).round(), 0.4),
        requests: 60,
        min_rate: TokensPerSecond(7.0),
        slot_context: 8192,
        max_slots: 32,
    }
}
