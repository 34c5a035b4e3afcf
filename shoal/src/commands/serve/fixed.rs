//! Replicas that are there from the beginning of a run to its end: on this host, or on nodes that were named.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::{Context, Result};
use cluster::{DeviceProfile, ForetoldHops, ReplicaState, Role};
use futures::future::{join_all, select_all};
use futures::stream::{FuturesUnordered, StreamExt};
use node::agent::{Agent, Epochs, Outlook, RemoteReplica, ReplicaConfig};
use node::links::{RingNews, RingOutlook, RingWatcher};
use node::{Folders, Observer, ReplicaPlan, ReplicaRequest, TurnsFile};
use orchestrator::{Fleet, ReplicaFeed};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::adapt::{Adapter, Fixed, Target};
use super::cluster::OwnCluster;
use super::hosts::Hosts;
use super::report::{Audience, Facts, Numbering, Reporter};
use super::session::{Opened, Servers, orchestrator_config};
use super::{ServeArgs, limits, links};
use crate::cli::Globals;
use crate::commands::{model, stage_worker};
use crate::progress::ProgressView;

/// Starts them and serves; the cluster, if there is one, is for nodes that run nothing yet.
pub(super) async fn serve(opened: Opened<'_>, cluster: Option<OwnCluster>) -> Result<()> {
    let Opened { args, globals, folders, model, profiles, listener, address } = opened;
    let hosts = Hosts::new(args)?;
    let plans = plans(args, &folders, &profiles)?;
    let n_ctx = plans.first().map(|plan| plan.load().n_ctx).context("there is no replica to serve")?;
    let name = args.model_name.clone().unwrap_or_else(|| model.name());
    let facts = Facts::new((name, model.shape()), address, n_ctx, Numbering::Fixed(plans.len()));
    let limits = limits(args, plans.len() * args.slots as usize);
    let fleet = Fleet::new(hosts.tls()?, args.router, limits.queue);
    let wanted: Vec<Wanted> = plans
        .into_iter()
        .enumerate()
        .map(|(replica, plan)| {
            let (wanted, feed) = Wanted::new(plan, args.role(replica));
            fleet.add(feed);
            wanted
        })
        .collect();
    let registry = cluster.as_ref().map(|cluster| cluster.registry.clone());
    let target = Target::Fixed(Fixed { fleet: fleet.clone(), registry: registry.clone() });
    let adapter = Adapter::new(args.basis(n_ctx)?, fleet.clone(), target);
    let mut config = orchestrator_config((args, &model), &facts, n_ctx, (fleet, limits))?;
    config.cluster = registry;
    let stop = CancellationToken::new();
    let (turns, agents) = (Arc::new(TurnsFile::new()?), Vec::new());
    let mut session = Session { args, globals, folders, hosts, profiles, turns, stop: stop.clone(), agents };
    let servers = Servers { listener, config, cluster };
    let work = async {
        tokio::select! {
            ended = session.run(wanted, &facts) => ended,
            ended = adapter.run() => ended,
        }
    };
    let outcome = Box::pin(servers.beside(work, &stop)).await;
    join_all(session.agents.into_iter().map(Agent::shutdown)).await;
    outcome
}

/// What each replica will hold.
fn plans(args: &ServeArgs, folders: &Folders, profiles: &[DeviceProfile]) -> Result<Vec<ReplicaPlan>> {
    let memory_costs = profiles.iter().find_map(|profile| profile.memory);
    let plan = |replica: usize| {
        let request = ReplicaRequest { memory_costs, ..args.request(replica) };
        Ok(ReplicaPlan::new(model::open(&args.model, folders)?, &request)?)
    };
    (0..args.replica_nodes().len()).map(plan).collect()
}

/// Surveys that may wait to be told; there is one in minutes.
pub(super) const LINK_NEWS: usize = 4;

