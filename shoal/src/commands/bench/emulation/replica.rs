//! A replica of emulated stages in processes of their own, and requests that run on it side by side.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use cluster::{Bytes, DeviceMemory, Load, ModelHash, ReplicaState, RequestId, StageMemory};
use gguf::cut::CutOptions;
use node::agent::{Agent, Outlook, ReplicaConfig, WorkerCommand, WorkerSettings};
use node::{PreparedReplica, PreparedStage, TurnsFile};
use protocol::emulation::Emulation;
use protocol::rows::RowEncoding;
use protocol::sampling::{Generation, Sampling};
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::v1::engine_client::EngineClient;
use protocol::v1::generate_event::Event;
use protocol::v1::{EngineStatusRequest, GenerateEvent, GenerateRequest};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{EmulationArgs, Setup};
use crate::cli::Globals;
use crate::commands::stage_worker;

/// Tokens of each prompt.
const PROMPT: u32 = 16;

/// Steps beyond those measured: until all requests run, and while the first of them end.
const SPARE: u32 = 512;

/// Between two looks whether the requests before have gone.
const IDLE_POLL: Duration = Duration::from_millis(20);

/// A measured step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    /// Tokens that each row's cache held.
    pub(super) depth: u32,
    /// From the token before to this step's.
    pub(super) measured_ms: f64,
}

/// A running replica.
pub(super) struct Replica {
    agent: Agent,
    identity: TlsIdentity,
}

impl Replica {
    /// Starts all stages and waits until they serve.
    pub(super) async fn start(setup: &Setup, args: &EmulationArgs, globals: &Globals) -> Result<Self> {
        let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
        let slots = args.batch.iter().copied().max().unwrap_or(1);
        let loading = ReplicaState::Loading { progress: 0.0, waiting_for: String::new() };
        let outlook = Outlook::new(watch::Sender::new(loading));
        let config = config(setup, slots, args.steps, stage_worker::command(globals)?)?;
        let agent = Agent::start(config, &ca, outlook)?;
        let replica = Self { agent, identity: ca.issue("bench")? };
        match replica.agent.ready().await {
            Ok(_) => Ok(replica),
            Err(error) => {
                replica.stop().await;
                Err(error.into())
            }
        }
    }

    /// Ends all stages.
    pub(super) async fn stop(self) {
        self.agent.shutdown().await;
    }

    /// Runs so many requests at once, and gives the steps in which all of them had a row.
    pub(super) async fn decode(&self, rows: u32, steps: u32, show: &mut dyn FnMut(u32)) -> Result<Vec<Step>> {
        let ReplicaState::Ready { master, .. } = *self.agent.state().borrow() else {
            bail!("the replica is no longer ready")
        };
        let mut client = EngineClient::new(connect(master, &self.identity).await?);
        self.until_idle(&mut client).await?;
        // Every token of every request fits.
        let (sender, mut arrivals) = mpsc::channel((rows * (steps + SPARE)) as usize);
        // Dropped with this function, and with it all requests.
        let mut readers = JoinSet::new();
        for index in 0..rows as usize {
            let events = client.generate(request(steps)).await?.into_inner();
            readers.spawn(read(index, events, sender.clone()));
        }
        drop(sender);
        let mut window = Window::new(rows as usize);
        while window.steps.len() < steps as usize {
            let arrival = arrivals.recv().await.ok_or_else(|| anyhow!("the requests ended early"))??;
            window.take(arrival);
            show(window.steps.len() as u32);
        }
        Ok(window.steps)
    }

    async fn until_idle(&self, client: &mut EngineClient<Channel>) -> Result<()> {
        loop {
            let status = client.engine_status(EngineStatusRequest {}).await?.into_inner();
            if status.active == 0 {
                return Ok(());
            }
            tokio::time::sleep(IDLE_POLL).await;
        }
    }
}

/// A token, seen when it came.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    request: usize,
    position: u32,
    at: Instant,
}

