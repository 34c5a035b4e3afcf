//! Replicas on the nodes of a cluster, as a plan desires them: they come and go while requests are served.
//!
//! Three parts work on one [`Deployment`]: the admin API and [`desire`] say what is desired, [`crew`] carries it out. None of them
//! waits for another; all that they agree on is in the database.

mod crew;
mod desire;
mod ground;
mod member;
mod replan;

use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::{Context, Result};
use cluster::MemoryCosts;
use deploy::{Deployment, MemoryRule, ServedModel};
use node::agent::Epochs;
use node::{MemoryCheck, ModelFile, ReplicaPlan, model_hash};
use orchestrator::Fleet;
use registry::Registry;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::adapt::{Adapter, Deployed, Target};
use super::cluster::OwnCluster;
use super::fixed::LINK_NEWS;
use super::report::{Audience, Facts, Numbering, Reporter};
use super::session::{Opened, Servers, orchestrator_config};
use super::slices::OwnParts;
use super::{ServeArgs, limits};
use crate::commands::model;
use crate::commands::nodes::build;
use crate::progress::ProgressView;
use crew::Crew;
use ground::Ground;
pub(super) use replan::Known;
use replan::Replanner;

/// Slots for which there is room among the open requests, whatever the plan: replicas come and go, and the bound on memory must not.
const MOST_SLOTS: usize = 1024;

/// Serves what is desired.
pub(super) async fn serve(opened: Opened<'_>, cluster: OwnCluster) -> Result<()> {
    let Opened { args, folders, model, profiles, listener, address, .. } = opened;
    let registry = cluster.registry.clone();
    let identity = registry.own_identity("orchestrator")?;
    // For what all replicas have in common, and to refuse at once what can be of no plan.
    let whole = ReplicaPlan::new(model::open(&args.model, &folders)?, &args.request(0))?;
    let n_ctx = whole.load().n_ctx;
    let hash = hash(&model, folders.clone()).await?;
    let name = args.model_name.clone().unwrap_or_else(|| model.name());
    let facts = Facts::new((name.clone(), model.shape()), address, n_ctx, Numbering::Changing);
    let limits = limits(args, MOST_SLOTS);
    let fleet = Fleet::new(identity.clone(), args.router, limits.queue);
    fleet.wait_for("a plan is looked for".to_owned());
    let deployment = open(&registry, served(args, &model, (&name, &hash.to_string(), n_ctx)))?;
    let known = Known::new(args, &profiles, n_ctx)?.map(Arc::new);
    let links = known.as_ref().map(|known| known.links.clone()).unwrap_or_default();
    let replanner = Replanner::new(model.shape(), known.clone(), (fleet.clone(), args.adapt.clone()));
    let deployed = Deployed {
        deployment: deployment.clone(),
        fleet: fleet.clone(),
        known,
        plan_mode: args.cluster.plan_mode,
    };
    let adapter = Adapter::new(args.basis(n_ctx)?, fleet.clone(), Target::Deployed(Box::new(deployed)));
    let (news, of_links) = mpsc::channel(LINK_NEWS);
    let parts = OwnParts::open(args, &identity, &folders).await?;
    let ground = Ground {
        args: args.clone(),
        folders,
        identity,
        build: build(),
        model_hash: hash,
        epochs: epochs(&registry),
        profiles,
        registry: registry.clone(),
        parts,
        news,
    };
    let mut config = orchestrator_config((args, &model), &facts, n_ctx, (fleet.clone(), limits))?;
    (config.cluster, config.deployment) = (Some(registry), Some(deployment.clone()));
    let audience = if args.json { Audience::Programs } else { Audience::People };
    let mut crew =
        Crew::new(Arc::new(ground), (fleet.clone(), deployment.clone()), Reporter::new(&facts, audience));
    let stop = CancellationToken::new();
    let work = async {
        tokio::select! {
            ended = crew.run(of_links, links) => ended,
            ended = adapter.run() => ended,
            ended = Box::pin(desire::run(args, (&deployment, &fleet), replanner)) => ended,
        }
    };
    let servers = Servers { listener, config, cluster: Some(cluster) };
    let outcome = Box::pin(servers.beside(work, &stop)).await;
    crew.shutdown().await;
    outcome
}

async fn hash(model: &ModelFile, folders: node::Folders) -> Result<cluster::ModelHash> {
    let parts = model.parts().to_vec();
    let hashing = tokio::task::spawn_blocking(move || {
        let mut view = ProgressView::new();
        model_hash(&parts, &folders.model_hashes(), &mut |progress| {
            view.show(&progress);
            ControlFlow::Continue(())
        })
    });
    Ok(hashing.await.context("hashing the model")??)
}

fn served(args: &ServeArgs, model: &ModelFile, (name, hash, n_ctx): (&str, &str, u32)) -> ServedModel {
    let others = [Some(model.name()), model.shape().name.clone(), Some(hash.to_owned())];
    let names = [name.to_owned()].into_iter().chain(others.into_iter().flatten());
    ServedModel {
        hash: hash.to_owned(),
        names: names.collect(),
        shape: model.shape().clone(),
        n_ctx,
        n_ubatch: args.prefill_chunk,
        costs: MemoryCosts::assumed(model.shape()),
        memory: match args.memory_check() {
            MemoryCheck::Warn => MemoryRule::Ignore,
            MemoryCheck::Enforce | MemoryCheck::Elsewhere => MemoryRule::Heed,
        },
    }
}

fn open(registry: &Registry, model: ServedModel) -> Result<Deployment> {
    Deployment::open(registry.clone(), model).context("reading which plan is desired")
}

/// From the database, since nodes keep stages over a restart of this process.
fn epochs(registry: &Registry) -> Epochs {
    let registry = registry.clone();
    Epochs::kept(move |count| registry.take_epochs(count).map_err(|error| error.to_string()))
}
