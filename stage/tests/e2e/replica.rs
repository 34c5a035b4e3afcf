//! A replica of workers: started, loaded and linked as an agent would, with what tests ask of it.

use std::net::SocketAddr;
use std::time::Duration;

use protocol::sampling::{Generation, Sampling};
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::v1;
use protocol::v1::engine_client::EngineClient;
use protocol::v1::generate_event::Event;
use protocol::v1::stage_client::StageClient;
use protocol::worker::{SliceConfig, VERSION, WorkerConfig};
use stage::Worker;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use crate::whole::{N_EMBD, N_LAYER, Slices};

/// What a test may wait for anything: far beyond what it takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The numbers of a replica.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) slots: u32,
    pub(crate) n_ctx: u32,
    pub(crate) queue_limit: u32,
    pub(crate) prefill_chunk: u32,
    pub(crate) encoding: v1::Encoding,
}

pub(crate) const SHAPE: Shape =
    Shape { slots: 4, n_ctx: 256, queue_limit: 64, prefill_chunk: 24, encoding: v1::Encoding::F32 };

/// Which slices each stage holds, as indices of the cut's ranges.
pub(crate) type Stages<'a> = &'a [&'a [usize]];

/// A configuration of each stage.
pub(crate) fn configs(
    slices: &Slices,
    stages: Stages<'_>,
    shape: Shape,
    ca: &ClusterCa,
) -> Vec<WorkerConfig> {
    stages
        .iter()
        .zip(0..)
        .map(|(held, stage)| WorkerConfig {
            version: VERSION,
            stage,
            n_stages: stages.len() as u32,
            n_layer: N_LAYER,
            n_embd: N_EMBD,
            model_hash: [1; 32],
            slices: held
                .iter()
                .map(|index| slices.ranges[*index])
                .map(|layers| SliceConfig { path: slices.slice(layers), layers, gpu_layers: 0 })
                .collect(),
            embedding: (stage == 0).then(|| slices.embedding()),
            slots: shape.slots,
            n_ctx: shape.n_ctx,
            n_batch: 64,
            n_ubatch: 64,
            threads: 1,
            turns: None,
            micro_batches: stages.len() as u32,
            queue_limit: shape.queue_limit,
            prefill_chunk: shape.prefill_chunk,
            extra_buffers: false,
            recurrent: false,
            smallest_window: None,
            step_deadline_secs: 120,
            listen: ([127, 0, 0, 1], 0).into(),
            tls: ca.issue(&format!("stage {stage}")).unwrap(),
            emulation: None,
        })
        .collect()
}

/// Addresses of linked stages, and an identity to talk to them.
pub(crate) struct Replica {
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) identity: TlsIdentity,
    pub(crate) epoch: u64,
    pub(crate) encoding: v1::Encoding,
    /// Blocks of each stage, for replicas whose slots change hands; empty for others.
    pub(crate) blocks: Vec<(u32, u32)>,
}

impl Replica {
    /// Stages in no epoch, whether they have loaded or not.
    pub(crate) fn unlinked(addresses: Vec<SocketAddr>, ca: &ClusterCa, shape: Shape) -> Self {
        let identity = ca.issue("agent").unwrap();
        Self { addresses, identity, epoch: 0, encoding: shape.encoding, blocks: Vec::new() }
    }

    /// Waits until every stage has loaded, and links them, the master first.
    pub(crate) async fn link(addresses: Vec<SocketAddr>, ca: &ClusterCa, shape: Shape) -> Self {
        let mut replica = Self::unlinked(addresses, ca, shape);
        for stage in 0..replica.addresses.len() {
            replica.wait_for(stage, |status| status.state() == v1::LoadState::Loaded).await;
        }
        replica.relink().await.unwrap();
        replica
    }

    /// Links all stages in a new epoch.
    pub(crate) async fn relink(&mut self) -> Result<(), Status> {
        self.epoch += 1;
        let n = self.addresses.len();
        for stage in (0..n).rev() {
            let next = if n == 1 { String::new() } else { self.addresses[(stage + 1) % n].to_string() };
            let (encoding, chain) = (self.encoding.into(), self.chain());
            let request = v1::LinkRequest { epoch: self.epoch, next, encoding, chain };
            self.stage(stage).await.link(request).await?;
        }
        Ok(())
    }

    fn chain(&self) -> Vec<v1::ChainStage> {
        let stages = self.addresses.iter().zip(&self.blocks);
        stages
            .map(|(address, (first_block, end_block))| v1::ChainStage {
                address: address.to_string(),
                first_block: *first_block,
                end_block: *end_block,
            })
            .collect()
    }

    pub(crate) async fn stage(&self, stage: usize) -> StageClient<Channel> {
        StageClient::new(connect(self.addresses[stage], &self.identity).await.unwrap())
    }

    pub(crate) async fn engine(&self) -> EngineClient<Channel> {
        EngineClient::new(connect(self.addresses[self.addresses.len() - 1], &self.identity).await.unwrap())
    }

