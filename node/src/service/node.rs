//! The Node service.

use std::sync::Arc;
use std::time::Duration;

use protocol::certify::LiveIdentity;
use protocol::finding::reach::reach;
use protocol::membership::Heartbeat;
use protocol::node::{BadMessage, LinkMeasurement, LinkRequest, NodeFacts, Peer};
use protocol::v1;
use tonic::{Request, Response, Status, Streaming};

use super::profile::{ProfileEvents, ProfileHost};
use super::workers::{NewsStream, WorkerHost};
use crate::host::available_memory;
use crate::links::measure;

/// A measurement ends within this: the longest stream and the longest frames on a slow link, and the stalls that are
/// waited for.
const MEASURE_DEADLINE: Duration = Duration::from_secs(75);

/// What a node says of itself, and what it runs. Clones are the same node's.
#[derive(Clone)]
pub struct NodeWords {
    facts: Arc<NodeFacts>,
    workers: Arc<WorkerHost>,
}

impl NodeWords {
    pub(super) fn new(facts: NodeFacts, workers: Arc<WorkerHost>) -> Self {
        Self { facts: Arc::new(facts), workers }
    }

    /// As of now.
    pub(crate) fn facts(&self) -> NodeFacts {
        let now = if self.facts.emulated { self.facts.memory_available } else { available_memory() };
        NodeFacts { memory_available: now, ..NodeFacts::clone(&self.facts) }
    }

    /// A sign of life.
    pub(crate) fn heartbeat(&self) -> Heartbeat {
        Heartbeat { memory_available: self.facts().memory_available, running: self.workers.running() }
    }
}

/// One node's side of the Node service.
pub(crate) struct NodeService {
    words: NodeWords,
    identity: LiveIdentity,
    /// Held while this node measures a link: two measurements would share its bandwidth.
    measuring: tokio::sync::Mutex<()>,
    profiles: ProfileHost,
}

impl NodeService {
    pub(super) fn new(words: NodeWords, identity: LiveIdentity, profiles: ProfileHost) -> Self {
        Self { words, identity, measuring: tokio::sync::Mutex::new(()), profiles }
    }

    fn check_peer(&self, peer: &Peer) -> Result<(), Status> {
        if peer.instance == self.words.facts.instance {
            return Err(Status::invalid_argument(format!("{} is this node itself", peer.name)));
        }
        Ok(())
    }
}

fn invalid(error: BadMessage) -> Status {
    Status::invalid_argument(error.to_string())
}

fn unavailable(error: impl std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

#[tonic::async_trait]
impl v1::node_server::Node for NodeService {
    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::NodeDescription>, Status> {
        Ok(Response::new(self.words.facts().into()))
    }

    async fn reach(&self, request: Request<v1::ReachRequest>) -> Result<Response<v1::ReachReply>, Status> {
        let peer = Peer::check(request.into_inner().peer).map_err(invalid)?;
        self.check_peer(&peer)?;
        let (address, _) = reach(&peer, &self.identity.now()).await.map_err(unavailable)?;
        Ok(Response::new(v1::ReachReply { address: address.to_string() }))
    }

    async fn measure_link(
        &self,
        request: Request<v1::MeasureLinkRequest>,
    ) -> Result<Response<v1::LinkMeasurement>, Status> {
        let LinkRequest { peer, n_embd } = LinkRequest::check(request.into_inner()).map_err(invalid)?;
        self.check_peer(&peer)?;
        let busy = |_| Status::resource_exhausted("another link of this node is being measured");
        let _measuring = self.measuring.try_lock().map_err(busy)?;
        let measuring = async {
            let (address, channel) = reach(&peer, &self.identity.now()).await.map_err(unavailable)?;
            let measured = measure(channel, n_embd).await.map_err(unavailable)?;
            Ok::<_, Status>(LinkMeasurement {
                address,
                round_trip: measured.round_trip,
                round_trip_p99: measured.round_trip_p99,
                bandwidth: measured.bandwidth(),
                bandwidth_spread: measured.spread(),
                frames: measured.frames,
            })
        };
        let late = |_| Status::deadline_exceeded(format!("not measured in {} s", MEASURE_DEADLINE.as_secs()));
        let measured = tokio::time::timeout(MEASURE_DEADLINE, measuring).await.map_err(late)??;
        Ok(Response::new(measured.into()))
    }

    type ProfileStream = ProfileEvents;

    async fn profile(
        &self,
        request: Request<v1::ProfileRequest>,
    ) -> Result<Response<Self::ProfileStream>, Status> {
        self.profiles.run(request.into_inner()).map(Response::new)
    }

    type RunWorkerStream = NewsStream;

    async fn run_worker(
        &self,
        request: Request<Streaming<v1::WorkerOrder>>,
    ) -> Result<Response<Self::RunWorkerStream>, Status> {
        self.words.workers.run(request.into_inner()).await.map(Response::new)
    }
}
