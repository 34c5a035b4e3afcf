//! What `shoal node` serves: the node itself, and the far end of other nodes' measurements.
//!
//! Whoever has a certificate of the cluster may direct a node; nobody else gets past the handshake. What the node runs for
//! others ends with it.

mod checkup;
mod emulation;
mod kept;
mod node;
mod prepare;
mod profile;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;

use cluster::NodeId;
use protocol::certify::LiveIdentity;
use protocol::emulation::Emulation;
use protocol::finding::addresses;
use protocol::listen::{Clients, FrameSizes, ListenError, TlsIncoming, server};
use protocol::node::{Address, Build, DeviceFacts, NodeFacts, probe_sizes};
use protocol::v1::checkup_server::CheckupServer;
use protocol::v1::link_probe_server::LinkProbeServer;
use protocol::v1::node_server::NodeServer;
use protocol::v1::slices_server::SlicesServer;
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::agent::WorkerCommand;
use crate::delivery::{Pace, SliceLimits, SlicesService};
use crate::folders::Folders;
use crate::host::{available_memory, total_memory};
use crate::links::ProbeService;
use crate::turns::TurnsError;
use checkup::CheckupService;
use node::NodeService;
pub use node::NodeWords;
use profile::ProfileHost;
use workers::{WorkerHost, WorkerHostConfig};

/// Largest message to the node itself: a peer with all its addresses is some kilobytes.
const MAX_REQUEST: usize = 256 << 10;

/// A node to be run.
pub struct NodeConfig {
    /// Its name.
    pub name: NodeId,
    /// Its membership.
    pub identity: LiveIdentity,
    /// Where to listen.
    pub bind: SocketAddr,
    /// What to tell others of where to reach it; if empty, what the host's interfaces say.
    pub advertise: Vec<Address>,
    /// What it runs.
    pub build: Build,
    /// What it can compute on.
    pub devices: Vec<DeviceFacts>,
    /// How it starts workers.
    pub workers: WorkerCommand,
    /// How it starts a profile; the model and what else is asked for are added.
    pub profile: WorkerCommand,
    /// Where its models and slices are.
    pub folders: Folders,
    /// For parts of models that travel.
    pub limits: SliceLimits,
    /// The device that its workers stand for instead of computing; `devices` then says so.
    pub emulation: Option<Emulation>,
}

/// Why a node ended.
#[derive(Debug, Error)]
pub enum NodeServeError {
    /// It cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Its workers could not share the host's cores.
    #[error(transparent)]
    Turns(#[from] TurnsError),
    /// The server failed.
    #[error("serving the node")]
    Serve(#[from] tonic::transport::Error),
}

/// A node that listens.
pub struct RunningNode {
    incoming: TlsIncoming,
    service: NodeService,
    slices: SlicesService,
    checkup: CheckupService,
    words: NodeWords,
    workers: Arc<WorkerHost>,
}

impl RunningNode {
    /// Begins to listen.
    pub async fn bind(config: NodeConfig) -> Result<Self, NodeServeError> {
        let incoming = TlsIncoming::bind_live(config.bind, &config.identity, Clients::Members).await?;
        let addresses = addresses::offered(incoming.local_addr(), &config.advertise);
        let emulated = config.emulation.as_ref();
        let memory_available = emulated.map_or_else(available_memory, emulation::host_memory);
        let facts = NodeFacts {
            name: config.name,
            instance: Uuid::new_v4().to_string(),
            build: config.build,
            devices: emulated.map_or(config.devices, |emulated| vec![emulation::device(emulated)]),
            memory_total: emulated.map_or_else(total_memory, emulation::host_memory),
            memory_available,
            addresses,
            emulated: emulated.is_some(),
        };
        let (bind, identity) = (incoming.local_addr().ip(), config.identity);
        let checkup = CheckupService::new(identity.clone(), config.folders.slices());
        let slices = SlicesService::new(config.folders.clone(), Pace::new(config.limits.rate));
        let workers = Arc::new(WorkerHost::new(WorkerHostConfig {
            command: config.workers,
            folders: config.folders,
            limits: config.limits,
            bind,
            identity: identity.clone(),
            emulation: config.emulation,
        })?);
        let profiles = ProfileHost::new(config.profile, facts.name.clone());
        let words = NodeWords::new(facts, Arc::clone(&workers));
        let service = NodeService::new(words.clone(), identity, profiles);
        Ok(Self { incoming, service, slices, checkup, words, workers })
    }

    /// What it says of itself.
    pub fn facts(&self) -> NodeFacts {
        self.words.facts()
    }

    /// What it will say of itself from now on.
    pub fn words(&self) -> NodeWords {
        self.words.clone()
    }

    /// The port it listens at.
    pub fn port(&self) -> u16 {
        self.incoming.local_addr().port()
    }

    /// Serves until told to stop. Its workers are gone when it returns.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), NodeServeError> {
        let FrameSizes { max_message, .. } = probe_sizes();
        let router = server(probe_sizes())
            .add_service(NodeServer::new(self.service).max_decoding_message_size(MAX_REQUEST))
            .add_service(CheckupServer::new(self.checkup).max_decoding_message_size(MAX_REQUEST))
            .add_service(SlicesServer::new(self.slices).max_decoding_message_size(MAX_REQUEST))
            .add_service(LinkProbeServer::new(ProbeService::new()).max_decoding_message_size(max_message));
        let served = tokio::select! {
            served = router.serve_with_incoming(self.incoming) => Ok(served?),
            // Calls under way are dropped with the runtime: whoever made them sees the connection end.
            () = stop.cancelled() => Ok(()),
        };
        self.workers.shutdown().await;
        served
    }
}