    pub(crate) async fn status(&self, stage: usize) -> v1::StatusReply {
        self.stage(stage).await.status(v1::StatusRequest {}).await.unwrap().into_inner()
    }

    pub(crate) async fn wait_for(
        &self,
        stage: usize,
        is: impl Fn(&v1::StatusReply) -> bool,
    ) -> v1::StatusReply {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status(stage).await;
            if is(&status) {
                return status;
            }
            assert!(status.state() != v1::LoadState::Failed, "stage {stage} failed: {}", status.failure);
            assert!(Instant::now() < deadline, "stage {stage} never came to it: {status:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn engine_status(&self) -> v1::EngineStatusReply {
        self.engine().await.engine_status(v1::EngineStatusRequest {}).await.unwrap().into_inner()
    }

    /// The engine's counters once they say that nothing runs. The last event of a request comes a moment before.
    pub(crate) async fn wait_until_idle(&self) -> v1::EngineStatusReply {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.engine_status().await;
            if (status.active, status.queued) == (0, 0) {
                return status;
            }
            assert!(Instant::now() < deadline, "never idle: {status:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn generate(&self, prompt: &[i32], max_tokens: u32) -> Result<Answer, Status> {
        self.start(greedy(prompt, max_tokens)).await?.rest().await
    }

    pub(crate) async fn start(&self, request: v1::GenerateRequest) -> Result<Generating, Status> {
        let events = self.engine().await.generate(request).await?.into_inner();
        Ok(Generating { events, answer: Answer::default() })
    }
}

/// In-process workers, stopped on drop.
pub(crate) async fn start(slices: &Slices, stages: Stages<'_>, shape: Shape) -> (Replica, Vec<Worker>) {
    let ca = ClusterCa::new().unwrap();
    let mut workers = Vec::new();
    for config in configs(slices, stages, shape, &ca) {
        workers.push(Worker::start(config).await.unwrap());
    }
    let addresses = workers.iter().map(Worker::address).collect();
    (Replica::link(addresses, &ca, shape).await, workers)
}

pub(crate) fn greedy(prompt: &[i32], max_tokens: u32) -> v1::GenerateRequest {
    Generation {
        request: cluster::RequestId("test".to_owned()),
        prompt: prompt.to_vec(),
        replayed: 0,
        max_tokens,
        sampling: Sampling::greedy(),
        top_logprobs: None,
        ignore_eos: false,
        hand_off: protocol::hand_off::HandOff::None,
    }
    .into()
}

/// First and end block of each stage.
pub(crate) fn blocks(slices: &Slices, stages: Stages<'_>) -> Vec<(u32, u32)> {
    let range = |held: &&[usize]| {
        let (first, last) = (slices.ranges[held[0]], slices.ranges[held[held.len() - 1]]);
        (first.start(), last.end())
    };
    stages.iter().map(range).collect()
}

/// What a request has given so far.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<i32>,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) cached: u32,
    pub(crate) queued: bool,
    pub(crate) finished: Option<v1::Finished>,
    pub(crate) failed: Option<v1::Failed>,
    pub(crate) held: Option<v1::HeldSlot>,
    pub(crate) handed_over: Option<v1::HandedOver>,
}

/// A request under way. Dropping it cancels it.
pub(crate) struct Generating {
    events: Streaming<v1::GenerateEvent>,
    pub(crate) answer: Answer,
}

impl Generating {
    /// Takes the next event; false at the end.
    pub(crate) async fn next(&mut self) -> Result<bool, Status> {
        let event = tokio::time::timeout(PATIENCE, self.events.message());
        let Some(event) = event.await.expect("an event comes or the stream ends")? else { return Ok(false) };
        match event.event.unwrap() {
            Event::Queued(_) => self.answer.queued = true,
            Event::Started(started) => self.answer.cached = started.cached_tokens,
            Event::Token(token) => {
                self.answer.tokens.push(token.id);
                self.answer.logprobs.extend(token.logprob);
            }
            Event::Finished(finished) => self.answer.finished = Some(finished),
            Event::Failed(failed) => self.answer.failed = Some(failed),
            Event::Held(held) => self.answer.held = Some(held),
            Event::HandedOver(handed_over) => self.answer.handed_over = Some(handed_over),
        }
        Ok(true)
    }

    pub(crate) async fn until_tokens(&mut self, n: usize) {
        while self.answer.tokens.len() < n {
            assert!(self.next().await.unwrap(), "the answer ended early: {:?}", self.answer);
        }
    }

    pub(crate) async fn until_held(&mut self) -> v1::HeldSlot {
        while self.answer.held.is_none() {
            assert!(self.next().await.unwrap(), "the answer ended before it was held: {:?}", self.answer);
        }
        self.answer.held.clone().unwrap()
    }

    pub(crate) async fn rest(mut self) -> Result<Answer, Status> {
        while self.next().await? {}
        Ok(self.answer)
    }
}
