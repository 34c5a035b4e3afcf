//! What is desired when nobody says so: at the start the plan that was, or one stage on each node; and later, when nodes have left or
//! come back, a plan of what is there.
//!
//! A node that is away for as long as it takes to start it again changes nothing. One that came back must stay twice as long, so that
//! one that comes and goes does not have its stages loaded each time. What is replanned is the last plan that somebody asked for,
//! not the last one that was replanned: so it is what it was when all are back.

use std::time::Duration;

use anyhow::{Context, Result};
use cluster::{LinkEncoding, NodeId, Plan};
use deploy::{Chain, Cut, Deployment, Even, EvenReplica, Goal, read_plan};
use orchestrator::Fleet;
use protocol::plan_files::PlanFile;
use registry::{EventKind, PlanOrigin};
use tokio::time::Instant;

use super::super::cluster::PlanMode;
use super::super::{EncodingArg, ServeArgs};
use super::replan::Replanner;
use crate::output;

/// After a start, nodes are given so long to come before any is missed: they look for the orchestrator every few seconds.
const START_GRACE: Duration = Duration::from_secs(15);

/// Says what is desired as long as it is served.
pub(super) async fn run(
    args: &ServeArgs,
    (deployment, fleet): (&Deployment, &Fleet),
    replanner: Replanner,
) -> Result<()> {
    first(args, deployment, fleet).await?;
    follow(args, deployment, replanner).await
}

async fn first(args: &ServeArgs, deployment: &Deployment, fleet: &Fleet) -> Result<()> {
    let desired = deployment.watch().borrow().clone();
    if let Some(path) = &args.cluster.plan {
        let reading = || format!("reading {}", path.display());
        let text = std::fs::read_to_string(path).with_context(reading)?;
        let file = read_plan(&text).with_context(reading)?;
        let replicas = file.plan().with_context(reading)?.replicas;
        // What was made of it by what is asked for is its own.
        let adapted = desired.as_ref().filter(|goal| goal.origin == PlanOrigin::Adapted);
        let asked = adapted.map(|_| deployment.asked()).transpose()?.flatten();
        let is_it = |goal: &Goal| goal.plan.replicas == replicas;
        if !(desired.as_ref().is_some_and(is_it) || asked.as_ref().is_some_and(is_it)) {
            let id = deployment.add(&file, PlanOrigin::Given).with_context(reading)?.id;
            deployment.apply(id, "it was given with --plan")?;
        }
        return Ok(());
    }
    let even = even(args);
    let was_given = deployment.asked()?.is_some_and(|asked| asked.origin == PlanOrigin::Given);
    match desired {
        Some(goal)
            if goal.origin == PlanOrigin::Given || (goal.origin == PlanOrigin::Adapted && was_given) =>
        {
            output::note(&format!("plan {} is desired: --replicas and --stages are not looked at", goal.id))?;
            return Ok(());
        }
        Some(_) if is_as_asked(&even, deployment)? => return Ok(()),
        _ => {}
    }
    let nodes = until_there(&even, deployment, fleet).await?;
    let plan = even.plan(&deployment.model().shape, &nodes)?;
    let id = deployment.add(&PlanFile::new(&plan), PlanOrigin::Started)?.id;
    deployment.apply(id, "it was started so")?;
    Ok(())
}

/// The replicas that the arguments ask for.
fn even(args: &ServeArgs) -> Even {
    Even {
        replicas: (0..args.replicas as usize).map(|replica| even_replica(args, replica)).collect(),
        gpu_blocks: args.gpu_layers.clone(),
        slots: args.slots,
        encoding: encoding(args),
    }
}

/// How hidden rows travel where no plan says so.
pub(super) fn encoding(args: &ServeArgs) -> LinkEncoding {
    match args.encoding {
        EncodingArg::F32 => LinkEncoding::F32,
        EncodingArg::F16 => LinkEncoding::F16,
    }
}

fn even_replica(args: &ServeArgs, replica: usize) -> EvenReplica {
    let cut = args.cuts_of(replica).map_or(Cut::Even(args.stages), |cuts| Cut::At(cuts.to_vec()));
    EvenReplica { role: args.role(replica), cut }
}

/// Whether the last plan that was made at a start is the one that would be made now.
fn is_as_asked(even: &Even, deployment: &Deployment) -> Result<bool> {
    let Some(base) = deployment.asked()? else { return Ok(false) };
    let nodes: Vec<NodeId> = base.replicas.iter().flat_map(|one| one.chain.nodes().cloned()).collect();
    // On fewer nodes it would be a plan of fewer replicas.
    Ok(nodes.len() == even.nodes()
        && even.plan(&deployment.model().shape, &nodes)?.replicas == base.plan.replicas)
}

/// Waits for as many nodes as it takes; by name.
async fn until_there(even: &Even, deployment: &Deployment, fleet: &Fleet) -> Result<Vec<NodeId>> {
    let mut presence = deployment.registry().watch_presence();
    loop {
        let nodes = nodes_here(deployment);
        if nodes.len() >= even.nodes() {
            return Ok(nodes);
        }
        fleet.wait_for(format!("nodes that joined: {} of {} are there", nodes.len(), even.nodes()));
        presence.changed().await.context("the registry ended by itself")?;
    }
}

