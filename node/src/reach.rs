//! Finding the one of a peer's addresses that leads to the peer. A host offers every address it has; some are reachable
//! from nowhere, some lead to another host that has the same one (every docker0 is 172.17.0.1), some back to oneself.
//! So whoever answers is asked who it is, and the first that is the peer wins.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use protocol::node::{Address, NodeFacts, Peer};
use protocol::tls::{self, TlsIdentity, describe_status};
use protocol::v1::DescribeRequest;
use protocol::v1::node_client::NodeClient;
use thiserror::Error;
use tonic::transport::Channel;

/// Head start of an address over the next: a LAN answers well within it, so the likeliest wins where several would.
const HEAD_START: Duration = Duration::from_millis(150);

/// Within which a peer that was connected to says who it is.
const ANSWER_DEADLINE: Duration = Duration::from_secs(3);

/// No address leads to the peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{peer} cannot be reached: {}", reasons.join("; "))]
pub(crate) struct Unreachable {
    peer: cluster::NodeId,
    /// Why, for each address.
    reasons: Vec<String>,
}

/// Connects to a peer. Gives the address that won.
pub(crate) async fn reach(peer: &Peer, identity: &TlsIdentity) -> Result<(Address, Channel), Unreachable> {
    let attempts = peer.addresses.iter().zip(0_u32..).map(|(address, place)| async move {
        tokio::time::sleep(HEAD_START * place).await;
        attempt(address, peer, identity).await.map_err(|reason| format!("{address}: {reason}"))
    });
    let mut attempts: FuturesUnordered<_> = attempts.collect();
    let mut reasons = Vec::new();
    while let Some(outcome) = attempts.next().await {
        match outcome {
            Ok(reached) => return Ok(reached),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(Unreachable { peer: peer.name.clone(), reasons })
}

async fn attempt(
    address: &Address,
    peer: &Peer,
    identity: &TlsIdentity,
) -> Result<(Address, Channel), String> {
    let channel = tls::connect(address, identity).await.map_err(|error| error.to_string())?;
    let mut client = NodeClient::new(channel.clone());
    let described = tokio::time::timeout(ANSWER_DEADLINE, client.describe(DescribeRequest {})).await;
    let description = described
        .map_err(|_| format!("no answer for {} s", ANSWER_DEADLINE.as_secs()))?
        .map_err(|status| describe_status(&status))?;
    let facts = NodeFacts::check(description.into_inner()).map_err(|error| error.to_string())?;
    if facts.instance != peer.instance {
        return Err(format!("{} answers there, and it is not the same process", facts.name));
    }
    Ok((address.clone(), channel))
}
