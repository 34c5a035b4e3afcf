//! Emulated devices: real frames, links and engine over stages that compute nothing. Time is not asserted here; that is
//! `shoal bench emulation`.

use cluster::{
    Attention, BlockCurves, BlockKind, BlockShape, Bytes, ComputeBuffers, DeviceId, DeviceMemory,
    DeviceProfile, FeedForward, LayerRange, Millis, ModelShape, ProcessorProfile, Surface,
};
use futures::StreamExt;
use protocol::emulation::{EmulatedNetwork, Emulation};
use protocol::sampling::{Generation, Grammar, GrammarBinding};
use protocol::tls::ClusterCa;
use protocol::v1;
use protocol::worker::{SliceConfig, VERSION, WorkerConfig};
use stage::Worker;

use crate::replica::{PATIENCE, Replica, SHAPE, Shape, greedy};

const N_LAYER: u32 = 16;
const N_VOCAB: u32 = 1000;
const MIB: u64 = 1 << 20;

fn kind(attention: Attention) -> BlockKind {
    BlockKind { attention, feed_forward: FeedForward::Dense }
}

fn model(attention: Attention) -> ModelShape {
    let block = BlockShape {
        kind: kind(attention),
        weight_bytes: Bytes(10 * MIB),
        kv_elements_per_token: 512,
        state_bytes_per_slot: Bytes::ZERO,
    };
    ModelShape {
        architecture: "llama".to_owned(),
        name: None,
        n_embd: 64,
        n_vocab: N_VOCAB,
        n_ctx_train: 2048,
        n_head: vec![4; N_LAYER as usize],
        n_head_kv: vec![4; N_LAYER as usize],
        blocks: vec![block; N_LAYER as usize],
        embedding_bytes: Bytes(MIB),
        head_bytes: Bytes(5 * MIB),
        tied: false,
        global_bytes: Bytes::ZERO,
        experts: None,
        range_rules: vec![],
    }
}

fn profile(attention: Attention) -> DeviceProfile {
    let flat = |ms| Surface::flat(vec![1], vec![Millis(ms)]).unwrap();
    let curves = BlockCurves { kind: kind(attention), decode: flat(0.1), prefill: flat(0.2) };
    let processor = ProcessorProfile { blocks: vec![curves], head: flat(0.1), call: None };
    DeviceProfile {
        device: DeviceId("desk/gpu".to_owned()),
        model: "m".to_owned(),
        runtime: "r".to_owned(),
        gpu: Some(processor.clone()),
        cpu: Some(processor),
        hop_overhead: Millis(0.1),
        buffers: ComputeBuffers { prefill: Bytes(3 * MIB), decode: Bytes(MIB) },
        embedding: None,
        cold_call: None,
        memory: None,
    }
}

const AMPLE: DeviceMemory = DeviceMemory::Discrete { vram: Bytes(1 << 40), ram: Bytes(1 << 40) };

/// Even stages with half of their blocks on the GPU.
fn configs(n_stages: u32, attention: Attention, memory: DeviceMemory, ca: &ClusterCa) -> Vec<WorkerConfig> {
    let emulation = Emulation::new(&profile(attention), memory, &model(attention), 0.5).unwrap();
    let per_stage = N_LAYER / n_stages;
    (0..n_stages)
        .map(|stage| WorkerConfig {
            version: VERSION,
            stage,
            n_stages,
            n_layer: N_LAYER,
            n_embd: 64,
            model_hash: [1; 32],
            slices: vec![SliceConfig {
                path: "there/is/no/file".into(),
                layers: LayerRange::new(stage * per_stage, (stage + 1) * per_stage).unwrap(),
                gpu_layers: per_stage / 2,
            }],
            embedding: None,
            slots: SHAPE.slots,
            n_ctx: SHAPE.n_ctx,
            n_batch: 64,
            n_ubatch: 64,
            threads: 1,
            turns: None,
            micro_batches: n_stages,
            queue_limit: SHAPE.queue_limit,
            prefill_chunk: SHAPE.prefill_chunk,
            extra_buffers: false,
            recurrent: attention == Attention::Recurrent,
            smallest_window: None,
            step_deadline_secs: 120,
            listen: ([127, 0, 0, 1], 0).into(),
            tls: ca.issue(&format!("stage {stage}")).unwrap(),
            emulation: Some(Box::new(emulation.clone())),
        })
        .collect()
}

async fn start(n_stages: u32, attention: Attention) -> (Replica, Vec<Worker>) {
    start_in(&ClusterCa::new().unwrap(), n_stages, attention).await
}

async fn start_in(ca: &ClusterCa, n_stages: u32, attention: Attention) -> (Replica, Vec<Worker>) {
    start_all(configs(n_stages, attention, AMPLE, ca), ca).await
}

