//! Another node, as whoever directs it sees it. Every call has a deadline, and every answer is checked.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Bytes, Millis, NodeId};
use protocol::checkup::{self, ECHO_DEADLINE, Examination, PathFacts};
use protocol::node::{
    Address, BadMessage, Build, LinkMeasurement, LinkRequest, NodeFacts, Peer, StageOrder, VersionMismatch,
    WorkerNews, clean_text,
};
use protocol::plan_files::{PlanFileError, PlannerFile, ProfilesFile};
use protocol::tls::{self, ConnectError, TlsIdentity, describe_status};
use protocol::v1;
use protocol::v1::checkup_client::CheckupClient;
use protocol::v1::node_client::NodeClient as WireClient;
use protocol::v1::profile_event::Event as ProfileNews;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};

/// Within which a node describes itself.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(5);

/// Within which a node finds out how to reach a peer: it tries one address after the other.
const REACH_DEADLINE: Duration = Duration::from_secs(5);

/// Within which a node takes an order; it prepares nothing before.
const RUN_DEADLINE: Duration = Duration::from_secs(10);

/// Between two words of a node that measures a profile: its own limit for one measurement, and some.
const PROFILE_SILENCE: Duration = Duration::from_secs(660);

/// Largest answer: a profile, which the node limits to somewhat less.
const LARGEST_ANSWER: usize = 17 << 20;

/// Longer than the node itself takes to give a measurement up.
const MEASURE_DEADLINE: Duration = Duration::from_secs(90);

/// Why a node did not do what it was asked to.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum NodeError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{0} is not a node: something else of this cluster listens there")]
    NotANode(Address),
    #[error("node {node} at {address}: {source}")]
    Version { node: NodeId, address: Address, source: VersionMismatch },
    #[error("{who} did not answer for {} s", deadline.as_secs())]
    Deadline { who: String, deadline: Duration },
    #[error("{who}: {reason}")]
    Refused { who: String, reason: String, code: Code },
    #[error("{0} gave an answer that cannot be used: {1}")]
    Answer(String, BadMessage),
    #[error("{0} gave a profile that cannot be used: {1}")]
    Profile(String, PlanFileError),
    #[error("{0} ended without a profile")]
    NoProfile(String),
}

impl NodeError {
    /// How a node refused, if it did.
    pub(crate) fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    fn refused(who: &str, status: &Status) -> Self {
        Self::Refused { who: who.to_owned(), reason: describe_status(status), code: status.code() }
    }
}

/// A worker that a node runs for us. Dropping it lets the node end the worker.
#[derive(Debug)]
pub(crate) struct WorkerStream {
    who: String,
    orders: mpsc::Sender<v1::WorkerOrder>,
    events: Streaming<v1::WorkerEvent>,
}

impl WorkerStream {
    /// The next news. Can be dropped and called again.
    pub(crate) async fn next(&mut self) -> Result<WorkerNews, NodeError> {
        match self.events.message().await {
            Ok(Some(event)) => {
                WorkerNews::check(event).map_err(|error| NodeError::Answer(self.who.clone(), error))
            }
            Ok(None) => Ok(WorkerNews::Ended { how: "was ended".to_owned() }),
            Err(status) => Err(NodeError::refused(&self.who, &status)),
        }
    }

    /// Asks for the worker's end; [`WorkerNews::Ended`] will tell of it.
    pub(crate) async fn stop(&self) {
        let order = v1::worker_order::Order::Stop(v1::StopOrder {});
        // If nobody takes orders any more, it has ended.
        let _ = self.orders.send(v1::WorkerOrder { order: Some(order) }).await;
    }
}

/// A node that was reached. Clones are handles of the same connection.
#[derive(Debug, Clone)]
pub struct NodeClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    address: Address,
    facts: NodeFacts,
    channel: Channel,
    client: WireClient<Channel>,
}

impl NodeClient {
    /// Connects to the node at an address, which must run the same build.
    pub async fn connect(address: &Address, identity: &TlsIdentity, ours: &Build) -> Result<Self, NodeError> {
        let channel = tls::connect(address, identity).await?;
        let mut client = WireClient::new(channel.clone()).max_decoding_message_size(LARGEST_ANSWER);
        let described = client.describe(v1::DescribeRequest {});
        let who = address.to_string();
        let described = match within(DESCRIBE_DEADLINE, &who, described).await {
            Err(NodeFault::Status(status)) if status.code() == Code::Unimplemented => {
                return Err(NodeError::NotANode(address.clone()));
            }
            other => other.map_err(|fault| fault.of(&who))?,
        };
        let facts = NodeFacts::check(described).map_err(|error| NodeError::Answer(who, error))?;
        ours.check_same(&facts.build).map_err(|source| NodeError::Version {
            node: facts.name.clone(),
            address: address.clone(),
            source,
        })?;
        Ok(Self(Arc::new(Inner { address: address.clone(), facts, channel, client })))
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.0.facts.name
    }

    /// What it said of itself when it was connected to.
    pub fn facts(&self) -> &NodeFacts {
        &self.0.facts
    }

    /// At which it was reached.
    pub fn address(&self) -> &Address {
        &self.0.address
    }

