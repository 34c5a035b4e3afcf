//! One replica of a deployment, from its start to its end: a task that connects to its nodes and has an agent run it there.

use std::sync::Arc;
use std::time::Duration;

use cluster::{ForetoldHops, ReplicaState, StageMemory, StageObservation, StageReport};
use deploy::Chain;
use node::ReplicaPlan;
use node::agent::{Agent, Outlook};
use node::links::RingWatcher;
use orchestrator::ReplicaFeed;
use protocol::rows::RowEncoding;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::super::fixed::ring_outlook;
use super::super::links;
use super::ground::Ground;

/// Before nodes that could not be connected to are tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A replica to be run.
pub(super) struct Order {
    /// Under which it is known.
    pub(super) number: usize,
    pub(super) chain: Chain,
    pub(super) encoding: RowEncoding,
}

/// What is told of a replica by the task that runs it.
#[derive(Clone)]
pub(super) struct Teller {
    state: watch::Sender<ReplicaState>,
    observations: watch::Sender<Vec<StageObservation>>,
    hops: watch::Sender<Option<ForetoldHops>>,
    reports: watch::Sender<Vec<StageReport>>,
    predicted: watch::Sender<Vec<StageMemory>>,
    /// Why no agent tries any more.
    given_up: watch::Sender<Option<String>>,
    /// Rung when the state is another.
    bell: Arc<Notify>,
}

/// What is heard of it.
pub(super) struct Heard {
    pub(super) state: watch::Receiver<ReplicaState>,
    pub(super) reports: watch::Receiver<Vec<StageReport>>,
    /// What each stage should take, once that is known.
    pub(super) predicted: watch::Receiver<Vec<StageMemory>>,
    pub(super) given_up: watch::Receiver<Option<String>>,
}

/// The two ends of the talk about a replica, and what the orchestrator hears of it.
pub(super) fn talk(bell: Arc<Notify>, slots: u32) -> (Teller, Heard, ReplicaFeed) {
    let waiting_for = "its nodes to be connected to".to_owned();
    let (state, state_heard) = watch::channel(ReplicaState::Loading { progress: 0.0, waiting_for });
    let (observations, observed) = watch::channel(Vec::new());
    let (hops, foretold) = watch::channel(None);
    let (reports, reports_heard) = watch::channel(Vec::new());
    let (predicted, predicted_heard) = watch::channel(Vec::new());
    let (given_up, given_up_heard) = watch::channel(None);
    let feed = ReplicaFeed {
        state: state_heard.clone(),
        observations: observed,
        hops: foretold,
        slots,
        predicted: None,
    };
    let heard = Heard {
        state: state_heard,
        reports: reports_heard,
        predicted: predicted_heard,
        given_up: given_up_heard,
    };
    (Teller { state, observations, hops, reports, predicted, given_up, bell }, heard, feed)
}

/// Runs a replica until it is to stop. None of its stages is left when it returns.
pub(super) async fn run(ground: Arc<Ground>, order: Order, teller: Teller, stop: CancellationToken) {
    let ringing = ring_on_change(teller.clone());
    tokio::select! {
        () = live(&ground, &order, &teller, &stop) => {}
        () = ringing => {}
    }
    teller.bell.notify_one();
}

async fn live(ground: &Arc<Ground>, order: &Order, teller: &Teller, stop: &CancellationToken) {
    let begun = tokio::select! {
        begun = begin(ground, order, teller) => begun,
        () = stop.cancelled() => return,
    };
    let (agent, _watching) = match begun {
        Ok(begun) => begun,
        Err(reason) => {
            teller.give_up(reason);
            return stop.cancelled().await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        reason = agent.gives_up() => {
            teller.give_up(reason);
            stop.cancelled().await;
        }
    }
    agent.shutdown().await;
}

/// Connects to the nodes, however long that takes, and starts the agent.
async fn begin(
    ground: &Arc<Ground>,
    order: &Order,
    teller: &Teller,
) -> Result<(Agent, Vec<AbortOnDropHandle<()>>), String> {
    let plan = plan(ground, &order.chain).await?;
    teller.predicted.send_replace(plan.predicted().to_vec());
    let nodes = loop {
        match ground.connect(&order.chain).await {
            Ok(nodes) => break nodes,
            Err(reason) => {
                tracing::warn!(replica = order.number, %reason, "the nodes cannot be connected to");
                teller.state.send_replace(ReplicaState::Down { reason });
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    };
    let ring =
        links::ring(&ground.args, &nodes, &plan, &ground.profiles).map_err(|error| format!("{error:#}"))?;
    let outlook = Outlook {
        state: teller.state.clone(),
        observations: teller.observations.clone(),
        reports: teller.reports.clone(),
    };
    let agent = Agent::start_on_nodes(ground.remote(plan, &nodes, order.encoding), outlook);
    let mut watching = Vec::new();
    if let Some(ring) = ring {
        let (outlook, told) = ring_outlook(order.number, teller.hops.clone(), ground.news.clone());
        let nodes = ground.ring_nodes(nodes);
        let watcher = RingWatcher::new(nodes, ring, agent.observations(), outlook);
        watching.extend([AbortOnDropHandle::new(tokio::spawn(watcher.run())), told]);
    }
    Ok((agent, watching))
}

/// Reads the model's header, which may wait for the disk.
async fn plan(ground: &Arc<Ground>, chain: &Chain) -> Result<ReplicaPlan, String> {
    let (ground, chain) = (Arc::clone(ground), chain.clone());
    let planned = tokio::task::spawn_blocking(move || ground.plan(&chain)).await;
    planned.map_err(|error| error.to_string())?.map_err(|error| format!("{error:#}"))
}

async fn ring_on_change(teller: Teller) {
    let mut state = teller.state.subscribe();
    // The sender is in the teller.
    while state.changed().await.is_ok() {
        teller.bell.notify_one();
    }
}

impl Teller {
    fn give_up(&self, reason: String) {
        self.given_up.send_replace(Some(reason.clone()));
        self.state.send_replace(ReplicaState::Down { reason });
        self.bell.notify_one();
    }
}
