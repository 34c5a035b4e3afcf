//! One run of `shoal serve`, from its first bind to the end of its last child.

use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cluster::{DeviceProfile, ForetoldHops, ReplicaState, StageObservation};
use futures::future::try_join_all;
use node::agent::{Agent, Outlook, RemoteReplica, ReplicaConfig};
use node::links::{Ring, RingNodes, RingOutlook, RingWatcher};
use node::{Folders, NodeClient, Observer, ReplicaPlan, ReplicaRequest};
use orchestrator::{Limits, OrchestratorConfig};
use protocol::tls::{ClusterCa, TlsIdentity};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::ServeArgs;
use super::report::{Audience, Facts, Reporter};
use super::{links, profiles};
use crate::cli::Globals;
use crate::commands::nodes::{connect, read_identity};
use crate::commands::{model, stage_worker};
use crate::interrupt::{exit_at_second_request, stop_asked};
use crate::progress::ProgressView;

/// After a stop was asked for, HTTP has its own deadline for answers under way; this is for the unforeseen.
const HTTP_DEADLINE: Duration = Duration::from_secs(6);

/// Serves until it is told to stop, or cannot go on.
pub(super) async fn serve(args: &ServeArgs, globals: &Globals) -> Result<()> {
    // First, so that a port in use is told before minutes of cutting.
    let listener = bind(&args.listen).await?;
    let address = listener.local_addr().context("asking for the address of the API")?;
    let folders = model::folders(globals)?;
    let model = model::open(&args.model, &folders)?;
    let profiles =
        args.profiles.as_deref().map_or(Ok(Vec::new()), |path| profiles::read(path, &model, &folders))?;
    let memory_costs = profiles.iter().find_map(|profile| profile.memory);
    let plan = ReplicaPlan::new(model, &ReplicaRequest { memory_costs, ..args.request() })?;
    let facts = Facts::new(args.model_name.clone(), address, &plan);
    let hosts = Hosts::find(args).await?;
    let cluster = args.cluster.open(globals).await?;
    let ring = links::ring(args, hosts.nodes(), &plan, &profiles)?;
    let waiting_for = "slices to be cut".to_owned();
    let (state, seen) = watch::channel(ReplicaState::Loading { progress: 0.0, waiting_for });
    let (observations, observed) = watch::channel(Vec::new());
    let (hops, foretold) = watch::channel(None);

    let stop = CancellationToken::new();
    let seen = Seen { state: seen, observations: observed, hops: foretold };
    let registry = cluster.as_ref().map(|cluster| cluster.registry.clone());
    let mut config = orchestrator_config(args, &facts, &plan, hosts.tls()?, seen)?;
    config.cluster = registry;
    let mut http = tokio::spawn(orchestrator::serve(listener, config, stop.clone()));
    let joining = async {
        match cluster {
            Some(cluster) => cluster.serve(stop.clone()).await,
            None => std::future::pending().await,
        }
    };
    let mut replica = Replica { args, globals, folders, hosts, profiles, stop: stop.clone(), agent: None };
    let links = ring.map(|ring| (ring, hops));
    let outcome = tokio::select! {
        outcome = replica.run(plan, links, Outlook { state, observations }, &facts) => outcome,
        ended = &mut http => match ended {
            Ok(Ok(())) => Err(anyhow!("the HTTP server ended by itself")),
            Ok(Err(e)) => Err(e.into()),
            Err(e) => Err(e.into()),
        },
        ended = joining => match ended {
            Ok(()) => Err(anyhow!("the cluster port ended by itself")),
            Err(e) => Err(e.into()),
        },
        () = stop_asked() => {
            tokio::spawn(exit_at_second_request());
            Ok(())
        }
    };
    stop.cancel();
    if !http.is_finished() && tokio::time::timeout(HTTP_DEADLINE, &mut http).await.is_err() {
        http.abort();
    }
    if let Some(agent) = replica.agent {
        agent.shutdown().await;
    }
    outcome
}

/// Surveys that may wait to be told; there is one in minutes.
const LINK_NEWS: usize = 4;

/// Links that are to be watched, and where to tell of them.
type WatchedLinks = (Ring, watch::Sender<Option<ForetoldHops>>);

/// Where the stages run.
enum Hosts {
    /// All on this one, in a cluster of their own that exists as long as they do.
    This(Box<ClusterCa>),
    /// Each on a node.
    Nodes { identity: TlsIdentity, nodes: Vec<NodeClient> },
}

impl Hosts {
    async fn find(args: &ServeArgs) -> Result<Self> {
        let Some(identity) = args.identity.as_deref().filter(|_| !args.nodes.is_empty()) else {
            let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
            return Ok(Self::This(Box::new(ca)));
        };
        let identity = read_identity(identity)?;
        let nodes = args.nodes.iter().map(|address| connect(address, &identity));
        let nodes = try_join_all(nodes).await.context("connecting to the nodes")?;
        Ok(Self::Nodes { identity: identity.tls, nodes })
    }

    fn nodes(&self) -> &[NodeClient] {
        match self {
            Self::This(_) => &[],
            Self::Nodes { nodes, .. } => nodes,
        }
    }

    fn ring_nodes(&self) -> Option<RingNodes> {
        match self {
            Self::This(_) => None,
            Self::Nodes { identity, nodes } => {
                Some(RingNodes { clients: nodes.clone(), identity: identity.clone() })
            }
        }
    }

    fn tls(&self) -> Result<TlsIdentity> {
        match self {
            Self::This(ca) => ca.issue("orchestrator").context("issuing the orchestrator's certificate"),
            Self::Nodes { identity, .. } => Ok(identity.clone()),
        }
    }
}

