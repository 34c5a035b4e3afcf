//! The test bed: a worker process for each stage of a plan, an agent for each replica, and an orchestrator over them. Devices and
//! network are emulated; all else is what serves a model that computes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cluster::{
    Bytes, DeviceMemory, LinkEncoding, LinkQuality, Load, Millis, ModelHash, ModelShape, ReplicaPlan,
    ReplicaState, StageMemory, StagePlan, TokensPerSecond,
};
use futures::future::{join_all, try_join_all};
use gguf::cut::CutOptions;
use node::agent::{Agent, Outlook, ReplicaConfig, WorkerCommand, WorkerSettings};
use node::{ModelFile, PreparedReplica, PreparedStage, TurnsFile};
use orchestrator::desk::PredictedRates;
use orchestrator::router::PolicyName;
use orchestrator::{Fleet, Limits, OrchestratorConfig, ReplicaFeed};
use planner::Problem;
use planner::sim::SimReplica;
use protocol::emulation::{EmulatedNetwork, Emulation};
use protocol::tls::ClusterCa;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::trial::Trial;
use crate::commands::planning::row_encoding;

/// Under which the API lists the model.
pub(super) const MODEL: &str = "emulated";

/// Width of the hidden rows that travel: what there is to show that they do.
const WIDTH: u32 = 8;

/// What all runs have in common.
pub(super) struct Ground {
    /// How workers are started.
    pub(super) command: WorkerCommand,
    /// Whose vocabulary the API uses.
    pub(super) vocabulary: ModelFile,
    pub(super) time_scale: f64,
}

/// A plan that runs.
pub(super) struct Bed {
    /// Of the API.
    pub(super) api: SocketAddr,
    agents: Vec<Agent>,
    http: JoinHandle<Result<(), orchestrator::ServeError>>,
    stop: CancellationToken,
}

impl Bed {
    /// Starts all replicas of the plan, and waits until they serve.
    pub(super) async fn start(trial: &Trial, ground: &Ground) -> Result<Self> {
        let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listening for the API")?;
        let api = listener.local_addr().context("asking for the address of the API")?;
        let limits = limits(trial);
        let fleet = Fleet::new(ca.issue("orchestrator")?, PolicyName::Jsq, limits.queue);
        fleet.expect_output(trial.problem.workload.mean_output());
        let turns = Arc::new(TurnsFile::new()?);
        let mut agents = Vec::new();
        for (replica, sim) in trial.plan.replicas.iter().zip(trial.cluster.replicas()) {
            let loading = ReplicaState::Loading { progress: 0.0, waiting_for: String::new() };
            let outlook = Outlook::new(watch::Sender::new(loading));
            let config = Stages { trial, ground, replica }.config(Arc::clone(&turns))?;
            let agent = Agent::start(config, &ca, outlook)?;
            fleet.add(feed(&agent, (replica, sim), trial, ground.time_scale));
            agents.push(agent);
        }
        let config = OrchestratorConfig {
            model_name: MODEL.to_owned(),
            aliases: Vec::new(),
            model_path: ground.vocabulary.path().to_owned(),
            chat_template: None,
            fleet,
            cluster: None,
            deployment: None,
            n_ctx: trial.problem.workload.slot_context,
            limits,
        };
        let stop = CancellationToken::new();
        let http = tokio::spawn(orchestrator::serve(listener, config, stop.clone()));
        let bed = Self { api, agents, http, stop };
        match bed.ready().await {
            Ok(()) => Ok(bed),
            Err(error) => {
                bed.stop().await;
                Err(error)
            }
        }
    }

    async fn ready(&self) -> Result<()> {
        try_join_all(self.agents.iter().map(Agent::ready)).await?;
        // The vocabulary is read meanwhile.
        let (client, url) = (reqwest::Client::new(), format!("http://{}/ready", self.api));
        for _ in 0..600 {
            if client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(anyhow!("the orchestrator was not ready within 30 s"))
    }

    /// Ends all.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        // It has deadlines of its own.
        let _ = self.http.await;
        join_all(self.agents.into_iter().map(Agent::shutdown)).await;
    }
}