/// A replica that is to be, and where it is told of.
struct Wanted {
    plan: ReplicaPlan,
    outlook: Outlook,
    /// Where it is told what the links foretell.
    hops: watch::Sender<Option<ForetoldHops>>,
}

impl Wanted {
    fn new(plan: ReplicaPlan, role: Role) -> (Self, ReplicaFeed) {
        let waiting_for = "slices to be cut".to_owned();
        let (state, state_seen) = watch::channel(ReplicaState::Loading { progress: 0.0, waiting_for });
        let (observations, observed) = watch::channel(Vec::new());
        let (hops, foretold) = watch::channel(None);
        let slots = plan.load().slots;
        let feed = ReplicaFeed {
            state: state_seen,
            observations: observed,
            hops: foretold,
            role,
            slots,
            predicted: None,
        };
        let outlook = Outlook { state, observations, reports: watch::Sender::new(Vec::new()) };
        (Self { plan, outlook, hops }, feed)
    }
}

/// The replicas' part of a run.
struct Session<'a> {
    args: &'a ServeArgs,
    globals: &'a Globals,
    folders: Folders,
    hosts: Hosts,
    /// Of the stages' devices for the model.
    profiles: Vec<DeviceProfile>,
    /// By which the stages on this host take turns.
    turns: Arc<TurnsFile>,
    stop: CancellationToken,
    /// Kept here so that they can be shut down whatever ends the run.
    agents: Vec<Agent>,
}

