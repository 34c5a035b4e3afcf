//! Another node, as whoever directs it sees it. Every call has a deadline, and every answer is checked.

use std::time::Duration;

use cluster::NodeId;
use protocol::node::{
    Address, BadMessage, Build, LinkMeasurement, LinkRequest, NodeFacts, Peer, VersionMismatch,
};
use protocol::tls::{self, ConnectError, TlsIdentity, describe_status};
use protocol::v1;
use protocol::v1::node_client::NodeClient as WireClient;
use thiserror::Error;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

/// Within which a node describes itself.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(5);

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
    #[error("{0}: {1}")]
    Refused(String, String),
    #[error("{0} gave an answer that cannot be used: {1}")]
    Answer(String, BadMessage),
}

/// A node that was reached.
#[derive(Debug, Clone)]
pub struct NodeClient {
    address: Address,
    facts: NodeFacts,
    client: WireClient<Channel>,
}

impl NodeClient {
    /// Connects to the node at an address, which must run the same build.
    pub async fn connect(address: &Address, identity: &TlsIdentity, ours: &Build) -> Result<Self, NodeError> {
        let channel = tls::connect(address, identity).await?;
        let mut client = WireClient::new(channel);
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
        Ok(Self { address: address.clone(), facts, client })
    }

    /// Its name.
    pub const fn name(&self) -> &NodeId {
        &self.facts.name
    }

    /// What it said of itself when it was connected to.
    pub const fn facts(&self) -> &NodeFacts {
        &self.facts
    }

    /// At which it was reached.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The node as a peer of others. They may reach it where we did, or where it says.
    pub fn peer(&self) -> Peer {
        self.facts.peer(&self.address)
    }

    /// Lets it measure its link to a peer, once.
    pub async fn measure_link(&self, request: LinkRequest) -> Result<LinkMeasurement, NodeError> {
        let mut client = self.client.clone();
        let (who, call) = (self.who(), client.measure_link(v1::MeasureLinkRequest::from(request)));
        let measured = within(MEASURE_DEADLINE, &who, call).await.map_err(|fault| fault.of(&who))?;
        LinkMeasurement::check(measured).map_err(|error| NodeError::Answer(who, error))
    }

    fn who(&self) -> String {
        format!("node {}", self.facts.name)
    }
}

enum NodeFault {
    Status(Status),
    Deadline(Duration),
}

impl NodeFault {
    fn of(self, who: &str) -> NodeError {
        match self {
            Self::Status(status) => NodeError::Refused(who.to_owned(), describe_status(&status)),
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
