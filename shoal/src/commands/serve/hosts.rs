//! Where replicas run: on this host, or each stage on a node, which was named or is a member of the cluster.

use anyhow::{Context, Result};
use futures::future::try_join_all;
use node::links::RingNodes;
use node::{Folders, NodeClient};
use protocol::identity::MemberIdentity;
use protocol::node::Peer;
use protocol::tls::{ClusterCa, TlsIdentity};
use registry::Registry;

use super::slices::OwnParts;
use super::{ServeArgs, cluster, slices};
use crate::commands::nodes::{connect, read_identity};

/// Where the stages run.
pub(super) enum Hosts {
    /// All on this one, in a cluster of their own that exists as long as they do.
    This(Box<ClusterCa>),
    /// Each on a node, replica by replica; none is known before they were connected to.
    Nodes {
        identity: TlsIdentity,
        source: Source,
        replicas: Vec<Vec<NodeClient>>,
        parts: Option<Box<OwnParts>>,
    },
}

/// Which nodes.
pub(super) enum Source {
    /// Those at addresses that were given.
    Given(MemberIdentity),
    /// Members of the cluster that are there.
    Cluster(Registry),
}

impl Hosts {
    /// As the arguments say; nobody is connected to yet.
    pub(super) fn new(args: &ServeArgs, registry: Option<&Registry>) -> Result<Self> {
        let replicas = Vec::new();
        if let Some(registry) = registry.filter(|_| args.cluster.on_its_nodes()) {
            let identity = registry.own_identity("orchestrator")?;
            let source = Source::Cluster(registry.clone());
            return Ok(Self::Nodes { identity, source, replicas, parts: None });
        }
        let Some(identity) = args.identity.as_deref().filter(|_| args.is_on_nodes()) else {
            let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
            return Ok(Self::This(Box::new(ca)));
        };
        let member = read_identity(identity)?;
        let identity = member.tls.clone();
        Ok(Self::Nodes { identity, source: Source::Given(member), replicas, parts: None })
    }

    /// Connects to the nodes, and waits for those of the cluster; `waiting` is told for what.
    pub(super) async fn connect(
        &mut self,
        args: &ServeArgs,
        folders: &Folders,
        waiting: &mut dyn FnMut(String),
    ) -> Result<()> {
        let Self::Nodes { identity, source, replicas, parts } = self else { return Ok(()) };
        *parts = Some(Box::new(OwnParts::open(args, identity, folders).await?));
        *replicas = match source {
            Source::Given(member) => {
                let member = &*member;
                let connected = args.replica_nodes().into_iter().map(|nodes| {
                    let nodes = nodes.iter().map(|address| connect(address, member));
                    try_join_all(nodes)
                });
                try_join_all(connected).await.context("connecting to the nodes")?
            }
            Source::Cluster(registry) => {
                let stages = args.stages();
                let wanted = stages * args.replicas as usize;
                let nodes = cluster::nodes(registry, identity, wanted, waiting).await?;
                nodes.chunks(stages).map(<[NodeClient]>::to_vec).collect()
            }
        };
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
        let Self::Nodes { source, replicas, parts: Some(parts), .. } = self else { return Vec::new() };
        parts.sources(match source {
            Source::Given(_) => slices::connected(replicas),
            Source::Cluster(registry) => slices::present(registry),
        })
    }

    /// Whom to ask about the links of a replica.
    pub(super) fn ring_nodes(&self, replica: usize) -> Option<RingNodes> {
        match self {
            Self::This(_) => None,
            Self::Nodes { identity, .. } => {
                Some(RingNodes { clients: self.nodes(replica).to_vec(), identity: identity.clone() })
            }
        }
    }

    /// Who the orchestrator is to the masters.
    pub(super) fn tls(&self) -> Result<TlsIdentity> {
        match self {
            Self::This(ca) => ca.issue("orchestrator").context("issuing the orchestrator's certificate"),
            Self::Nodes { identity, .. } => Ok(identity.clone()),
        }
    }
}
