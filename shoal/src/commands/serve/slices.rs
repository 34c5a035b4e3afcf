//! Parts of the model for nodes that have no copy of it: who may have them, and the port at which this process gives them out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use cluster::{BytesPerSecond, NodeId};
use node::{Folders, NodeClient, SliceLimits, SlicePort};
use protocol::node::{Address, Peer};
use protocol::tls::TlsIdentity;
use registry::Registry;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::ServeArgs;
use crate::sizes::parse_rate;

/// How many nodes are told of to one that looks for its part.
const MOST_PEERS: usize = 64;

/// Options for nodes that have no copy of the model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options for nodes without a copy of the model")]
pub(super) struct SliceArgs {
    /// Address at which nodes get their parts of the model from this host [default: that of the cluster port, or all, at
    /// a free port].
    #[arg(long, env = "SHOAL_SLICE_LISTEN", value_name = "ADDRESS")]
    slice_listen: Option<SocketAddr>,
    /// Bytes per second that this host gives out at most, such as 50MB/s [default: as fast as it goes].
    #[arg(long, env = "SHOAL_SLICE_RATE", value_name = "RATE", value_parser = parse_rate)]
    slice_rate: Option<BytesPerSecond>,
}

/// The port, as long as it lives.
pub(super) struct OwnParts {
    addresses: Vec<Address>,
    _serving: AbortOnDropHandle<()>,
}

impl OwnParts {
    /// Opens the port.
    pub(super) async fn open(args: &ServeArgs, identity: &TlsIdentity, folders: &Folders) -> Result<Self> {
        let listen = match args.slices.slice_listen {
            Some(listen) => listen,
            None => SocketAddr::new(host(args).await?, 0),
        };
        let limits = SliceLimits { cache: None, rate: args.slices.slice_rate };
        let advertised = args.cluster.advertised();
        let port = SlicePort::bind(listen, advertised, identity, folders.clone(), limits).await;
        let port = port
            .map_err(|error| anyhow!(error))
            .context("opening the port for parts of the model (--slice-listen)")?;
        let addresses = port.addresses().to_vec();
        let serving = tokio::spawn(async move {
            if let Err(error) = port.serve(CancellationToken::new()).await {
                tracing::error!(%error, "parts of the model are not given out any more");
            }
        });
        Ok(Self { addresses, _serving: AbortOnDropHandle::new(serving) })
    }

    /// Who may have parts of the model: these, and last of all this process.
    pub(super) fn sources(&self, peers: Vec<Peer>) -> Vec<Peer> {
        let own = Peer {
            name: NodeId("orchestrator".to_owned()),
            instance: String::new(),
            addresses: self.addresses.clone(),
        };
        peers.into_iter().take(MOST_PEERS).chain([own]).collect()
    }
}

/// The nodes of a cluster that are there.
pub(super) fn present(registry: &Registry) -> Vec<Peer> {
    let presence = registry.watch_presence();
    let present = presence.borrow();
    present.values().filter_map(|node| Some(node.facts.peer(node.reached.address()?))).collect()
}

/// Nodes that were connected to, each once.
pub(super) fn connected(replicas: &[Vec<NodeClient>]) -> Vec<Peer> {
    let mut peers: Vec<Peer> = Vec::new();
    for peer in replicas.iter().flatten().map(NodeClient::peer) {
        if !peers.iter().any(|known| known.instance == peer.instance) {
            peers.push(peer);
        }
    }
    peers
}

/// Where to listen unless it is said: where nodes join, or at all addresses.
async fn host(args: &ServeArgs) -> Result<IpAddr> {
    if let Some(ip) = args.cluster.listen_host().await? {
        return Ok(ip);
    }
    let is_v6 = |address: &&Address| address.host().starts_with('[');
    let nodes = args.replica_nodes();
    let any_v6 = nodes.iter().flat_map(|nodes| nodes.iter()).any(|address| is_v6(&address));
    Ok(if any_v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() })
}
