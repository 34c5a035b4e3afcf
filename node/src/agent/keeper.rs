//! Keeps one stage alive: starts its worker, waits until it has loaded, asks it for signs of life, and
//! starts another when it is lost. It knows nothing of the other stages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::{Bytes, Epoch, StageMemory, StageObservation, StageReport};
use protocol::patience::peer_timeout;
use protocol::tls::{self, TlsIdentity};
use protocol::v1::stage_client::StageClient;
use protocol::v1::{LoadState, StatusReply, StatusRequest};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::STOP_GRACE;
use super::board::{LoadedStage, StagePhase};
use super::observer::Observer;
use super::place::{Lost, Place, Worker};
use super::process::shortage;
use super::restarts::{Failure, Restarts, Verdict};

/// Between two signs of life of a stage that serves. They also tell of broken links, and for as long the replica seems
/// ready while it is not.
const HEARTBEAT: Duration = Duration::from_millis(250);

/// So much earlier than a peer's time is up a stage that serves must have answered: for the pause before it was asked, and for this
/// process being kept waiting for half a second. The stage's host may be busy, but the answer takes no part in the stage's work.
const HEARTBEAT_MARGIN: Duration = Duration::from_millis(750);

/// While it loads, progress is shown to people, the first request waits for the end of it …
const LOAD_POLL: Duration = Duration::from_millis(50);

/// … and nobody waits for tokens, while the disk and all cores may be busy.
const LOAD_DEADLINE: Duration = Duration::from_secs(15);

/// One stage to be kept alive.
pub(super) struct Keeper {
    /// Its place in the chain, and in `board`.
    pub(super) index: usize,
    pub(super) place: Place,
    /// What to report before the worker has spoken.
    pub(super) report: StageReport,
    /// Whose certificate asks.
    pub(super) identity: TlsIdentity,
    pub(super) board: watch::Sender<Vec<StagePhase>>,
    /// Where it is told what the stage is seen to do.
    pub(super) observations: watch::Sender<Vec<StageObservation>>,
    /// Told when the stage answers but cannot be linked.
    pub(super) restart: Arc<Notify>,
    pub(super) shutdown: CancellationToken,
}

/// A worker's time as a loaded stage.
struct Service<'a> {
    since: Option<Instant>,
    observer: &'a mut Observer,
}

