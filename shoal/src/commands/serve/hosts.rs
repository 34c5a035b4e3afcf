//! Where the replicas of a run run that stay to its end: on this host, or each stage on a node that was named.

use anyhow::{Context, Result};
use futures::future::try_join_all;
use node::links::RingNodes;
use node::{Folders, NodeClient};
use protocol::identity::MemberIdentity;
use protocol::node::Peer;
use protocol::tls::{ClusterCa, TlsIdentity};

use super::ServeArgs;
use super::slices::{self, OwnParts};
use crate::commands::nodes::{connect, read_identity};

/// Where the stages run.
pub(super) enum Hosts {
    /// All on this one, in a cluster of their own that exists as long as they do.
    This(Box<ClusterCa>),
    /// Each on a node, replica by replica; none is known before they were connected to.
    Nodes { member: Box<MemberIdentity>, replicas: Vec<Vec<NodeClient>>, parts: Option<Box<OwnParts>> },
}

impl Hosts {
    /// As the arguments say; nobody is connected to yet.
    pub(super) fn new(args: &ServeArgs) -> Result<Self> {
        let Some(identity) = args.identity.as_deref().filter(|_| args.is_on_nodes()) else {
            let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
            return Ok(Self::This(Box::new(ca)));
        };
        Ok(Self::Nodes { member: Box::new(read_identity(identity)?), replicas: Vec::new(), parts: None })
    }

    /// Connects to the nodes.
    pub(super) async fn connect(&mut self, args: &ServeArgs, folders: &Folders) -> Result<()> {
        let Self::Nodes { member, replicas, parts } = self else { return Ok(()) };
        *parts = Some(Box::new(OwnParts::open(args, &member.tls, folders).await?));
        let member = &**member;
        let connected = args
            .replica_nodes()
            .into_iter()
            .map(|nodes| try_join_all(nodes.iter().map(|address| connect(address, member))));
        *replicas = try_join_all(connected).await.context("connecting to the nodes")?;
        Ok(())
    }

    /// The nodes of a replica.
    pub(super) fn nodes(&self, replica: usize) -> &[NodeClient] {
        match self {
            Self::This(_) => &[],
            Self::Nodes { replicas, .. } => replicas.get(replica).map_or(&[], Vec::as_slice),
        }
    }

    /// The nodes of all other replicas' stages.
    pub(super) fn nodes_beside(&self, replica: usize) -> Vec<NodeClient> {
        match self {
            Self::This(_) => Vec::new(),
            Self::Nodes { replicas, .. } => {
                let others = replicas.iter().enumerate().filter(|(other, _)| *other != replica);
                others.flat_map(|(_, nodes)| nodes.iter().cloned()).collect()
            }
        }
    }

    /// From whom nodes get their parts of the model if they have no copy of it.
    pub(super) fn sources(&self) -> Vec<Peer> {
        match self {
            Self::Nodes { replicas, parts: Some(parts), .. } => parts.sources(slices::connected(replicas)),
            Self::This(_) | Self::Nodes { .. } => Vec::new(),
        }
    }

    /// Whom to ask about the links of a replica.
    pub(super) fn ring_nodes(&self, replica: usize) -> Option<RingNodes> {
        match self {
            Self::This(_) => None,
            Self::Nodes { member, .. } => {
                Some(RingNodes { clients: self.nodes(replica).to_vec(), identity: member.tls.clone() })
            }
        }
    }

    /// Who the orchestrator is to the masters.
    pub(super) fn tls(&self) -> Result<TlsIdentity> {
        match self {
            Self::This(ca) => ca.issue("orchestrator").context("issuing the orchestrator's certificate"),
            Self::Nodes { member, .. } => Ok(member.tls.clone()),
        }
    }
}
