//! What is said of single replicas: where each is cut, on which nodes it runs, what it is used for.

use clap::ValueEnum;
use cluster::Role;
use protocol::node::Address;

use super::ServeArgs;
use crate::commands::nodes::node_address;

/// What was said of replicas does not fit together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplicaArgs {
    /// A stage without a node, or a node without a stage.
    #[error(
        "--cuts makes {stages} stages and {nodes} nodes were given for a replica: each stage needs a node"
    )]
    StagesAndNodes { stages: usize, nodes: usize },
    /// Not one for each.
    #[error("{option} is given for {got} replicas, but there are {replicas}: say it {advice}")]
    NotForEach { option: &'static str, got: usize, replicas: usize, advice: &'static str },
}

/// First blocks of the second and later stages of one replica.
#[derive(Debug, Clone)]
pub(super) struct CutList(Vec<u32>);

/// The nodes of one replica.
#[derive(Debug, Clone)]
pub(super) struct NodeList(Vec<Address>);

/// A role, as it is written.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum RoleArg {
    /// Computes prompts, and hands them over.
    Prefill,
    /// Generates what it is handed.
    Decode,
    /// Does both.
    Mixed,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Prefill => Self::Prefill,
            RoleArg::Decode => Self::Decode,
            RoleArg::Mixed => Self::Mixed,
        }
    }
}

pub(super) fn cut_list(text: &str) -> Result<CutList, String> {
    let block = |text: &str| text.trim().parse().map_err(|error| format!("{text:?} is no block: {error}"));
    text.split(',').map(block).collect::<Result<_, _>>().map(CutList)
}

pub(super) fn node_list(text: &str) -> Result<NodeList, String> {
    text.split(',').map(|address| node_address(address.trim())).collect::<Result<_, _>>().map(NodeList)
}

impl ServeArgs {
    /// Whether what was said of each replica fits together.
    pub(super) fn check(&self) -> Result<(), ReplicaArgs> {
        let nodes = self.replica_nodes();
        let replicas = nodes.len();
        let not_for_each =
            |option, got, advice| Err(ReplicaArgs::NotForEach { option, got, replicas, advice });
        if self.cuts.len() > 1 && self.cuts.len() != replicas {
            return not_for_each("--cuts", self.cuts.len(), "once, or once for each replica");
        }
        if !self.roles.is_empty() && self.roles.len() != replicas {
            return not_for_each("--roles", self.roles.len(), "for each replica, such as prefill,decode");
        }
        for (replica, nodes) in nodes.into_iter().map(<[Address]>::len).enumerate() {
            let stages = self.cuts_of(replica).map_or(0, |cuts| cuts.len() + 1);
            if stages > 0 && nodes > 0 && stages != nodes {
                return Err(ReplicaArgs::StagesAndNodes { stages, nodes });
            }
        }
        Ok(())
    }

    /// Of each replica the nodes of its stages; none where it runs on this host.
    pub(super) fn replica_nodes(&self) -> Vec<&[Address]> {
        if !self.replica.is_empty() {
            return self.replica.iter().map(|NodeList(nodes)| nodes.as_slice()).collect();
        }
        if !self.nodes.is_empty() {
            return vec![&self.nodes];
        }
        vec![&[]; self.replicas as usize]
    }

    /// Where a replica is cut, if that was said.
    pub(super) fn cuts_of(&self, replica: usize) -> Option<&[u32]> {
        let CutList(cuts) = self.cuts.get(replica).or(self.cuts.first())?;
        Some(cuts)
    }

    /// What a replica is used for.
    pub(super) fn role(&self, replica: usize) -> Role {
        self.roles.get(replica).map_or(Role::Mixed, |role| Role::from(*role))
    }
}