fn nodes_here(deployment: &Deployment) -> Vec<NodeId> {
    deployment.nodes().into_iter().map(|node| node.name).collect()
}

/// Who is there, and since when just those are.
struct Here {
    nodes: Vec<NodeId>,
    since: Instant,
}

/// Another plan that would be better.
struct Change {
    plan: Plan,
    /// Whether that is the plan that somebody asked for.
    is_base: bool,
    /// How long those who are there must be the same.
    after: Duration,
    why: String,
}

/// Makes plans when nodes come or go.
async fn follow(args: &ServeArgs, deployment: &Deployment, mut replanner: Replanner) -> Result<()> {
    let started = Instant::now();
    let mut presence = deployment.registry().watch_presence();
    let mut desired = deployment.watch();
    let mut here = Here { nodes: Vec::new(), since: started };
    let (mut proposed, mut asked_for) = (None, None);
    loop {
        presence.mark_unchanged();
        let facts = deployment.facts();
        let nodes: Vec<NodeId> = facts.iter().map(|node| node.name.clone()).collect();
        if nodes != here.nodes {
            here = Here { nodes, since: Instant::now() };
        }
        let goal = desired.borrow_and_update().clone();
        let decision = goal.as_ref().map(|goal| goal.decision);
        if asked_for.as_ref().is_none_or(|(of, _)| *of != decision) {
            asked_for = Some((decision, deployment.base()?));
        }
        let change = match (&goal, &asked_for) {
            (Some(goal), Some((_, Some(base)))) => {
                let plan = replanner.plan(base, &facts).await;
                plan.and_then(|plan| change((goal, base), plan, &here, args))
            }
            _ => None,
        };
        let change = change.filter(|change| proposed.as_ref() != Some(&change.plan));
        let due = change.as_ref().map(|change| (here.since + change.after).max(started + START_GRACE));
        tokio::select! {
            changed = presence.changed() => changed.context("the registry ended by itself")?,
            changed = desired.changed() => changed?,
            () = until(due) => if let Some(change) = change {
                // That it cannot be kept, or cannot be, is no reason not to serve what there is.
                if let Err(error) = make(&change, args, deployment) {
                    tracing::error!(error = format!("{error:#}"), "no other plan could be made");
                }
                proposed = Some(change.plan);
                continue;
            },
        }
        // What was proposed once may be again when something else is desired.
        proposed = proposed.filter(|_| desired.has_changed().is_ok_and(|changed| !changed));
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn change((goal, base): (&Goal, &Goal), plan: Plan, here: &Here, args: &ServeArgs) -> Option<Change> {
    // Roles alone are no reason: they may have been changed by what is asked for.
    let chains = |plan: &Plan| plan.replicas.iter().map(Chain::of).collect::<Vec<_>>();
    if chains(&plan) == chains(&goal.plan) {
        return None;
    }
    let missing = |goal: &Goal| -> Vec<String> {
        let mut missing: Vec<String> = goal
            .replicas
            .iter()
            .flat_map(|one| one.chain.nodes())
            .filter(|node| !here.nodes.contains(node))
            .map(|node| node.0.clone())
            .collect();
        missing.dedup();
        missing
    };
    let settle = args.cluster.replan_after;
    let (lost, away) = (missing(goal), missing(base));
    let (after, why) = match (lost.as_slice(), away.as_slice()) {
        ([], []) => (settle * 2, format!("all nodes of plan {} are there again", base.id)),
        ([], away) => (settle * 2, format!("nodes came back, and {} still away", are(away))),
        (lost, _) => (settle, format!("{} away", are(lost))),
    };
    Some(Change { is_base: plan.replicas == base.plan.replicas, plan, after, why })
}

fn are(nodes: &[String]) -> String {
    match nodes {
        [one] => format!("node {one} is"),
        several => format!("nodes {} are", several.join(", ")),
    }
}

/// Carries a change out, or proposes it.
fn make(change: &Change, args: &ServeArgs, deployment: &Deployment) -> Result<()> {
    let Change { plan, is_base, why, .. } = change;
    let base = deployment.base()?.filter(|_| *is_base).map(|base| base.id);
    let id = match base {
        Some(id) => id,
        None => deployment.add(&PlanFile::new(plan), PlanOrigin::Replanned)?.id,
    };
    let replicas: Vec<String> =
        plan.replicas.iter().map(|one| format!("{} {}", one.role, Chain::of(one))).collect();
    let what = match args.cluster.plan_mode {
        PlanMode::Apply => "is applied",
        PlanMode::Propose => "is proposed",
    };
    let text = format!("{why}: plan {id} {what}: {}", replicas.join("; "));
    deployment.note(EventKind::Replanned, &text);
    if args.cluster.plan_mode == PlanMode::Apply {
        deployment.apply(id, why)?;
    }
    Ok(())
}
