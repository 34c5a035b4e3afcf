//! The agent's part for one replica: a keeper per stage, a supervisor over them, and what others see. A stage's worker is a
//! child of this process, or of a node that runs it for the agent.
//!
//! Everything here is a task of the agent and ends with it: [`Agent::shutdown`] returns when no worker is left, and
//! workers die with the agent's process because their stdin, or the stream of orders to their node, ends.

mod board;
mod epochs;
mod keeper;
mod logs;
mod observer;
pub(crate) mod order;
mod place;
pub(crate) mod process;
mod remote;
mod restarts;
mod supervisor;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use cluster::{
    Bytes, DeviceProfile, ModelHash, ReplicaState, StageIndex, StageLoad, StageMemory, StageObservation,
    StageReport,
};
use protocol::emulation::Emulation;
use protocol::node::{Peer, StageOrder, Supply};
use protocol::rows::RowEncoding;
use protocol::tls::{ClusterCa, TlsError, TlsIdentity};
use thiserror::Error;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::client::NodeClient;
use crate::memory::MemoryCheck;
use crate::prepare::{PreparedReplica, PreparedStage, ReplicaPlan};
use crate::slices::Pin;
use crate::turns::TurnsFile;
use board::StagePhase;
pub use epochs::Epochs;
use keeper::Keeper;
use observer::{Observed, Observer};
use order::{OnHost, ReplicaOrder, StagePlace, worker_config};
pub use place::Whereabouts;
use place::{NodeAt, Place};
pub use process::WorkerCommand;
use supervisor::Supervisor;

/// A worker that is asked to stop has this long before it is killed.
pub(crate) const STOP_GRACE: Duration = Duration::from_secs(2);

/// How workers run, alike for all stages of a replica.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// CPU threads of each stage; else each host shares its cores out over its stages.
    pub threads: Option<u32>,
    /// Decode frames in flight, at most.
    pub micro_batches: u32,
    /// Requests that may wait for a slot.
    pub queue_limit: u32,
    /// How hidden rows travel between stages.
    pub encoding: RowEncoding,
    /// How long nodes keep a stage loaded when this process is gone or out of reach, for who orders it again; not those of this
    /// host, which end with it.
    pub keep: Duration,
}

/// A replica to run.
pub struct ReplicaConfig {
    /// How its workers are started.
    pub command: WorkerCommand,
    /// What they load.
    pub replica: PreparedReplica,
    /// How they run.
    pub settings: WorkerSettings,
    /// The device that each stage stands for instead of computing; empty where they compute.
    pub emulations: Vec<Emulation>,
    /// Profiles of this host's devices for the model, against which steps are compared; each stage takes the first that was
    /// measured with all that it uses.
    pub profiles: Vec<DeviceProfile>,
    /// Stages of other replicas that share this host's cores.
    pub beside: u32,
    /// By which they take turns: the same for all of them.
    pub turns: Arc<TurnsFile>,
}

/// Where an agent tells of its replica. The other ends may exist already.
pub struct Outlook {
    /// Whether the replica can answer.
    pub state: watch::Sender<ReplicaState>,
    /// What its stages are seen to do, a few times a second.
    pub observations: watch::Sender<Vec<StageObservation>>,
    /// What they said of themselves when the replica last became ready; told before its state.
    pub reports: watch::Sender<Vec<StageReport>>,
}

impl Outlook {
    /// Where others look at the state alone, or ask the agent.
    pub fn new(state: watch::Sender<ReplicaState>) -> Self {
        Self { state, observations: watch::Sender::new(Vec::new()), reports: watch::Sender::new(Vec::new()) }
    }
}

/// A replica to run on nodes, which cut their stages from their own copies of the model, or fetch them.
pub struct RemoteReplica {
    /// What to run.
    pub plan: ReplicaPlan,
    /// How the nodes know the model.
    pub model_hash: ModelHash,
    /// A node for each stage. One that is there several times runs several stages.
    pub nodes: Vec<NodeClient>,
    /// Who asks.
    pub identity: TlsIdentity,
    /// What to do about a stage that does not fit its node.
    pub memory_check: MemoryCheck,
    /// How the workers run.
    pub settings: WorkerSettings,
    /// Profiles of the nodes' devices for the model, named as in the cluster file: `node/device`.
    pub profiles: Vec<DeviceProfile>,
    /// Nodes of the stages of other replicas, which share their hosts' cores. One for each stage.
    pub beside: Vec<NodeClient>,
    /// From whom nodes without a copy of the model get their parts of it, the likeliest first: other nodes, and last this
    /// process, whose word on what the parts are counts.
    pub sources: Vec<Peer>,
    /// Numbers for its incarnations.
    pub epochs: Epochs,
    /// Where nodes are that were started again elsewhere; else they are looked for where they were.
    pub whereabouts: Option<Whereabouts>,
}

/// A stage was given up before the replica served for the first time.
#[derive(Debug, Error)]
#[error("the replica cannot serve: {reason}")]
pub struct NeverReady {
    /// Which stage, and why.
    pub reason: String,
}

