//! What a hand-off between two replicas of SmolLM2 costs, part by part: `cargo bench -p stage --bench hand_off`.
//!
//! Cut at 10 and 20 into three stages, and at 7 and 26; 1,000 tokens. Medians of some rounds. No limits: it prints figures.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    dead_code,
    missing_docs,
    reason = "a bench says so by panicking, and uses a part of the tests' helpers"
)]

#[path = "../tests/e2e/replica.rs"]
mod replica;
#[path = "../tests/e2e/whole.rs"]
mod whole;

use std::time::{Duration, Instant};

use cluster::LayerRange;
use llama::kv_blob::Blob;
use llama::{ContextParams, ExtraBuffers, Model, ModelParams, Output, RowInput, Rows, SliceContext};
use protocol::tls::{ClusterCa, connect};
use protocol::v1;
use protocol::v1::kv_client::KvClient;
use replica::{Replica, SHAPE, Shape, Stages, blocks, configs, greedy};
use stage::Worker;
use whole::Slices;

const TOKENS: u32 = 1000;
const ROUNDS: usize = 9;
const SHAPE_OF_BOTH: Shape = Shape { slots: 2, n_ctx: 1280, prefill_chunk: 64, ..SHAPE };
const STAGES: Stages<'static> = &[&[0], &[1], &[2]];

fn main() {
    let (one, other) = (Slices::cut(&[10, 20]), Slices::cut(&[7, 26]));
    in_memory(&one, &other);
    tokio::runtime::Runtime::new().unwrap().block_on(between_replicas(&one, &other));
}

/// Export, re-cut and import, without anything in between.
fn in_memory(one: &Slices, other: &Slices) {
    let (mut from, mut to) = (contexts(one), contexts(other));
    for (range, context) in &mut from {
        fill(context, u64::from(range.start()));
    }
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let mut parts = Vec::new();
        times[0].push(timed(|| {
            parts = from.iter_mut().map(|(_, context)| context.export_slot(0).unwrap()).collect();
        }));
        let mut prepared = Vec::new();
        times[1].push(timed(|| {
            let whole = Blob::merge(std::mem::take(&mut parts)).unwrap();
            bytes = whole.data_bytes();
            prepared = to
                .iter()
                .map(|(range, context)| {
                    let part = whole.part(range.start() as usize..range.end() as usize).unwrap();
                    part.prepare(&context.kv_form().unwrap(), context.place(1)).unwrap()
                })
                .collect();
        }));
        times[2].push(timed(|| {
            for ((_, context), blob) in to.iter_mut().zip(&prepared) {
                context.import_slot(1, blob).unwrap();
            }
        }));
    }
    println!("{TOKENS} tokens of 30 blocks: {:.1} MB of keys and values", bytes as f64 / 1e6);
    for (what, times) in ["export", "re-cut", "import"].iter().zip(times) {
        report(what, times, bytes);
    }
}

async fn between_replicas(one: &Slices, other: &Slices) {
    let ca = ClusterCa::new().unwrap();
    let (prefill, _first) = start(one, &ca).await;
    let (decode, _second) = start(other, &ca).await;
    let (mut transfers, mut whole) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for round in 0..ROUNDS as i32 {
        // Prompts that have nothing in common, so that all of each travels.
        let prompt: Vec<i32> = (0..TOKENS as i32).map(|i| (i * 7919 + 13 + round * 101) % 40000).collect();
        let request = v1::GenerateRequest { hold_ms: 60_000, ignore_eos: true, ..greedy(&prompt, 2) };
        let mut first = prefill.start(request).await.unwrap();
        let held = first.until_held().await;
        let since = Instant::now();
        bytes = pull_all(&prefill, &held).await;
        transfers.push(since.elapsed());
        let request = v1::GenerateRequest {
            replayed: 1,
            from: Some(held),
            ignore_eos: true,
            ..greedy(&[&prompt[..], &first.answer.tokens].concat(), 1)
        };
        let answer = decode.start(request).await.unwrap().rest().await.unwrap();
        let handed_over = answer.handed_over.unwrap();
        assert_eq!(handed_over.failure, "");
        whole.push(Duration::from_secs_f64(handed_over.took_ms / 1e3));
    }
    report("export and transfer, TLS over loopback", transfers, bytes);
    report("all of it, between two replicas", whole, bytes);
}

/// Every stage's share, one after the other; the bytes that came.
async fn pull_all(prefill: &Replica, held: &v1::HeldSlot) -> u64 {
    let mut bytes = 0;
    for stage in &held.chain {
        let channel = connect(&stage.address, &prefill.identity).await.unwrap();
        let request = v1::PullRequest {
            from: Some(held.clone()),
            first_block: stage.first_block,
            end_block: stage.end_block,
            first_position: 0,
        };
        let mut pieces = KvClient::new(channel).pull(request).await.unwrap().into_inner();
        while let Some(piece) = pieces.message().await.unwrap() {
            if let Some(v1::kv_piece::Piece::Data(data)) = piece.piece {
                bytes += data.len() as u64;
            }
        }
    }
    bytes
}

async fn start(slices: &Slices, ca: &ClusterCa) -> (Replica, Vec<Worker>) {
    let mut workers = Vec::new();
    for config in configs(slices, STAGES, SHAPE_OF_BOTH, ca) {
        workers.push(Worker::start(config).await.unwrap());
    }
    let addresses = workers.iter().map(Worker::address).collect();
    let mut replica = Replica::link(addresses, ca, SHAPE_OF_BOTH).await;
    replica.blocks = blocks(slices, STAGES);
    replica.relink().await.unwrap();
    (replica, workers)
}

fn contexts(slices: &Slices) -> Vec<(LayerRange, SliceContext)> {
    let context = |range: &LayerRange| {
        let params = ModelParams { extra_buffers: ExtraBuffers::Plain, ..ModelParams::default() };
        let model = Model::load(&slices.slice(*range), params).unwrap();
        let params = ContextParams {
            threads: 1,
            threads_batch: 1,
            ..ContextParams::new(Output::Hidden, SHAPE_OF_BOTH.slots, SHAPE_OF_BOTH.n_ctx)
        };
        (*range, SliceContext::new(&model, &params).unwrap())
    };
    slices.ranges.iter().map(context).collect()
}

/// What the rows are makes no difference to what they cost.
fn fill(context: &mut SliceContext, seed: u64) {
    let width = context.model().n_embd() as usize;
    let numbers = TOKENS as usize * width;
    let hidden: Vec<f32> =
        (0..numbers as u64).map(|i| ((i + seed) * 7919 % 997) as f32 / 997.0 - 0.5).collect();
    let positions: Vec<u32> = (0..TOKENS).collect();
    let rows = Rows {
        input: RowInput::Hidden(&hidden),
        slots: &vec![0; TOKENS as usize],
        positions: &positions,
        outputs: &vec![false; TOKENS as usize],
    };
    context.run(&rows).unwrap();
}

fn timed(run: impl FnOnce()) -> Duration {
    let since = Instant::now();
    run();
    since.elapsed()
}

fn report(what: &str, mut times: Vec<Duration>, bytes: u64) {
    times.sort_unstable();
    let median = times[times.len() / 2].as_secs_f64();
    let per_thousand = median * 1e3 * 1000.0 / f64::from(TOKENS);
    println!("{what:40} {per_thousand:8.2} ms per 1,000 tokens {:8.0} MB/s", bytes as f64 / 1e6 / median);
}