/// Reads a request's tokens.
async fn read(request: usize, mut events: Streaming<GenerateEvent>, arrivals: mpsc::Sender<Result<Arrival>>) {
    loop {
        let event = events.message().await;
        let at = Instant::now();
        let arrival = match event {
            Ok(Some(GenerateEvent { event: Some(Event::Token(token)) })) => {
                Ok(Arrival { request, position: token.position, at })
            }
            Ok(Some(GenerateEvent { event: Some(Event::Failed(failed)) })) => Err(anyhow!(failed.message)),
            Ok(Some(_)) => continue,
            Ok(None) => return,
            Err(status) => Err(status.into()),
        };
        // Whoever waits for arrivals has seen enough.
        if arrivals.send(arrival).await.is_err() {
            return;
        }
    }
}

/// The steps of the first request, from when all others run.
struct Window {
    /// Tokens of each request so far.
    tokens: Vec<u32>,
    last: Option<Instant>,
    steps: Vec<Step>,
}

impl Window {
    fn new(requests: usize) -> Self {
        Self { tokens: vec![0; requests], last: None, steps: Vec::new() }
    }

    fn take(&mut self, arrival: Arrival) {
        if let Some(tokens) = self.tokens.get_mut(arrival.request) {
            *tokens += 1;
        }
        // A request's first token comes from its prompt, and its second from a step that not all others need have been in.
        let all_run = self.tokens.iter().all(|tokens| *tokens >= 3);
        if arrival.request != 0 {
            return;
        }
        if let Some(last) = self.last.filter(|_| all_run) {
            let measured_ms = arrival.at.saturating_duration_since(last).as_secs_f64() * 1e3;
            self.steps.push(Step { depth: arrival.position.saturating_sub(1), measured_ms });
        }
        self.last = all_run.then_some(arrival.at);
    }
}

fn request(steps: u32) -> GenerateRequest {
    Generation {
        request: RequestId("bench".to_owned()),
        prompt: vec![1; PROMPT as usize],
        replayed: 0,
        max_tokens: steps + SPARE,
        sampling: Sampling::greedy(),
        top_logprobs: None,
        ignore_eos: true,
        hand_off: protocol::hand_off::HandOff::None,
    }
    .into()
}

fn config(setup: &Setup, slots: u32, steps: u32, command: WorkerCommand) -> Result<ReplicaConfig> {
    // Whether a model fits is not the question here.
    let ample = DeviceMemory::Discrete { vram: Bytes(1 << 50), ram: Bytes(1 << 50) };
    let emulation = |profile| Emulation::new(profile, ample, &setup.shape, setup.time_scale);
    let stages = setup.ranges.iter().enumerate().map(|(stage, &layers)| PreparedStage {
        layers,
        gpu_layers: setup.gpu_blocks(stage),
        path: PathBuf::new(),
        predicted: StageMemory::default(),
    });
    let n_ubatch = slots.max(PROMPT);
    Ok(ReplicaConfig {
        command,
        replica: PreparedReplica {
            pins: Vec::new(),
            model: "emulated".to_owned(),
            model_hash: ModelHash([0; 32]),
            options: CutOptions::default(),
            shape: setup.shape.clone(),
            stages: stages.collect(),
            embedding: PathBuf::new(),
            load: Load { slots, n_ctx: PROMPT + steps + SPARE + 1, n_ubatch },
            prefill_chunk: PROMPT,
        },
        // One batch at a time: its rows are those that were asked for.
        settings: WorkerSettings {
            threads: Some(1),
            micro_batches: 1,
            queue_limit: 0,
            encoding: RowEncoding::F32,
            keep: Duration::ZERO,
        },
        emulations: setup.profiles.iter().map(emulation).collect::<Result<_, _>>()?,
        profiles: Vec::new(),
        beside: 0,
        turns: Arc::new(TurnsFile::new()?),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_steps_that_all_requests_are_in_count() {
        let start = Instant::now();
        let mut window = Window::new(2);
        for (request, position, ms) in [
            (0, 16, 0),
            (0, 17, 10),
            (1, 16, 11),
            (0, 18, 20),
            (1, 17, 20),
            (1, 18, 30),
            (0, 19, 31),
            (0, 20, 43),
            (1, 19, 43),
        ] {
            window.take(Arrival { request, position, at: start + Duration::from_millis(ms) });
        }
        assert_eq!(window.steps, [Step { depth: 19, measured_ms: 12.0 }]);
    }
}
