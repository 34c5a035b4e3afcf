//! The orchestrator's part of `shoal serve`: the port at which nodes join, over the state of the cluster.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::{ArgGroup, Args, ValueEnum};
use protocol::node::Address;
use registry::{Announce, Approval, ClusterPort, ClusterPortConfig, PortError, Registry};
use tokio_util::sync::CancellationToken;

use crate::cli::Globals;
use crate::commands::nodes::{CLUSTER_PORT, build, cluster_address};
use crate::commands::state;

/// Options for serving with the nodes of a cluster.
#[derive(Debug, Clone, Args)]
#[command(
    next_help_heading = "Cluster options",
    group = ArgGroup::new("in_cluster").args(["cluster", "cluster_listen"]).multiple(true)
)]
pub(super) struct ClusterArgs {
    /// Run the stages on nodes that joined, one on each. Until so many are there, it waits for them. Those that have no copy
    /// of the model get their parts of it from nodes that have them, or from this host.
    #[arg(long, env = "SHOAL_CLUSTER", conflicts_with_all = ["on_nodes", "identity"])]
    cluster: bool,
    /// Address at which nodes join and attend, such as 0.0.0.0:8471 [default: with --cluster that, else none joins].
    #[arg(long, env = "SHOAL_CLUSTER_LISTEN", value_name = "ADDRESS")]
    cluster_listen: Option<String>,
    /// Address at which nodes reach this host; may be repeated [default: the host's own addresses].
    #[arg(long, env = "SHOAL_CLUSTER_ADVERTISE", value_name = "ADDRESS", value_delimiter = ',',
          value_parser = cluster_address, requires = "in_cluster")]
    cluster_advertise: Vec<Address>,
    /// Let in every host on the LAN that asks, without a token. For networks where all hosts are yours.
    #[arg(long, env = "SHOAL_AUTO_APPROVE", requires = "in_cluster")]
    auto_approve: bool,
    /// Do not announce this orchestrator by mDNS: hosts need a token.
    #[arg(long, env = "SHOAL_NO_ANNOUNCE", requires = "in_cluster", conflicts_with = "auto_approve")]
    no_announce: bool,
    /// Start from this plan, as `shoal plan` writes it, or made by hand [default: the plan that was last desired; at first --replicas of
    /// --stages, one stage on each node].
    #[arg(long, env = "SHOAL_PLAN", value_name = "FILE", requires = "cluster")]
    pub(super) plan: Option<PathBuf>,
    /// How long a node must be away before its replicas are made of the others; one that came back must stay twice as long.
    // A node that is started again is back within seconds, and loading stages elsewhere takes as long.
    #[arg(long, env = "SHOAL_REPLAN_AFTER", value_name = "TIME", default_value = "5s",
          value_parser = humantime::parse_duration, requires = "cluster")]
    pub(super) replan_after: Duration,
    /// When requests come and how long they are (docs/schema/workload.schema.json). With --profiles of all nodes, the planner makes
    /// the plan when nodes have left or come [default: the plan that was is mended].
    #[arg(long, env = "SHOAL_WORKLOAD", value_name = "FILE", requires_all = ["cluster", "profiles"])]
    pub(super) workload: Option<PathBuf>,
    /// What becomes of a plan that is made because nodes came or went.
    #[arg(long, env = "SHOAL_PLAN_MODE", value_enum, value_name = "MODE", default_value_t = PlanMode::Apply,
          requires = "cluster")]
    pub(super) plan_mode: PlanMode,
    /// For how long a node's certificate is good. Nodes renew them when half of that is over.
    // A month: a node that was removed is trusted by others until then; a node that was off for longer asks anew by its key.
    #[arg(long, env = "SHOAL_CERTIFICATE_TTL", value_name = "TIME", default_value = "30days",
          value_parser = certificate_life, requires = "in_cluster")]
    certificate_ttl: Duration,
}

/// What becomes of plans that nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlanMode {
    /// They are carried out.
    Apply,
    /// They are kept, and an event tells of them.
    Propose,
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
    /// Whether the stages run on the cluster's nodes.
    pub(super) fn on_its_nodes(&self) -> bool {
        self.cluster
    }

    /// Addresses at which nodes reach this host, if they were given.
    pub(super) fn advertised(&self) -> &[Address] {
        &self.cluster_advertise
    }

    /// The host's address at which nodes join, if they may.
    pub(super) async fn listen_host(&self) -> Result<Option<IpAddr>> {
        match self.listen() {
            Some(listen) => Ok(Some(resolve(&listen).await?.ip())),
            None => Ok(None),
        }
    }

    fn listen(&self) -> Option<String> {
        let everywhere = || self.cluster.then(|| format!("0.0.0.0:{CLUSTER_PORT}"));
        self.cluster_listen.clone().or_else(everywhere)
    }

    /// Opens the state and the port, if nodes are to join.
    pub(super) async fn open(&self, globals: &Globals) -> Result<Option<OwnCluster>> {
        let Some(listen) = self.listen() else { return Ok(None) };
        let folder = state::folder(globals)?.cluster();
        let registry = Registry::open(&folder).context("opening the cluster's state")?;
        let config = ClusterPortConfig {
            listen: resolve(&listen).await?,
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
    let text = match text.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, CLUSTER_PORT).to_string(),
        Err(_) => text.to_owned(),
    };
    let mut found = tokio::net::lookup_host(&text).await.map_err(|e| {
        anyhow!("--cluster-listen {text}: {e}; give a host and a port, such as 0.0.0.0:8471 or [::]:8471")
    })?;
    found.next().with_context(|| format!("--cluster-listen {text} is no address of any host"))
}
