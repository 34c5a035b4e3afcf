//! The agent's part for one replica on this host: a keeper per stage, a supervisor over them, and what others see.
//!
//! Everything here is a task of the agent and ends with it: [`Agent::shutdown`] returns when no worker is left, and
//! workers die with the agent's process because their stdin ends.

mod board;
mod keeper;
mod logs;
mod observer;
mod process;
mod restarts;
mod supervisor;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use cluster::{Bytes, DeviceProfile, Epoch, ReplicaState, StageIndex, StageObservation, StageReport};
use protocol::emulation::Emulation;
use protocol::rows::RowEncoding;
use protocol::tls::{ClusterCa, TlsError};
use protocol::worker::{self, SliceConfig, WorkerConfig};
use thiserror::Error;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::prepare::{PreparedReplica, PreparedStage};
use board::StagePhase;
use keeper::Keeper;
use observer::Observer;
pub use process::WorkerCommand;
use supervisor::Supervisor;

/// A step in flight for longer makes the master give the replica up. A frame takes seconds on the slowest hosts, and
/// frozen workers are noticed by their heartbeat long before; this is for a stage that answers but makes no progress.
const STEP_DEADLINE_SECS: u32 = 120;

/// How workers run, alike for all stages of a replica.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// CPU threads of each stage.
    pub threads: u32,
    /// Decode frames in flight, at most.
    pub micro_batches: u32,
    /// Requests that may wait for a slot.
    pub queue_limit: u32,
    /// How hidden rows travel between stages.
    pub encoding: RowEncoding,
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
}

/// Where an agent tells of its replica. The other ends may exist already.
pub struct Outlook {
    /// Whether the replica can answer.
    pub state: watch::Sender<ReplicaState>,
    /// What its stages are seen to do, a few times a second.
    pub observations: watch::Sender<Vec<StageObservation>>,
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
}

impl Agent {
    /// Starts a worker for each stage.
    pub fn start(config: ReplicaConfig, ca: &ClusterCa, outlook: Outlook) -> Result<Self, TlsError> {
        let Outlook { state, observations } = outlook;
        let shutdown = CancellationToken::new();
        let identity = ca.issue("agent")?;
        let starting = StagePhase::Starting { progress: 0.0, lost: None };
        let (board, board_seen) = watch::channel(vec![starting; config.replica.stages.len()]);
        let (reports, reports_seen) = watch::channel(Vec::new());
        let stages = 0..config.replica.stages.len() as u32;
        observations.send_replace(stages.map(|stage| StageObservation::none(StageIndex(stage))).collect());
        let mut tasks = JoinSet::new();
        let mut restarts = Vec::new();
        for (index, stage) in config.replica.stages.iter().enumerate() {
            let restart = Arc::new(Notify::new());
            restarts.push(Arc::clone(&restart));
            let keeper = Keeper {
                index,
                command: config.command.clone(),
                config: worker_config(&config, index, ca)?,
                report: expected_report(index, stage),
                identity: identity.clone(),
                board: board.clone(),
                observations: observations.clone(),
                restart,
                shutdown: shutdown.clone(),
            };
            tasks.spawn(keeper.run(Observer::new(&config, index)));
        }
        let state_seen = state.subscribe();
        let supervisor = Supervisor {
            board: board_seen.clone(),
            state,
            reports,
            restarts,
            identity,
            encoding: config.settings.encoding,
            shutdown: shutdown.clone(),
            epoch: Epoch(0),
            refusals: 0,
        };
        tasks.spawn(supervisor.run());
        Ok(Self {
            state: state_seen,
            reports: reports_seen,
            board: board_seen,
            observations: observations.subscribe(),
            _guard: shutdown.clone().drop_guard(),
            shutdown,
            tasks,
        })
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
            let given_up = board.borrow_and_update().iter().enumerate().find_map(|(i, phase)| match phase {
                StagePhase::GivenUp { reason } => Some(format!("{}: {reason}", StageIndex(i as u32))),
                StagePhase::Starting { .. } | StagePhase::Loaded(_) => None,
            });
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

fn expected_report(index: usize, stage: &PreparedStage) -> StageReport {
    StageReport {
        stage: StageIndex(index as u32),
        layers: stage.layers,
        gpu_layers: stage.gpu_layers,
        pid: 0,
        estimated: stage.predicted,
        resident: Bytes::ZERO,
    }
}

fn worker_config(config: &ReplicaConfig, index: usize, ca: &ClusterCa) -> Result<WorkerConfig, TlsError> {
    let ReplicaConfig { replica, settings, .. } = config;
    let stage = &replica.stages[index];
    Ok(WorkerConfig {
        version: worker::VERSION,
        stage: index as u32,
        n_stages: replica.stages.len() as u32,
        n_layer: replica.shape.n_layer(),
        n_embd: replica.shape.n_embd,
        slices: vec![SliceConfig {
            path: stage.path.clone(),
            layers: stage.layers,
            gpu_layers: stage.gpu_layers,
        }],
        embedding: (index == 0).then(|| replica.embedding.clone()),
        slots: replica.load.slots,
        n_ctx: replica.load.n_ctx,
        n_batch: replica.load.n_ubatch,
        n_ubatch: replica.load.n_ubatch,
        threads: settings.threads,
        micro_batches: settings.micro_batches,
        queue_limit: settings.queue_limit,
        prefill_chunk: replica.prefill_chunk,
        extra_buffers: true,
        recurrent: replica.shape.has_recurrent_state(),
        smallest_window: replica.shape.smallest_window(),
        step_deadline_secs: STEP_DEADLINE_SECS,
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        tls: ca.issue(&format!("stage {index}"))?,
        emulation: config.emulations.get(index).cloned().map(Box::new),
    })
}