/// Nobody is refused: the line may hold all requests, for as long as all of them take.
fn limits(trial: &Trial) -> Limits {
    let requests = trial.requests.len();
    let defaults = Limits::default();
    Limits {
        queue: requests,
        max_open_requests: defaults.max_open_requests.max(requests),
        queue_timeout: Duration::from_secs(3600),
        drain: Duration::ZERO,
        ..defaults
    }
}

/// What the orchestrator is told of a replica, its speed as it is here.
fn feed(
    agent: &Agent,
    (replica, sim): (&ReplicaPlan, &SimReplica),
    trial: &Trial,
    time_scale: f64,
) -> ReplicaFeed {
    let prompt = trial.problem.workload.mean_prompt();
    let token = |n: usize| Millis(sim.tpot.get(n).copied().unwrap_or_default() * 1e3 * time_scale);
    ReplicaFeed {
        state: agent.state(),
        observations: agent.observations(),
        hops: watch::channel(None).1,
        role: replica.role,
        slots: replica.slots,
        predicted: Some(PredictedRates {
            prefill: TokensPerSecond(prompt / (sim.prompt_seconds(prompt) * time_scale)),
            tpot_alone: token(1),
            tpot_full: token(replica.slots as usize),
        }),
    }
}

/// The stages of a replica.
struct Stages<'a> {
    trial: &'a Trial,
    ground: &'a Ground,
    replica: &'a ReplicaPlan,
}

impl Stages<'_> {
    fn config(&self, turns: Arc<TurnsFile>) -> Result<ReplicaConfig> {
        let ReplicaPlan { role, stages, slots, .. } = self.replica;
        let prefill_chunk = self.trial.chunk(*role);
        let prepared = stages.iter().map(|stage| PreparedStage {
            layers: stage.layers,
            gpu_layers: stage.gpu_blocks,
            path: PathBuf::new(),
            predicted: StageMemory::default(),
        });
        let n_ctx = self.trial.problem.workload.slot_context;
        Ok(ReplicaConfig {
            command: self.ground.command.clone(),
            replica: PreparedReplica {
                pins: Vec::new(),
                model: MODEL.to_owned(),
                model_hash: ModelHash([0; 32]),
                options: CutOptions::default(),
                shape: ModelShape { n_embd: WIDTH, ..self.model() },
                stages: prepared.collect(),
                embedding: PathBuf::new(),
                load: Load { slots: *slots, n_ctx, n_ubatch: prefill_chunk.max(*slots) },
                prefill_chunk,
            },
            settings: WorkerSettings {
                threads: Some(1),
                micro_batches: stages.len() as u32,
                queue_limit: *slots,
                encoding: row_encoding(stages.first().map_or(LinkEncoding::F32, |stage| stage.encoding))?,
                keep: Duration::ZERO,
            },
            emulations: stages.iter().map(|stage| self.emulation(stage)).collect::<Result<_>>()?,
            profiles: Vec::new(),
            beside: 0,
            turns,
        })
    }

    /// The model, with the vocabulary that the API uses.
    fn model(&self) -> ModelShape {
        let n_vocab = self.ground.vocabulary.shape().n_vocab;
        ModelShape { n_vocab, ..self.trial.problem.model.clone() }
    }

    fn emulation(&self, stage: &StagePlan) -> Result<Emulation> {
        let problem = &self.trial.problem;
        let profile = problem.profiles.iter().find(|profile| profile.device == stage.device);
        let profile = profile.with_context(|| format!("there is no profile of {}", stage.device))?;
        // Whether it fits was the planner's question.
        let ample = DeviceMemory::Discrete { vram: Bytes(1 << 50), ram: Bytes(1 << 50) };
        let link = link(problem).context("the suite's devices are not linked")?;
        let network =
            EmulatedNetwork { bytes_per_second: link.bandwidth.0, latency_ms: link.one_way_latency.0 };
        Ok(Emulation::new(profile, ample, &self.model(), self.ground.time_scale)?.within(network)?)
    }
}

/// A link between two of the devices: in the suite all are alike.
fn link(problem: &Problem) -> Option<LinkQuality> {
    let mut nodes = problem.devices.iter().map(|device| &device.node);
    let one = nodes.next()?;
    problem.links.between(one, nodes.find(|other| *other != one)?)
}
