//! A worker that a node runs for the agent. The stream of orders is its lifeline, as stdin is a child's: when it ends, the
//! node ends the worker.

use std::net::SocketAddr;
use std::time::Duration;

use cluster::Bytes;
use protocol::node::{StageOrder, WorkerNews};
use protocol::tls;
use tonic::Code;

use super::STOP_GRACE;
use super::place::{Lost, NodeAt};
use super::restarts::Failure;
use crate::client::{NodeClient, NodeError, WorkerStream};

/// Between two news of a node that prepares a stage. It tells of every megabyte; waiting for another process that cuts the
/// same model is told of too.
const NEWS_DEADLINE: Duration = Duration::from_secs(60);

/// A worker on another host.
pub(super) struct RemoteWorker {
    /// Its node.
    pub(super) node: NodeClient,
    /// Where this process reaches the worker.
    pub(super) address: SocketAddr,
    /// On its host.
    pub(super) pid: u32,
    pub(super) threads: u32,
    stream: WorkerStream,
    /// How it ended, if it has.
    ended: Option<String>,
}

impl RemoteWorker {
    /// Orders a worker and waits until it listens; `told` hears what the node does before.
    pub(super) async fn start(
        at: &NodeAt,
        order: &StageOrder,
        told: &mut (dyn FnMut(String) + Send),
    ) -> Result<Self, Lost> {
        let connected = NodeClient::connect(&at.address(), &at.identity, &at.build).await;
        let node = connected.map_err(unreachable)?;
        let who = format!("node {}", node.name());
        let mut stream = node.run_worker(order.clone()).await.map_err(refused)?;
        loop {
            let late = |_| Lost::crash(format!("{who} said nothing for {} s", NEWS_DEADLINE.as_secs()));
            let news = tokio::time::timeout(NEWS_DEADLINE, stream.next()).await.map_err(late)?;
            match news.map_err(refused)? {
                WorkerNews::Preparing { work, done, total } => {
                    tracing::debug!(%who, stage = order.stage, %work, %done, %total, "the node prepares");
                    told(if total == Bytes::ZERO { work } else { format!("{work}: {done} of {total}") });
                }
                WorkerNews::Ended { how } => return Err(Lost::crash(format!("the worker on {who} {how}"))),
                WorkerNews::Listening { pid, port, threads } => {
                    let address = find(&node, port.get(), at).await?;
                    return Ok(Self { node, address, pid, threads, stream, ended: None });
                }
            }
        }
    }

    /// Waits for its end, or for that of the connection to its node. Can be dropped and called again.
    pub(super) async fn ended(&mut self) {
        while self.ended.is_none() {
            self.ended = match self.stream.next().await {
                Ok(WorkerNews::Ended { how }) => Some(format!("on node {} {how}", self.node.name())),
                Ok(WorkerNews::Preparing { .. } | WorkerNews::Listening { .. }) => None,
                Err(error) => Some(format!("is out of reach: {error}")),
            };
        }
    }

    /// Asks the node to end it, and waits for that for somewhat longer than the node gives it.
    pub(super) async fn stop(mut self, grace: Duration) {
        if self.ended.is_none() {
            self.stream.stop().await;
            if tokio::time::timeout(grace * 2, self.ended()).await.is_err() {
                tracing::warn!(node = %self.node.name(), "the node did not say that it stopped the worker");
            }
        }
    }

    /// Ends it. Says how it had ended by itself, if it had.
    pub(super) async fn kill(self) -> Option<String> {
        let ended = self.ended.clone();
        self.stop(STOP_GRACE).await;
        ended
    }
}

/// The address of the worker: its node's host, if that has several addresses, the one at which the worker answers.
async fn find(node: &NodeClient, port: u16, at: &NodeAt) -> Result<SocketAddr, Lost> {
    let address = node.address().with_port(port);
    let resolved = tokio::net::lookup_host(address.to_string()).await;
    let candidates =
        resolved.map_err(|error| Lost::crash(format!("finding the address of {address}: {error}")))?;
    let mut reason = format!("{address} is no address of any host");
    for candidate in candidates {
        match tls::connect(candidate, &at.identity).await {
            Ok(_) => return Ok(candidate),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(Lost::crash(format!("the worker listens and cannot be reached: {reason}")))
}

/// A node that is away may come back; one that cannot be used will rarely change.
fn unreachable(error: NodeError) -> Lost {
    let failure = match error {
        NodeError::Connect(_) | NodeError::Deadline { .. } => Failure::Unreachable,
        _ => Failure::Load,
    };
    Lost { reason: error.to_string(), failure }
}

/// What a node refuses for a reason of its own it will refuse again.
fn refused(error: NodeError) -> Lost {
    let failure = match error.code() {
        Some(Code::NotFound | Code::FailedPrecondition | Code::InvalidArgument) => Failure::Load,
        _ => Failure::Crash,
    };
    Lost { reason: error.to_string(), failure }
}