async fn start_all(configs: Vec<WorkerConfig>, ca: &ClusterCa) -> (Replica, Vec<Worker>) {
    let mut workers = Vec::new();
    for config in configs {
        let config = WorkerConfig::from_line(&config.to_line().unwrap()).unwrap();
        workers.push(Worker::start(config).await.unwrap());
    }
    let addresses = workers.iter().map(Worker::address).collect();
    (Replica::link(addresses, ca, Shape { ..SHAPE }).await, workers)
}

/// What the rule makes of positions.
fn text(positions: std::ops::Range<usize>) -> Vec<i32> {
    positions.map(|position| 250 + (position % 89) as i32).collect()
}

async fn assert_texts(n_stages: u32, n_requests: usize, at_once: usize) {
    let (replica, _workers) = start(n_stages, Attention::Full).await;
    let prompts: Vec<Vec<i32>> = (0..n_requests)
        .map(|i| (0..20 + 13 * (i % 7)).map(|t| (t * 3 + i) as i32 % 1000).collect())
        .collect();
    let answers: Vec<_> = futures::stream::iter(&prompts)
        .map(|prompt| replica.generate(prompt, 40))
        .buffered(at_once)
        .collect()
        .await;
    for (prompt, answer) in prompts.iter().zip(answers) {
        let answer = answer.unwrap();
        assert_eq!(answer.tokens, text(prompt.len()..prompt.len() + 40));
        assert_eq!(answer.finished.unwrap().reason(), v1::FinishReason::Length);
    }
    assert_eq!(replica.wait_until_idle().await.generated_tokens as usize, 40 * n_requests);
    for stage in 0..n_stages as usize {
        let status = replica.status(stage).await;
        assert!(status.link_failure.is_empty(), "{}", status.link_failure);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_an_emulated_network_a_few_bytes_of_each_row_travel() {
    let ca = ClusterCa::new().unwrap();
    let network = EmulatedNetwork { bytes_per_second: 1e8, latency_ms: 0.1 };
    let mut workers = Vec::new();
    for mut config in configs(2, Attention::Full, AMPLE, &ca) {
        config.n_embd = 4;
        config.emulation = config.emulation.map(|it| Box::new(it.within(network).unwrap()));
        let config = WorkerConfig::from_line(&config.to_line().unwrap()).unwrap();
        workers.push(Worker::start(config).await.unwrap());
    }
    let addresses = workers.iter().map(Worker::address).collect();
    let replica = Replica::link(addresses, &ca, Shape { ..SHAPE }).await;
    let prompt: Vec<i32> = (0..50).collect();
    let answer = replica.generate(&prompt, 40).await.unwrap();
    assert_eq!(answer.tokens, text(50..90));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_emulated_stages_write_by_rule_however_requests_are_batched() {
    assert_texts(2, 12, 12).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_emulated_stage_is_a_replica_too() {
    assert_texts(1, 3, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_emulated_stages_write_together() {
    assert_texts(8, 6, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_replayed_elsewhere_goes_on_where_it_was() {
    let (replica, _workers) = start(2, Attention::Full).await;
    let prompt: Vec<i32> = (0..30).collect();
    let began = replica.generate(&prompt, 7).await.unwrap().tokens;
    let mut replay = greedy(&[prompt.as_slice(), &began].concat(), 5);
    replay.replayed = 7;
    let rest = replica.start(replay).await.unwrap().rest().await.unwrap().tokens;
    assert_eq!([began, rest].concat(), text(30..42));
}

#[tokio::test(flavor = "multi_thread")]
async fn probabilities_are_those_of_certainty_and_grammars_are_refused() {
    let (replica, _workers) = start(2, Attention::Full).await;
    let mut request = greedy(&[1, 2, 3], 4);
    request.logprobs = true;
    let answer = replica.start(request.clone()).await.unwrap().rest().await.unwrap();
    assert_eq!(answer.logprobs, [0.0; 4]);
    let mut generation = Generation::check(request, N_VOCAB).unwrap();
    generation.sampling.grammar = Some(Grammar {
        gbnf: "root ::= \"a\"".to_owned(),
        binding: GrammarBinding::Always,
        prefill: String::new(),
    });
    let refused = replica.start(generation.into()).await.err().unwrap();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("fixed rule"), "{refused}");
}

async fn failure(config: WorkerConfig, ca: &ClusterCa) -> String {
    let worker = Worker::start(config).await.unwrap();
    let replica = Replica::unlinked(vec![worker.address()], ca, SHAPE);
    let loading = async {
        loop {
            let status = replica.status(0).await;
            if status.state() != v1::LoadState::Loading {
                return status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let status = tokio::time::timeout(PATIENCE, loading).await.unwrap();
    assert_eq!(status.state(), v1::LoadState::Failed);
    status.failure
}

/// Field cases 10 and 13.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_into_the_emulated_device_is_refused_with_the_numbers() {
    let ca = ClusterCa::new().unwrap();
    // Of four blocks on either side: weights 40 MiB, cache 4 slots × 256 tokens × 512 elements × 2 bytes × 4, buffers 3 MiB.
    let (weights, cache, compute) = (40 * MIB, 4 * MIB, 3 * MIB);
    let need = weights + cache + compute;
    let with = |vram, ram| {
        let memory = DeviceMemory::Discrete { vram: Bytes(vram), ram: Bytes(ram) };
        configs(2, Attention::Full, memory, &ca).remove(0)
    };
    let said = failure(with(need - 1, need), &ca).await;
    for part in [
        "desk/gpu".to_owned(),
        format!("has {} bytes of VRAM", need - 1),
        format!("needs {need} there"),
        format!("weights {weights}, cache {cache}, compute buffers {compute}"),
    ] {
        assert!(said.contains(&part), "{said} lacks {part}");
    }
    assert!(failure(with(need, need - 1), &ca).await.contains("bytes of RAM"));
    let unified = DeviceMemory::Unified { total: Bytes(2 * need - 1) };
    let shared = failure(configs(2, Attention::Full, unified, &ca).remove(0), &ca).await;
    assert!(shared.contains(&format!("needs {} there", 2 * need)), "one memory holds both: {shared}");
    // The master has the head besides.
    let memory = DeviceMemory::Discrete { vram: Bytes(need), ram: Bytes(need) };
    let master = failure(configs(2, Attention::Full, memory, &ca).remove(1), &ca).await;
    assert!(master.contains(&format!("needs {} there", need + 5 * MIB)), "{master}");
    let enough = DeviceMemory::Unified { total: Bytes(2 * need + 5 * MIB) };
    for config in configs(2, Attention::Full, enough, &ca) {
        let worker = Worker::start(config).await.unwrap();
        let replica = Replica::unlinked(vec![worker.address()], &ca, SHAPE);
        replica.wait_for(0, |status| status.state() == v1::LoadState::Loaded).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_without_the_models_blocks_is_refused_by_name() {
    let ca = ClusterCa::new().unwrap();
    let mut config = configs(2, Attention::Full, AMPLE, &ca).remove(0);
    let other = Emulation::new(&profile(Attention::Recurrent), AMPLE, &model(Attention::Full), 1.0).unwrap();
    config.emulation = Some(Box::new(other));
    let said = failure(config, &ca).await;
    assert!(said.contains("desk/gpu") && said.contains("Full attention"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_would_leave_a_hole_break_the_chain() {
    let (replica, _workers) = start(2, Attention::Full).await;
    // As a stage before would send it, in an epoch of its own.
    let link = v1::LinkRequest {
        epoch: 7,
        next: replica.addresses[0].to_string(),
        encoding: v1::Encoding::F32.into(),
        chain: Vec::new(),
    };
    replica.stage(1).await.link(link).await.unwrap();
    let frame = |position| v1::Frame {
        epoch: 7,
        step: 1,
        entry_layer: N_LAYER / 2,
        runs: vec![v1::RowRun { slot: 0, position, n: 1 }],
        payload: Some(v1::frame::Payload::Hidden(v1::HiddenRows {
            encoding: v1::Encoding::F32.into(),
            data: vec![0; 64 * 4].into(),
        })),
        ..Default::default()
    };
    let mut call =
        tonic::Request::new(futures::stream::iter([frame(0), frame(2)]).chain(futures::stream::pending()));
    call.metadata_mut().insert("shoal-epoch", 7.into());
    let mut replies = replica.stage(1).await.forward(call).await.unwrap().into_inner();
    let end = tokio::time::timeout(PATIENCE, replies.message()).await.unwrap().unwrap_err();
    assert!(end.message().contains("slot 0 is given position 2, but its next is 1"), "{end}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stages_report_what_they_saw() {
    let (replica, _workers) = start(2, Attention::Full).await;
    let prompt: Vec<i32> = (0..30).collect();
    replica.generate(&prompt, 40).await.unwrap();
    replica.wait_until_idle().await;
    for stage in 0..2 {
        let status = replica.status(stage).await;
        let steps: Vec<_> = protocol::observation::steps(&status.step_times).collect();
        let decode: u64 =
            steps.iter().filter(|(b, _)| b.phase == cluster::Phase::Decode).map(|(_, t)| t.steps).sum();
        // The first token comes from the prompt; a step after a long pause would not count.
        assert!((1..=39).contains(&decode), "{steps:?}");
        let (_, totals) = steps.iter().find(|(b, _)| b.phase == cluster::Phase::Decode).unwrap();
        assert_eq!(totals.rows, totals.steps);
        assert_eq!(totals.outputs, if stage == 1 { totals.steps } else { 0 });
        // In the device's time, whatever the time scale: 8 blocks, and the head on the master.
        let profiled = if stage == 1 { 0.9 } else { 0.8 };
        assert!(totals.time.0 / totals.steps as f64 > 0.9 * profiled, "{totals:?}");
        let tallies = [&status.visits, &status.round_trips]
            .map(|tally| protocol::observation::tally(tally.as_ref()))
            .map(|tally| (tally.count, tally.rows));
        assert_eq!(tallies, [(39, 39), if stage == 1 { (39, 39) } else { (0, 0) }]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn emulated_replicas_hand_off_as_many_bytes_as_real_ones() {
    let window = Attention::SlidingWindow { window: 16 };
    for (attention, tokens_that_travel) in [(Attention::Full, 60), (window, 16)] {
        let ca = ClusterCa::new().unwrap();
        let (mut prefill, _first) = start_in(&ca, 2, attention).await;
        let (mut decode, _second) = start_in(&ca, 1, attention).await;
        prefill.blocks = vec![(0, N_LAYER / 2), (N_LAYER / 2, N_LAYER)];
        decode.blocks = vec![(0, N_LAYER)];
        prefill.relink().await.unwrap();
        decode.relink().await.unwrap();
        let prompt: Vec<i32> = (0..60).collect();
        let request = v1::GenerateRequest { hold_ms: 60_000, ..greedy(&prompt, 9) };
        let mut first = prefill.start(request).await.unwrap();
        let held = first.until_held().await;
        let request = crate::hand_off::go_on(&prompt, &first.answer.tokens, (9, held));
        let answer = decode.start(request).await.unwrap().rest().await.unwrap();
        assert_eq!([&first.answer.tokens[..], &answer.tokens].concat(), text(60..69));
        let handed_over = answer.handed_over.unwrap();
        assert_eq!((handed_over.failure.as_str(), handed_over.tokens), ("", 60));
        let kv_bytes: u64 = model(attention).blocks.iter().map(|block| block.kv_elements_per_token * 2).sum();
        // Each of two parts has a cell of 12 bytes for each position in each of at most two caches.
        let (least, cells) = (kv_bytes * tokens_that_travel, 2 * 2 * 12 * 60);
        let most = least + cells + 2 * 64 * u64::from(N_LAYER) + 2048;
        assert!((least..=most).contains(&handed_over.bytes), "{} bytes, not {least}", handed_over.bytes);
    }
}

/// A chunk of a prompt takes long, and a replica that computes prompts has one under way all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_changes_hands_while_the_next_prompt_is_computed() {
    let ca = ClusterCa::new().unwrap();
    // More than half a second for a chunk on each stage.
    let slow = Emulation::new(&profile(Attention::Full), AMPLE, &model(Attention::Full), 400.0).unwrap();
    let mut slow_configs = configs(2, Attention::Full, AMPLE, &ca);
    slow_configs.iter_mut().for_each(|config| config.emulation = Some(Box::new(slow.clone())));
    let (mut prefill, _first) = start_all(slow_configs, &ca).await;
    let (mut decode, _second) = start_in(&ca, 1, Attention::Full).await;
    prefill.blocks = vec![(0, N_LAYER / 2), (N_LAYER / 2, N_LAYER)];
    decode.blocks = vec![(0, N_LAYER)];
    prefill.relink().await.unwrap();
    decode.relink().await.unwrap();
    let prompt: Vec<i32> = (0..30).collect();
    let request = v1::GenerateRequest { hold_ms: 60_000, ..greedy(&prompt, 9) };
    let mut first = prefill.start(request).await.unwrap();
    let held = first.until_held().await;
    let mut next = prefill.start(greedy(&[7; 40], 1)).await.unwrap();
    assert!(next.next().await.unwrap(), "it has started");
    let request = crate::hand_off::go_on(&prompt, &first.answer.tokens, (9, held));
    let mut second = decode.start(request).await.unwrap();
    let handed_over = async {
        while second.answer.handed_over.is_none() {
            assert!(second.next().await.unwrap(), "{:?}", second.answer);
        }
    };
    tokio::select! {
        () = handed_over => {}
        () = next.until_tokens(1) => panic!("it waited for the next prompt"),
    }
    let failure = second.answer.handed_over.unwrap().failure;
    assert_eq!(failure, "");
}