impl Keeper {
    /// Runs until shut down or given up. The worker is gone when it returns.
    pub(super) async fn run(self, mut observer: Observer) {
        let mut restarts = Restarts::default();
        for incarnation in 1.. {
            observer.restart();
            let mut service = Service { since: None, observer: &mut observer };
            let Some(lost) = self.run_worker(incarnation, &mut service).await else { return };
            let served = service.since.map_or(Duration::ZERO, |since| since.elapsed());
            let pause = match restarts.lost(lost.failure, served) {
                Verdict::RestartAfter(pause) => pause,
                Verdict::GiveUp(tries) => return self.give_up(&lost, tries).await,
            };
            let Lost { reason, .. } = lost;
            tracing::warn!(stage = self.index, %reason, pause_ms = pause.as_millis() as u64, "the stage was lost");
            self.show(StagePhase::Starting { progress: 0.0, preparing: None, lost: Some(reason) });
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn give_up(&self, lost: &Lost, tries: u32) {
        let reason = format!("{} ({tries} workers were lost in a row)", lost.reason);
        tracing::error!(stage = self.index, %reason, "the stage is given up");
        self.show(StagePhase::GivenUp { reason });
        // The phase stays on the board until the replica is shut down.
        self.shutdown.cancelled().await;
    }

    /// Runs one worker to its end; `None` when it was shut down.
    async fn run_worker(&self, incarnation: u64, service: &mut Service<'_>) -> Option<Lost> {
        let mut told = |doing| self.show_preparing(doing);
        let started = tokio::select! {
            () = self.shutdown.cancelled() => return None,
            started = self.place.start(&self.shutdown, &mut told) => started,
        };
        let mut worker = match started {
            Ok(worker) => worker,
            Err(lost) => return Some(lost),
        };
        let stage = self.as_started(&worker, incarnation);
        tracing::debug!(stage = self.index, pid = worker.pid(), address = %stage.address, "the worker listens");
        let lost = tokio::select! {
            () = self.shutdown.cancelled() => None,
            () = worker.ended() => Some(Lost::crash("the worker ended")),
            lost = self.watch(stage, service) => Some(lost),
            () = self.restart.notified() => Some(Lost::crash("it could not be linked")),
        };
        let Some(mut lost) = lost else {
            worker.stop(STOP_GRACE).await;
            return None;
        };
        // At once: while the details are found out, nobody must believe that the replica serves.
        self.show(StagePhase::Starting { progress: 0.0, preparing: None, lost: Some(lost.reason.clone()) });
        let needed = self.report.estimated.total();
        if lost.failure == Failure::Load {
            let available = worker.available_memory().await;
            lost.reason += &available.map(|available| shortage(needed, available)).unwrap_or_default();
        }
        let ended = worker.kill(needed).await;
        if let Some(how) = ended.filter(|_| lost.failure == Failure::Crash) {
            lost.reason = format!("the worker {how}");
        }
        Some(lost)
    }

    /// The stage as it is when its worker listens.
    fn as_started(&self, worker: &Worker, incarnation: u64) -> LoadedStage {
        let report = StageReport {
            node: worker.node().map(|node| node.name().clone()),
            pid: worker.pid(),
            threads: worker.threads().unwrap_or(self.report.threads),
            ..self.report.clone()
        };
        let node = worker.node().cloned();
        LoadedStage { incarnation, address: worker.address(), node, report, broken_link: None }
    }

    /// Asks the worker for signs of life until there is none.
    async fn watch(&self, mut stage: LoadedStage, service: &mut Service<'_>) -> Lost {
        let mut client = match tls::connect(stage.address, &self.identity).await {
            Ok(channel) => StageClient::new(channel),
            Err(e) => return Lost::crash(e.to_string()),
        };
        loop {
            let serving = peer_timeout().saturating_sub(HEARTBEAT_MARGIN);
            let deadline = if service.since.is_some() { serving } else { LOAD_DEADLINE.max(serving) };
            let status = match ask(&mut client, deadline).await {
                Ok(status) => status,
                Err(lost) => return lost,
            };
            match status.state() {
                LoadState::Loaded => {
                    service.since.get_or_insert_with(Instant::now);
                    take_over(&mut stage, &status);
                    self.show(StagePhase::Loaded(stage.clone()));
                    self.tell(service.observer.take(&status));
                }
                LoadState::Failed => return failed_to_load(&status.failure),
                LoadState::Loading | LoadState::Unspecified => self.show_progress(status.progress),
            }
            tokio::time::sleep(if service.since.is_some() { HEARTBEAT } else { LOAD_POLL }).await;
        }
    }

    fn show_preparing(&self, doing: String) {
        self.board.send_if_modified(|phases| match phases.get_mut(self.index) {
            Some(StagePhase::Starting { preparing, .. }) if preparing.as_ref() != Some(&doing) => {
                *preparing = Some(doing);
                true
            }
            _ => false,
        });
    }

    fn show_progress(&self, share: f32) {
        self.board.send_if_modified(|phases| match phases.get_mut(self.index) {
            Some(StagePhase::Starting { progress, .. }) if *progress != share => {
                *progress = share;
                true
            }
            _ => false,
        });
    }

    fn tell(&self, observation: StageObservation) {
        self.observations.send_if_modified(|told| match told.get_mut(self.index) {
            Some(told) if *told != observation => {
                *told = observation;
                true
            }
            _ => false,
        });
    }

    fn show(&self, phase: StagePhase) {
        self.board.send_if_modified(|phases| match phases.get_mut(self.index) {
            Some(shown) if *shown != phase => {
                *shown = phase;
                true
            }
            _ => false,
        });
    }
}

fn failed_to_load(failure: &str) -> Lost {
    Lost { reason: format!("it could not load its layers: {failure}"), failure: Failure::Load }
}

async fn ask(client: &mut StageClient<Channel>, deadline: Duration) -> Result<StatusReply, Lost> {
    match tokio::time::timeout(deadline, client.status(StatusRequest {})).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(Lost::crash(format!("its status cannot be had: {}", status.message()))),
        Err(_) => Err(Lost::crash(format!("it did not answer for {} s", deadline.as_secs_f32()))),
    }
}

fn take_over(stage: &mut LoadedStage, status: &StatusReply) {
    stage.broken_link =
        (!status.link_failure.is_empty()).then(|| (Epoch(status.epoch), status.link_failure.clone()));
    stage.report.gpu_layers = status.gpu_layers;
    // The first report counts: later ones differ by what the worker has cached since.
    if let (Some(memory), Bytes::ZERO) = (&status.memory, stage.report.resident) {
        stage.report.resident = Bytes(memory.resident);
        stage.report.estimated = StageMemory {
            weights: Bytes(memory.weights),
            cache: Bytes(memory.cache),
            compute: Bytes(memory.compute),
            runtime: Bytes(memory.runtime),
        };
    }
}