    /// The node as a peer of others. They may reach it where we did, or where it says.
    pub fn peer(&self) -> Peer {
        self.0.facts.peer(&self.0.address)
    }

    /// Lets it measure its link to a peer, once.
    pub async fn measure_link(&self, request: LinkRequest) -> Result<LinkMeasurement, NodeError> {
        let mut client = self.0.client.clone();
        let (who, call) = (self.who(), client.measure_link(v1::MeasureLinkRequest::from(request)));
        let measured = within(MEASURE_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        LinkMeasurement::check(measured).map_err(|error| NodeError::Answer(who, error))
    }

    /// Which of a peer's addresses the node reaches.
    pub(crate) async fn reach(&self, peer: Peer) -> Result<Address, NodeError> {
        let mut client = self.0.client.clone();
        let (who, call) = (self.who(), client.reach(v1::ReachRequest { peer: Some(peer.into()) }));
        let reply = within(REACH_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        Address::parse(&reply.address).map_err(|error| NodeError::Answer(who, error))
    }

    /// How its host is.
    pub async fn examine(&self) -> Result<Examination, NodeError> {
        let mut client = CheckupClient::new(self.0.channel.clone());
        let (who, call) = (self.who(), client.examine(v1::ExamineRequest {}));
        let examined = within(DESCRIBE_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        Examination::check(examined).map_err(|error| NodeError::Answer(who, error))
    }

    /// What large packets take to it and back, or why they do not come back.
    pub async fn echo(&self) -> Result<Millis, String> {
        checkup::echo(self.0.channel.clone()).await
    }

    /// Whether it reaches a peer, and with large packets.
    pub async fn try_path(&self, peer: Peer) -> Result<PathFacts, NodeError> {
        let mut client = CheckupClient::new(self.0.channel.clone());
        let call = client.try_path(v1::TryPathRequest { peer: Some(peer.into()) });
        let who = self.who();
        let tried =
            within(REACH_DEADLINE + ECHO_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        PathFacts::check(tried).map_err(|error| NodeError::Answer(who, error))
    }

    /// Memory that is available on its host now, if it says so.
    pub(crate) async fn available_memory(&self) -> Option<Bytes> {
        let mut client = self.0.client.clone();
        let (who, call) = (self.who(), client.describe(v1::DescribeRequest {}));
        let described = within(DESCRIBE_DEADLINE, &who, call).await.ok()?;
        Some(Bytes(described.memory_available))
    }

    /// Lets it profile its copy of a model; `said` gets what it says meanwhile. Dropping it stops the node's measurement.
    pub async fn profile(
        &self,
        request: v1::ProfileRequest,
        said: &mut dyn FnMut(&str),
    ) -> Result<ProfilesFile, NodeError> {
        let who = self.who();
        let mut client = self.0.client.clone();
        let call = client.profile(request);
        let mut events = within(RUN_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        loop {
            let late = |_| NodeError::Deadline { who: who.clone(), deadline: PROFILE_SILENCE };
            let event = tokio::time::timeout(PROFILE_SILENCE, events.message()).await.map_err(late)?;
            let event = event.map_err(|status| NodeError::refused(&who, &status))?;
            match event.and_then(|event| event.event) {
                Some(ProfileNews::Progress(line)) => said(&clean_text(&line)),
                Some(ProfileNews::Profile(json)) => {
                    return ProfilesFile::from_json(&json).map_err(|error| NodeError::Profile(who, error));
                }
                None => return Err(NodeError::NoProfile(who)),
            }
        }
    }

    /// Lets it run a stage's worker.
    pub(crate) async fn run_worker(&self, order: StageOrder) -> Result<WorkerStream, NodeError> {
        let who = self.who();
        // The order to start it, and the one to stop it.
        let (orders, queue) = mpsc::channel(2);
        let start = v1::worker_order::Order::Start(order.into());
        // There is room, and the other end is below.
        let _ = orders.send(v1::WorkerOrder { order: Some(start) }).await;
        let mut client = self.0.client.clone();
        let call = client.run_worker(ReceiverStream::new(queue));
        let events = within(RUN_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        Ok(WorkerStream { who, orders, events })
    }

    fn who(&self) -> String {
        format!("node {}", self.0.facts.name)
    }
}

/// Two handles of one process of a node are the same.
impl PartialEq for NodeClient {
    fn eq(&self, other: &Self) -> bool {
        self.0.facts.instance == other.0.facts.instance
    }
}

enum NodeFault {
    Status(Status),
    Deadline(Duration),
}

impl NodeFault {
    fn of(self, who: &str) -> NodeError {
        match self {
            Self::Status(status) => NodeError::refused(who, &status),
            Self::Deadline(deadline) => NodeError::Deadline { who: who.to_owned(), deadline },
        }
    }
}

async fn within<T>(
    deadline: Duration,
    who: &str,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, NodeFault> {
    match tokio::time::timeout(deadline, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => {
            tracing::debug!(node = who, %status, "a call failed");
            Err(NodeFault::Status(status))
        }
        Err(_) => Err(NodeFault::Deadline(deadline)),
    }
}
