//! What commands that direct nodes have in common: an identity, addresses, and connecting to them.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use node::NodeClient;
use protocol::identity::MemberIdentity;
use protocol::node::{Address, Build};

/// Port of a node unless another is asked for.
pub(crate) const NODE_PORT: u16 = 8470;

/// Port of an orchestrator at which nodes join, unless another is asked for.
pub(crate) const CLUSTER_PORT: u16 = 8471;

/// Who one is in the cluster.
#[derive(Debug, Args)]
pub(crate) struct IdentityArg {
    /// File with this member's identity, from `shoal identity issue`.
    #[arg(long, env = "SHOAL_IDENTITY", value_name = "FILE")]
    identity: PathBuf,
}

impl IdentityArg {
    /// Reads it.
    pub(crate) fn read(&self) -> Result<MemberIdentity> {
        read_identity(&self.identity)
    }
}

/// Reads an identity.
pub(crate) fn read_identity(file: &std::path::Path) -> Result<MemberIdentity> {
    protocol::trust::read_identity(file).context("reading the identity")
}

/// A node's address with or without a port.
pub(crate) fn node_address(text: &str) -> Result<Address, String> {
    with_port(text, NODE_PORT)
}

/// An orchestrator's address with or without a port.
pub(crate) fn cluster_address(text: &str) -> Result<Address, String> {
    with_port(text, CLUSTER_PORT)
}

fn with_port(text: &str, port: u16) -> Result<Address, String> {
    let given = Address::parse(text);
    given.or_else(|error| Address::parse(&format!("{text}:{port}")).map_err(|_| error.to_string()))
}

/// What this program is, for others to compare with.
pub(crate) fn build() -> Build {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("metal", cfg!(any(feature = "metal", target_os = "macos"))),
        ("native", cfg!(feature = "native")),
        ("vulkan", cfg!(feature = "vulkan")),
    ];
    Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        llama_cpp: llama::version().to_owned(),
        features: features.iter().filter(|(_, on)| *on).map(|(name, _)| (*name).to_owned()).collect(),
    }
}

/// Connects to a node; the error names it.
pub(crate) async fn connect(address: &Address, identity: &MemberIdentity) -> Result<NodeClient> {
    Ok(NodeClient::connect(address, &identity.tls, &build()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Field case 29.
    #[test]
    fn a_nodes_port_may_be_left_out() {
        for (text, address) in
            [("desk", "desk:8470"), ("10.0.0.1:9", "10.0.0.1:9"), ("[fd00::1]", "[fd00::1]:8470")]
        {
            assert_eq!(node_address(text).unwrap().to_string(), address);
        }
        for text in ["", "a b", "fd00::1", "desk:x"] {
            assert!(node_address(text).is_err(), "{text}");
        }
    }
}
