//! The orchestrator's part of `shoal serve`: the port at which nodes join, over the state of the cluster.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use protocol::node::Address;
use registry::{Announce, Approval, ClusterPort, ClusterPortConfig, PortError, Registry};
use tokio_util::sync::CancellationToken;

use crate::cli::Globals;
use crate::commands::nodes::{CLUSTER_PORT, build, cluster_address};
use crate::commands::state;

/// Options for serving with the nodes of a cluster.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cluster options")]
pub(super) struct ClusterArgs {
    /// Address at which nodes join and attend, such as 0.0.0.0:8471 [default: none joins].
    #[arg(long, env = "SHOAL_CLUSTER_LISTEN", value_name = "ADDRESS")]
    pub(super) cluster_listen: Option<String>,
    /// Address at which nodes reach this host; may be repeated [default: the host's own addresses].
    #[arg(long, env = "SHOAL_CLUSTER_ADVERTISE", value_name = "ADDRESS", value_delimiter = ',',
          value_parser = cluster_address, requires = "cluster_listen")]
    cluster_advertise: Vec<Address>,
    /// Let in every host on the LAN that asks, without a token. For networks where all hosts are yours.
    #[arg(long, env = "SHOAL_AUTO_APPROVE", requires = "cluster_listen")]
    auto_approve: bool,
    /// Do not announce this orchestrator by mDNS: hosts need a token.
    #[arg(long, env = "SHOAL_NO_ANNOUNCE", requires = "cluster_listen", conflicts_with = "auto_approve")]
    no_announce: bool,
    /// For how long a node's certificate is good. Nodes renew them when half of that is over.
    // A month: a node that was removed is trusted by others until then; a node that was off for longer asks anew by its key.
    #[arg(long, env = "SHOAL_CERTIFICATE_TTL", value_name = "TIME", default_value = "30days",
          value_parser = certificate_life, requires = "cluster_listen")]
    certificate_ttl: Duration,
}

fn certificate_life(text: &str) -> Result<Duration, String> {
    let life = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let least = Duration::from_secs(10);
    if life < least { Err("a certificate must be good for 10 s at least".to_owned()) } else { Ok(life) }
}

/// The cluster that this process is the orchestrator of.
pub(super) struct OwnCluster {
    /// Who is a member.
    pub(super) registry: Registry,
    port: ClusterPort,
}

impl ClusterArgs {
    /// Opens the state and the port, if nodes are to join.
    pub(super) async fn open(&self, globals: &Globals) -> Result<Option<OwnCluster>> {
        let Some(listen) = &self.cluster_listen else { return Ok(None) };
        let folder = state::folder(globals)?.cluster();
        let registry = Registry::open(&folder).context("opening the cluster's state")?;
        let config = ClusterPortConfig {
            listen: resolve(listen).await?,
            advertise: self.cluster_advertise.clone(),
            build: build(),
            approval: if self.auto_approve { Approval::Automatic } else { Approval::ByHand },
            announce: if self.no_announce { Announce::Nowhere } else { Announce::OnLan },
            certificate_life: self.certificate_ttl,
        };
        let port = ClusterPort::bind(registry.clone(), config).await.context("opening the cluster port")?;
        let addresses: Vec<String> = port.addresses().iter().map(ToString::to_string).collect();
        tracing::info!(addresses = addresses.join(", "), cluster = %registry.fingerprint(), "nodes can join");
        Ok(Some(OwnCluster { registry, port }))
    }
}

impl OwnCluster {
    /// Serves the port until told to stop.
    pub(super) async fn serve(self, stop: CancellationToken) -> Result<(), PortError> {
        self.port.serve(stop).await
    }
}

async fn resolve(text: &str) -> Result<SocketAddr> {
    let text = match text.parse::<std::net::IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, CLUSTER_PORT).to_string(),
        Err(_) => text.to_owned(),
    };
    let mut found = tokio::net::lookup_host(&text).await.map_err(|e| {
        anyhow!("--cluster-listen {text}: {e}; give a host and a port, such as 0.0.0.0:8471 or [::]:8471")
    })?;
    found.next().with_context(|| format!("--cluster-listen {text} is no address of any host"))
}