impl Session<'_> {
    /// Cuts, starts, and reports; ends only with an error.
    async fn run(&mut self, wanted: Vec<Wanted>, facts: &Facts) -> Result<()> {
        let audience = if self.args.json { Audience::Programs } else { Audience::People };
        let mut reporter = Reporter::new(facts, audience);
        reporter.starting()?;
        for (replica, Wanted { plan, .. }) in wanted.iter().enumerate() {
            reporter.expect(replica, plan.load().slots, plan.predicted());
        }
        self.hosts.connect(self.args, &self.folders).await?;
        let stages: Vec<u32> = wanted.iter().map(|one| one.plan.stages().len() as u32).collect();
        let (news, mut of_links) = mpsc::channel(LINK_NEWS);
        let mut watching = Vec::new();
        for (replica, Wanted { plan, outlook, hops }) in wanted.into_iter().enumerate() {
            let beside = stages.iter().sum::<u32>() - stages[replica];
            let ring = links::ring(self.args, self.hosts.nodes(replica), &plan, &self.profiles)?;
            let agent = self.start(replica, plan, outlook, beside).await?;
            // While the stages load, so that it is known by the time they serve.
            if let Some((ring, nodes)) = ring.zip(self.hosts.ring_nodes(replica)) {
                let (outlook, told) = ring_outlook(replica, hops, news.clone());
                let watcher = RingWatcher::new(nodes, ring, agent.observations(), outlook);
                watching.push(AbortOnDropHandle::new(tokio::spawn(watcher.run())));
                watching.push(told);
            }
            self.agents.push(agent);
        }
        let mut starting = first_to_serve(&self.agents).await?;
        let mut states: Vec<_> = self.agents.iter().map(Agent::state).collect();
        let reports: Vec<_> = self.agents.iter().map(Agent::reports).collect();
        loop {
            for (replica, (state, reports)) in states.iter_mut().zip(&reports).enumerate() {
                let (state, reports) = (state.borrow_and_update().clone(), reports.borrow().clone());
                reporter.changed(replica, &state, &reports)?;
            }
            let changes = select_all(states.iter_mut().map(|state| Box::pin(state.changed())));
            tokio::select! {
                (changed, ..) = changes => changed.context("an agent ended by itself")?,
                Some(started) = starting.next() => started?,
                // Without a watcher there is none.
                Some((replica, news)) = of_links.recv() => reporter.links(replica, &news)?,
            }
        }
    }

    /// Starts a replica, beside so many stages of others.
    async fn start(&self, replica: usize, plan: ReplicaPlan, outlook: Outlook, beside: u32) -> Result<Agent> {
        let stages = plan.stages().len() as u32;
        let hosts = self.args.hosts_of(replica).unwrap_or(1);
        let settings = self.args.settings(stages, hosts, (self.args.slots, self.args.encoding.into()));
        let profiles = self.profiles.clone();
        match &self.hosts {
            Hosts::This(ca) => {
                let prepare = |plan: ReplicaPlan, folders: &Folders, observer: &mut Observer<'_>| {
                    Ok(plan.prepare(folders, observer)?)
                };
                let replica = self.work(plan, prepare).await?;
                let command = stage_worker::command(self.globals)?;
                let emulations = Vec::new();
                let turns = Arc::clone(&self.turns);
                let config =
                    ReplicaConfig { command, replica, settings, emulations, profiles, beside, turns };
                Ok(Agent::start(config, ca, outlook)?)
            }
            Hosts::Nodes { member, .. } => {
                let hash = |plan: ReplicaPlan, folders: &Folders, observer: &mut Observer<'_>| {
                    Ok((plan.hash(folders, observer)?, plan))
                };
                let (model_hash, plan) = self.work(plan, hash).await?;
                let remote = RemoteReplica {
                    plan,
                    model_hash,
                    nodes: self.hosts.nodes(replica).to_vec(),
                    identity: member.tls.clone(),
                    memory_check: self.args.memory_check(),
                    settings,
                    profiles,
                    beside: self.hosts.nodes_beside(replica),
                    sources: self.hosts.sources(),
                    epochs: Epochs::default(),
                    whereabouts: None,
                };
                Ok(Agent::start_on_nodes(remote, outlook))
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

/// What links tell, with the number of the replica whose links they are; and the task that adds it.
pub(super) fn ring_outlook(
    replica: usize,
    hops: watch::Sender<Option<ForetoldHops>>,
    all: mpsc::Sender<(usize, RingNews)>,
) -> (RingOutlook, AbortOnDropHandle<()>) {
    let (news, mut of_ring) = mpsc::channel(LINK_NEWS);
    let adding = tokio::spawn(async move {
        while let Some(news) = of_ring.recv().await {
            if all.send((replica, news)).await.is_err() {
                return;
            }
        }
    });
    (RingOutlook { hops, news }, AbortOnDropHandle::new(adding))
}

/// Shows how far the stages are until the first replica serves. Gives the others that are yet to start; an error is one that
/// never will.
async fn first_to_serve(
    agents: &[Agent],
) -> Result<FuturesUnordered<impl Future<Output = Result<()>> + use<'_>>> {
    let mut view = ProgressView::new();
    let mut states: Vec<_> = agents.iter().map(Agent::state).collect();
    let several = agents.len() > 1;
    let ready = agents.iter().enumerate().map(|(replica, agent)| async move {
        let ready = agent.ready().await.map(drop);
        if several { ready.with_context(|| format!("replica {replica}")) } else { Ok(ready?) }
    });
    let mut starting: FuturesUnordered<_> = ready.collect();
    loop {
        let changes = select_all(states.iter_mut().map(|state| Box::pin(state.changed())));
        tokio::select! {
            Some(started) = starting.next() => {
                started?;
                return Ok(starting);
            }
            (changed, ..) = changes => changed.context("an agent ended by itself")?,
        }
        let loading = states.iter_mut().filter_map(|state| match &*state.borrow_and_update() {
            ReplicaState::Loading { progress, waiting_for } => Some((*progress, waiting_for.clone())),
            ReplicaState::Ready { .. } | ReplicaState::Down { .. } => None,
        });
        match loading.max_by(|(a, _), (b, _)| a.total_cmp(b)) {
            Some((0.0, waiting_for)) => {
                view.show_words("preparing the stages", &format!("waiting for {waiting_for}"));
            }
            Some((furthest, _)) => view.show_share("loading the stages", (furthest * 1000.0) as u64, 1000),
            None => {}
        }
    }
}