/// A running replica.
pub struct Agent {
    state: watch::Receiver<ReplicaState>,
    reports: watch::Receiver<Vec<StageReport>>,
    board: watch::Receiver<Vec<StagePhase>>,
    observations: watch::Receiver<Vec<StageObservation>>,
    shutdown: CancellationToken,
    // Ends the tasks if the agent is dropped without being shut down.
    _guard: DropGuard,
    tasks: JoinSet<()>,
    // Kept for the stages on this host.
    _turns: Option<Arc<TurnsFile>>,
    _pins: Vec<Pin>,
}

impl Agent {
    /// Starts a worker for each stage on this host.
    pub fn start(config: ReplicaConfig, ca: &ClusterCa, outlook: Outlook) -> Result<Self, TlsError> {
        let encoding = config.settings.encoding;
        let identity = ca.issue("agent")?;
        let (turns, pins) = (Arc::clone(&config.turns), config.replica.pins.clone());
        let stages = local_stages(config, ca)?;
        // No stage outlives this agent.
        let epochs = Epochs::default();
        Ok(Self {
            _turns: Some(turns),
            _pins: pins,
            ..Self::run(stages, Link { identity, encoding, epochs }, outlook)
        })
    }

    /// The same on nodes.
    pub fn start_on_nodes(replica: RemoteReplica, outlook: Outlook) -> Self {
        let (identity, encoding) = (replica.identity.clone(), replica.settings.encoding);
        let link = Link { identity, encoding, epochs: replica.epochs.clone() };
        Self::run(remote_stages(&replica), link, outlook)
    }

    fn run(stages: Vec<Stage>, link: Link, outlook: Outlook) -> Self {
        let Outlook { state, observations, reports } = outlook;
        let shutdown = CancellationToken::new();
        let Link { identity, encoding, epochs } = link;
        let starting = StagePhase::Starting { progress: 0.0, preparing: None, lost: None };
        let (board, board_seen) = watch::channel(vec![starting; stages.len()]);
        let reports_seen = reports.subscribe();
        let indices = 0..stages.len() as u32;
        observations.send_replace(indices.map(|stage| StageObservation::none(StageIndex(stage))).collect());
        let mut tasks = JoinSet::new();
        let mut restarts = Vec::new();
        for (index, stage) in stages.into_iter().enumerate() {
            let restart = Arc::new(Notify::new());
            restarts.push(Arc::clone(&restart));
            let Stage { place, report, observer } = stage;
            let keeper = Keeper {
                index,
                place,
                report,
                identity: identity.clone(),
                board: board.clone(),
                observations: observations.clone(),
                restart,
                shutdown: shutdown.clone(),
            };
            tasks.spawn(keeper.run(observer));
        }
        let state_seen = state.subscribe();
        let supervisor = Supervisor {
            board: board_seen.clone(),
            state,
            reports,
            restarts,
            identity,
            encoding,
            shutdown: shutdown.clone(),
            epochs,
            refusals: 0,
        };
        tasks.spawn(supervisor.run());
        Self {
            state: state_seen,
            reports: reports_seen,
            board: board_seen,
            observations: observations.subscribe(),
            _guard: shutdown.clone().drop_guard(),
            shutdown,
            tasks,
            _turns: None,
            _pins: Vec::new(),
        }
    }

    /// Whether the replica can answer.
    pub fn state(&self) -> watch::Receiver<ReplicaState> {
        self.state.clone()
    }

    /// What the stages said of themselves when the replica last became ready.
    pub fn reports(&self) -> watch::Receiver<Vec<StageReport>> {
        self.reports.clone()
    }

    /// What the stages are seen to do.
    pub fn observations(&self) -> watch::Receiver<Vec<StageObservation>> {
        self.observations.clone()
    }

    /// Waits until the replica serves for the first time, or never will.
    pub async fn ready(&self) -> Result<Vec<StageReport>, NeverReady> {
        let (mut state, mut board) = (self.state.clone(), self.board.clone());
        loop {
            if matches!(*state.borrow_and_update(), ReplicaState::Ready { .. }) {
                return Ok(self.reports.borrow().clone());
            }
            let given_up = given_up(&board.borrow_and_update());
            if let Some(reason) = given_up {
                return Err(NeverReady { reason });
            }
            let ended = tokio::select! {
                changed = state.changed() => changed.is_err(),
                changed = board.changed() => changed.is_err(),
            };
            if ended {
                return Err(NeverReady { reason: "it was shut down".to_owned() });
            }
        }
    }

