//! Makes one replica of the stages that its keepers keep alive: links them under a new epoch whenever one is new or a
//! link broke, and says what state the replica is in.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Epoch, ReplicaState, StageIndex, StageReport};
use protocol::hand_off::ChainStage;
use protocol::rows::RowEncoding;
use protocol::tls::{self, TlsIdentity};
use protocol::v1::stage_client::StageClient;
use protocol::v1::{self, LinkRequest};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::board::{Assessment, Linked, LoadedStage, StagePhase, assess};
use super::epochs::Epochs;

/// Within which a stage must have linked: a connection on the LAN and an answer.
const LINK_DEADLINE: Duration = Duration::from_secs(5);

/// Before linking is tried again.
const LINK_PAUSE: Duration = Duration::from_millis(500);

/// Refusals in a row after which a stage that answers but cannot be linked gets a new worker.
const MOST_REFUSALS: u32 = 3;

/// One replica to be supervised.
pub(super) struct Supervisor {
    pub(super) board: watch::Receiver<Vec<StagePhase>>,
    pub(super) state: watch::Sender<ReplicaState>,
    pub(super) reports: watch::Sender<Vec<StageReport>>,
    /// One per stage: asks its keeper for a new worker.
    pub(super) restarts: Vec<Arc<Notify>>,
    pub(super) identity: TlsIdentity,
    pub(super) encoding: RowEncoding,
    pub(super) shutdown: CancellationToken,
    pub(super) epochs: Epochs,
    /// In a row.
    pub(super) refusals: u32,
}

/// A stage that refused to be linked.
struct Refusal {
    stage: usize,
    reason: String,
}

impl Supervisor {
    /// Runs until shut down.
    pub(super) async fn run(mut self) {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.supervise() => {}
        }
        self.publish(ReplicaState::Down { reason: "it was stopped".to_owned() });
    }

    /// Acts on what the board shows whenever that changes. Can be dropped at any time: a link that was begun is begun
    /// again under another epoch.
    async fn supervise(&mut self) {
        let mut linked = None;
        loop {
            let phases = self.board.borrow_and_update().clone();
            let mut retry = false;
            match assess(&phases, linked.as_ref()) {
                Assessment::Serving => {}
                Assessment::Wait(state) => {
                    linked = None;
                    self.publish(state);
                }
                Assessment::Link { stages, lost } => {
                    linked = self.link_anew(&stages, lost).await;
                    retry = linked.is_none();
                }
            }
            let changed = tokio::select! {
                changed = self.board.changed() => changed,
                () = tokio::time::sleep(LINK_PAUSE), if retry => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Links under a new epoch; `None` if a stage refused, or there was no epoch.
    async fn link_anew(&mut self, stages: &[LoadedStage], lost: Option<String>) -> Option<Linked> {
        if let Some(reason) = lost {
            tracing::warn!(%reason, "the stages are linked again");
            self.publish(ReplicaState::Down { reason: format!("{reason}; the stages are linked again") });
        }
        let epoch = match self.epochs.next().await {
            Ok(epoch) => epoch,
            Err(reason) => {
                tracing::warn!(%reason, "no epoch could be taken");
                self.publish(ReplicaState::Down { reason: format!("no epoch could be taken: {reason}") });
                return None;
            }
        };
        match self.link(stages, epoch).await {
            Ok(()) => {
                self.refusals = 0;
                Some(self.serve(stages, epoch))
            }
            Err(refusal) => {
                self.refusals += 1;
                self.refused(&refusal);
                None
            }
        }
    }

    /// Links from the master down to stage 0, so that a stage's successor is in the epoch already when it links.
    async fn link(&self, stages: &[LoadedStage], epoch: Epoch) -> Result<(), Refusal> {
        let encoding = v1::Encoding::from(self.encoding).into();
        let chain: Vec<_> = stages.iter().map(chain_stage).collect();
        for (i, stage) in stages.iter().enumerate().rev() {
            let linking = async {
                let next = match stages.len() {
                    1 => String::new(),
                    n => address_for(stage, &stages[(i + 1) % n]).await?,
                };
                let request = LinkRequest { epoch: epoch.0, next, encoding, chain: chain.clone() };
                link_one(stage, request, &self.identity).await
            };
            let linked = tokio::time::timeout(LINK_DEADLINE, linking).await;
            let late = || Err(format!("no answer for {} s", LINK_DEADLINE.as_secs()));
            linked.unwrap_or_else(|_| late()).map_err(|reason| Refusal { stage: i, reason })?;
        }
        Ok(())
    }

    fn serve(&self, stages: &[LoadedStage], epoch: Epoch) -> Linked {
        self.reports.send_replace(stages.iter().map(|stage| stage.report.clone()).collect());
        if let Some(master) = stages.last() {
            self.publish(ReplicaState::Ready { master: master.address, epoch });
        }
        tracing::info!(epoch = epoch.0, stages = stages.len(), "the replica serves");
        Linked { epoch, incarnations: stages.iter().map(|stage| stage.incarnation).collect() }
    }

    fn refused(&self, refusal: &Refusal) {
        let stage = StageIndex(refusal.stage as u32);
        tracing::warn!(stage = stage.0, reason = %refusal.reason, "the stage could not be linked");
        let reason = format!("{stage} could not be linked: {}", refusal.reason);
        self.publish(ReplicaState::Down { reason });
        if self.refusals.is_multiple_of(MOST_REFUSALS)
            && let Some(restart) = self.restarts.get(refusal.stage)
        {
            restart.notify_one();
        }
    }

    fn publish(&self, state: ReplicaState) {
        self.state.send_if_modified(|shown| {
            let differs = *shown != state;
            if differs {
                if let ReplicaState::Down { reason } = &state {
                    tracing::debug!(%reason, "the replica is down");
                }
                *shown = state;
            }
            differs
        });
    }
}

/// Where a stage reaches the next. Hosts have several addresses, and the one that leads there from here need not lead there
/// from the stage: its node finds out.
async fn address_for(stage: &LoadedStage, next: &LoadedStage) -> Result<String, String> {
    match (&stage.node, &next.node) {
        (Some(node), Some(of_next)) if node != of_next => {
            let reached = node.reach(of_next.peer()).await.map_err(|error| error.to_string())?;
            Ok(reached.with_port(next.address.port()).to_string())
        }
        _ => Ok(next.address.to_string()),
    }
}

/// How other replicas' stages, and the master, reach a stage: as this process does.
fn chain_stage(stage: &LoadedStage) -> v1::ChainStage {
    let (address, layers) = (stage.address.to_string(), stage.report.layers);
    ChainStage { address, layers }.into()
}

async fn link_one(stage: &LoadedStage, request: LinkRequest, identity: &TlsIdentity) -> Result<(), String> {
    let channel = tls::connect(stage.address, identity).await.map_err(|e| e.to_string())?;
    let reply = StageClient::new(channel).link(request).await;
    reply.map(|_| ()).map_err(|status| status.message().to_owned())
}
