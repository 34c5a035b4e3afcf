//! Where a stage's worker runs: as a child of this process, or of a node that runs it for the agent. The keeper does the
//! same with both.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use cluster::{Bytes, NodeId};
use protocol::node::{Address, Build, StageOrder};
use protocol::tls::TlsIdentity;
use protocol::worker::WorkerConfig;
use tokio_util::sync::CancellationToken;

use super::process::{WorkerCommand, WorkerProcess};
use super::remote::RemoteWorker;
use super::restarts::Failure;
use crate::client::NodeClient;
use crate::host::available_memory;

/// Where a stage's workers are started.
pub(super) enum Place {
    /// On this host.
    Here {
        /// How.
        command: WorkerCommand,
        /// What each is told.
        config: Box<WorkerConfig>,
    },
    /// On a node.
    There {
        /// The node; it may be another process there the next time.
        node: NodeAt,
        /// What it is asked for.
        order: Box<StageOrder>,
    },
}

/// Where a node is reached now, by somebody who knows when it has moved.
pub type Whereabouts = Arc<dyn Fn(&NodeId) -> Option<Address> + Send + Sync>;

/// How to reach a node.
#[derive(Clone)]
pub(super) struct NodeAt {
    pub(super) name: NodeId,
    /// Where it was reached at first.
    pub(super) address: Address,
    pub(super) whereabouts: Option<Whereabouts>,
    pub(super) identity: TlsIdentity,
    pub(super) build: Build,
}

/// Why there is no, or no longer a worker.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) reason: String,
    pub(super) failure: Failure,
}

impl Lost {
    pub(super) fn crash(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), failure: Failure::Crash }
    }
}

/// A worker that listens.
pub(super) enum Worker {
    Here(Box<WorkerProcess>),
    There(Box<RemoteWorker>),
}

impl NodeAt {
    /// Where it is reached, as far as is known.
    pub(super) fn address(&self) -> Address {
        let now = self.whereabouts.as_ref().and_then(|find| find(&self.name));
        now.unwrap_or_else(|| self.address.clone())
    }
}

impl Place {
    /// Starts a worker and waits until it listens; `told` hears what its node does before.
    pub(super) async fn start(
        &self,
        stopping: &CancellationToken,
        told: &mut (dyn FnMut(String) + Send),
    ) -> Result<Worker, Lost> {
        match self {
            Self::Here { command, config } => WorkerProcess::start(command, config, stopping)
                .await
                .map(|worker| Worker::Here(Box::new(worker)))
                .map_err(|error| Lost::crash(error.to_string())),
            Self::There { node, order } => {
                RemoteWorker::start(node, order, told).await.map(|worker| Worker::There(Box::new(worker)))
            }
        }
    }
}

impl Worker {
    /// Its process id, on its host.
    pub(super) fn pid(&self) -> u32 {
        match self {
            Self::Here(worker) => worker.pid,
            Self::There(worker) => worker.pid,
        }
    }

    /// Where this process reaches it.
    pub(super) fn address(&self) -> SocketAddr {
        match self {
            Self::Here(worker) => SocketAddr::from((Ipv4Addr::LOCALHOST, worker.port)),
            Self::There(worker) => worker.address,
        }
    }

    /// The node that runs it for us.
    pub(super) fn node(&self) -> Option<&NodeClient> {
        match self {
            Self::Here(_) => None,
            Self::There(worker) => Some(&worker.node),
        }
    }

    /// Its CPU threads, if its node chose them.
    pub(super) fn threads(&self) -> Option<u32> {
        match self {
            Self::Here(_) => None,
            Self::There(worker) => Some(worker.threads),
        }
    }

    /// Waits for its end.
    pub(super) async fn ended(&mut self) {
        match self {
            Self::Here(worker) => worker.ended().await,
            Self::There(worker) => worker.ended().await,
        }
    }

    /// Asks it to go, and sees to it that it has gone after `grace`.
    pub(super) async fn stop(self, grace: Duration) {
        match self {
            Self::Here(worker) => worker.stop(grace).await,
            Self::There(worker) => worker.stop(grace).await,
        }
    }

    /// Ends it. Says how it had ended by itself, if it had; of one that needs `needed`, also whether memory was short.
    pub(super) async fn kill(self, needed: Bytes) -> Option<String> {
        match self {
            Self::Here(worker) => worker.kill().await.map(|ended| ended.explain(needed)),
            Self::There(worker) => worker.kill().await,
        }
    }

    /// Memory that its host has available now, if that can be found out.
    pub(super) async fn available_memory(&self) -> Option<Bytes> {
        match self {
            Self::Here(_) => Some(available_memory()),
            Self::There(worker) => worker.node.available_memory().await,
        }
    }
}