    /// Waits until a stage is given up, and says why: the replica will not serve again by itself.
    pub async fn gives_up(&self) -> String {
        let mut board = self.board.clone();
        loop {
            let given_up = given_up(&board.borrow_and_update());
            if let Some(reason) = given_up {
                return reason;
            }
            if board.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Stops all workers and returns when they are gone: within seconds, whatever they do.
    pub async fn shutdown(mut self) {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(e) = ended {
                tracing::error!(error = %e, "a task of the agent did not end well");
            }
        }
    }
}

/// Which stage was given up, and why.
fn given_up(board: &[StagePhase]) -> Option<String> {
    board.iter().enumerate().find_map(|(i, phase)| match phase {
        StagePhase::GivenUp { reason } => Some(format!("{}: {reason}", StageIndex(i as u32))),
        StagePhase::Starting { .. } | StagePhase::Loaded(_) => None,
    })
}

/// A stage to be kept.
struct Stage {
    place: Place,
    /// What to report before the worker has spoken.
    report: StageReport,
    observer: Observer,
}

/// How the agent and the stages talk to each other.
struct Link {
    identity: TlsIdentity,
    encoding: RowEncoding,
    epochs: Epochs,
}

fn local_stages(config: ReplicaConfig, ca: &ClusterCa) -> Result<Vec<Stage>, TlsError> {
    let ReplicaConfig { command, replica, settings, emulations, profiles, beside, turns } = config;
    let n_stages = replica.stages.len() as u32;
    let common = ReplicaOrder {
        model: replica.model,
        model_hash: replica.model_hash,
        n_stages,
        load: replica.load,
        prefill_chunk: replica.prefill_chunk,
        settings,
        options: replica.options,
        // That was checked for all stages together.
        memory_check: MemoryCheck::Elsewhere,
    };
    let stage = |(stage, prepared): (u32, PreparedStage)| {
        let PreparedStage { layers, gpu_layers, path, predicted } = prepared;
        let order = common.stage(StagePlace { stage, layers, gpu_layers, stages_here: n_stages + beside });
        let host = OnHost {
            slice: path,
            embedding: replica.embedding.clone(),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            tls: ca.issue(&format!("stage {stage}"))?,
            emulation: emulations.get(stage as usize).cloned(),
            turns: turns.path().to_owned(),
        };
        let observed = Observed { shape: &replica.shape, order: &order, profiles: profiles.iter().collect() };
        let observer = Observer::new(&observed);
        let config = Box::new(worker_config(&order, &replica.shape, host));
        let place = Place::Here { command: command.clone(), config };
        Ok(Stage { place, report: expected_report(&order, predicted), observer })
    };
    (0..).zip(replica.stages).map(stage).collect()
}

fn remote_stages(replica: &RemoteReplica) -> Vec<Stage> {
    let RemoteReplica { plan, nodes, identity, .. } = replica;
    let common = ReplicaOrder {
        model: plan.model().name(),
        model_hash: replica.model_hash,
        n_stages: plan.stages().len() as u32,
        load: plan.load(),
        prefill_chunk: plan.prefill_chunk(),
        settings: replica.settings.clone(),
        options: plan.options(),
        memory_check: replica.memory_check,
    };
    let stages = plan.stages().iter().zip(plan.predicted()).zip(nodes).zip(0..);
    let stage = |(((load, predicted), node), stage): (((&StageLoad, &StageMemory), &NodeClient), u32)| {
        let stages_here = nodes.iter().chain(&replica.beside).filter(|other| *other == node).count() as u32;
        let (layers, gpu_layers) = (load.layers, load.gpu_layers);
        let supply = supply(replica, stage, node);
        let order = common.stage(StagePlace { stage, layers, gpu_layers, stages_here });
        let order = StageOrder { supply, ..order };
        let report = expected_report(&order, *predicted);
        let prefix = format!("{}/", node.name());
        let profiles =
            replica.profiles.iter().filter(|profile| profile.device.0.starts_with(&prefix)).collect();
        let observer = Observer::new(&Observed { shape: plan.model().shape(), order: &order, profiles });
        let build = node.facts().build.clone();
        let node = NodeAt {
            name: node.name().clone(),
            address: node.address().clone(),
            whereabouts: replica.whereabouts.clone(),
            identity: identity.clone(),
            build,
        };
        Stage { place: Place::There { node, order: Box::new(order) }, report, observer }
    };
    stages.map(stage).collect()
}

/// How a stage's node gets its part of the model, if it has no copy of it.
fn supply(replica: &RemoteReplica, stage: u32, node: &NodeClient) -> Option<Supply> {
    let (files, shape) = (replica.plan.files(), replica.plan.model().shape().clone());
    let others = replica.sources.iter().filter(|source| source.instance != node.facts().instance);
    let sources: Vec<Peer> = others.cloned().collect();
    let slice = *files.slices.get(stage as usize)?;
    (!sources.is_empty()).then_some(Supply { shape, slice, embedding: files.embedding, sources })
}

fn expected_report(order: &StageOrder, predicted: StageMemory) -> StageReport {
    StageReport {
        stage: StageIndex(order.stage),
        layers: order.layers,
        gpu_layers: order.gpu_layers,
        node: None,
        pid: 0,
        threads: order::threads(order),
        estimated: predicted,
        resident: Bytes::ZERO,
    }
}
