//! Finding the one of a peer's addresses that leads to the peer. A host offers every address it has; some are reachable
//! from nowhere, some lead to another host that has the same one (every docker0 is 172.17.0.1), some back to oneself.
//! So whoever answers is asked who it is, and the first that is the peer wins.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use thiserror::Error;
use tonic::transport::Channel;

use crate::node::{Address, NodeFacts, Peer};
use crate::patience::peer_timeout;
use crate::tls::{self, TlsIdentity, describe_status};
use crate::v1::DescribeRequest;
use crate::v1::node_client::NodeClient;

/// Head start of an address over the next: a LAN answers well within it, so the likeliest wins where several would.
const HEAD_START: Duration = Duration::from_millis(150);

/// No address leads to the peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{peer} cannot be reached: {}", reasons.join("; "))]
pub struct Unreachable {
    peer: cluster::NodeId,
    /// Why, for each address.
    reasons: Vec<String>,
}

/// Connects to a peer. Gives the address that won.
pub async fn reach(peer: &Peer, identity: &TlsIdentity) -> Result<(Address, Channel), Unreachable> {
    let attempts = first(&peer.addresses, |address| attempt(address, peer, identity)).await;
    attempts.map_err(|reasons| Unreachable { peer: peer.name.clone(), reasons })
}

/// Tries all addresses, each with a head start over the next; gives what the first to succeed gave, or why each failed.
pub async fn first<'a, T, F>(
    addresses: &'a [Address],
    attempt: impl Fn(&'a Address) -> F,
) -> Result<T, Vec<String>>
where
    F: Future<Output = Result<T, String>>,
{
    let attempts = addresses.iter().zip(0_u32..).map(|(address, place)| {
        let attempt = attempt(address);
        async move {
            tokio::time::sleep(HEAD_START * place).await;
            attempt.await.map_err(|reason| format!("{address}: {reason}"))
        }
    });
    let mut attempts: FuturesUnordered<_> = attempts.collect();
    let mut reasons = Vec::new();
    while let Some(outcome) = attempts.next().await {
        match outcome {
            Ok(reached) => return Ok(reached),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons)
}

async fn attempt(
    address: &Address,
    peer: &Peer,
    identity: &TlsIdentity,
) -> Result<(Address, Channel), String> {
    let channel = tls::connect(address, identity).await.map_err(|error| error.to_string())?;
    let mut client = NodeClient::new(channel.clone());
    let deadline = peer_timeout();
    let described = tokio::time::timeout(deadline, client.describe(DescribeRequest {})).await;
    let description = described
        .map_err(|_| format!("no answer for {} s", deadline.as_secs()))?
        .map_err(|status| describe_status(&status))?;
    let facts = NodeFacts::check(description.into_inner()).map_err(|error| error.to_string())?;
    if facts.instance != peer.instance {
        return Err(format!("{} answers there, and it is not the same process", facts.name));
    }
    Ok((address.clone(), channel))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<Address> {
        texts.iter().map(|text| Address::parse(text).unwrap()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_address_that_answers_wins_whichever_was_the_likeliest() {
        let addresses = addresses(&["hangs:1", "refuses:1", "answers:1", "never-tried:1"]);
        let attempt = async |address: &Address| match address.host() {
            "hangs" => std::future::pending().await,
            "answers" => Ok(address.to_string()),
            _ => Err("refused".to_owned()),
        };
        assert_eq!(first(&addresses, attempt).await, Ok("answers:1".to_owned()));
        let reasons = first(&addresses[1..2], attempt).await.unwrap_err();
        assert_eq!(reasons, ["refuses:1: refused"]);
    }
}