/// The replica's part of a run.
struct Replica<'a> {
    args: &'a ServeArgs,
    globals: &'a Globals,
    folders: Folders,
    hosts: Hosts,
    /// Of the stages' devices for the model.
    profiles: Vec<DeviceProfile>,
    stop: CancellationToken,
    /// Kept here so that it can be shut down whatever ends the run.
    agent: Option<Agent>,
}

impl Replica<'_> {
    /// Cuts, starts, and reports; ends only with an error.
    async fn run(
        &mut self,
        plan: ReplicaPlan,
        links: Option<WatchedLinks>,
        outlook: Outlook,
        facts: &Facts,
    ) -> Result<()> {
        let settings = self.args.settings(plan.stages().len() as u32);
        let audience = if self.args.json { Audience::Programs } else { Audience::People };
        let mut reporter = Reporter::new(facts, audience);
        reporter.starting()?;
        let started = match &self.hosts {
            Hosts::This(ca) => {
                let prepare = |plan: ReplicaPlan, folders: &Folders, observer: &mut Observer<'_>| {
                    Ok(plan.prepare(folders, observer)?)
                };
                let replica = self.work(plan, prepare).await?;
                let command = stage_worker::command(self.globals)?;
                let (emulations, profiles) = (Vec::new(), self.profiles.clone());
                let config = ReplicaConfig { command, replica, settings, emulations, profiles };
                Agent::start(config, ca, outlook)?
            }
            Hosts::Nodes { identity, nodes } => {
                let hash = |plan: ReplicaPlan, folders: &Folders, observer: &mut Observer<'_>| {
                    Ok((plan.hash(folders, observer)?, plan))
                };
                let (model_hash, plan) = self.work(plan, hash).await?;
                let (nodes, identity, profiles) = (nodes.clone(), identity.clone(), self.profiles.clone());
                let memory_check = self.args.memory_check();
                let replica =
                    RemoteReplica { plan, model_hash, nodes, identity, memory_check, settings, profiles };
                Agent::start_on_nodes(replica, outlook)
            }
        };
        let (news, mut of_links) = mpsc::channel(LINK_NEWS);
        // While the stages load, so that it is known by the time they serve.
        let _watching = links.zip(self.hosts.ring_nodes()).map(|((ring, hops), nodes)| {
            let outlook = RingOutlook { hops, news };
            let watcher = RingWatcher::new(nodes, ring, started.observations(), outlook);
            AbortOnDropHandle::new(tokio::spawn(watcher.run()))
        });
        let agent = self.agent.insert(started);
        show_loading(agent).await?;
        let (mut state, reports) = (agent.state(), agent.reports());
        loop {
            let now = state.borrow_and_update().clone();
            let reports = reports.borrow().clone();
            reporter.changed(&now, &reports)?;
            tokio::select! {
                changed = state.changed() => changed.context("the agent ended by itself")?,
                // Without a watcher there is none.
                Some(news) = of_links.recv() => reporter.links(&news)?,
            }
        }
    }

    /// Does long work on a thread of its own, and shows how far it is.
    async fn work<T: Send + 'static>(
        &self,
        plan: ReplicaPlan,
        work: impl FnOnce(ReplicaPlan, &Folders, &mut Observer<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (folders, stop) = (self.folders.clone(), self.stop.clone());
        let done = tokio::task::spawn_blocking(move || {
            let mut view = ProgressView::new();
            work(plan, &folders, &mut |progress| {
                view.show(&progress);
                if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        done.await.context("preparing the model")?
    }
}

/// Shows how far the stages are until they serve.
async fn show_loading(agent: &Agent) -> Result<()> {
    let mut view = ProgressView::new();
    let mut state = agent.state();
    let ready = agent.ready();
    tokio::pin!(ready);
    loop {
        tokio::select! {
            outcome = &mut ready => {
                outcome?;
                return Ok(());
            }
            changed = state.changed() => changed.context("the agent ended by itself")?,
        }
        if let ReplicaState::Loading { progress, .. } = &*state.borrow_and_update() {
            view.show_share("loading the stages", (progress * 1000.0) as u64, 1000);
        }
    }
}

/// What the orchestrator sees of the replica.
struct Seen {
    state: watch::Receiver<ReplicaState>,
    observations: watch::Receiver<Vec<StageObservation>>,
    hops: watch::Receiver<Option<ForetoldHops>>,
}

fn orchestrator_config(
    args: &ServeArgs,
    facts: &Facts,
    plan: &ReplicaPlan,
    tls: TlsIdentity,
    seen: Seen,
) -> Result<OrchestratorConfig> {
    let mut limits = Limits::default();
    // The queue's limit is the user's to set; this one must not be met before it.
    limits.max_open_requests = limits.max_open_requests.max((args.slots + args.queue) as usize);
    let chat_template = args.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path).with_context(|| format!("reading the chat template {}", path.display()))
    });
    let aliases = [Some(args.model.clone()), plan.model().shape().name.clone()];
    Ok(OrchestratorConfig {
        model_name: facts.model.clone(),
        aliases: aliases.into_iter().flatten().filter(|alias| *alias != facts.model).collect(),
        model_path: plan.model().path().to_owned(),
        chat_template: chat_template.transpose()?,
        replica: seen.state,
        observations: seen.observations,
        hops: seen.hops,
        tls,
        cluster: None,
        n_ctx: plan.load().n_ctx,
        limits,
    })
}

async fn bind(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => anyhow!(
            "listening on {address}: the port is in use by another program; choose another with --listen, \
             such as --listen 127.0.0.1:8081"
        ),
        io::ErrorKind::InvalidInput => {
            anyhow!(
                "listening on {address}: {e}; give a host and a port, such as 127.0.0.1:8080 or [::1]:8080"
            )
        }
        _ => anyhow!("listening on {address}: {e}"),
    })
}
