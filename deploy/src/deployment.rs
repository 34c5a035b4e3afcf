//! The desired plan: kept in the registry, changed by people and by who replans, carried out by who runs replicas.
//!
//! Handles of it are in the admin API, which changes what is desired, and with who runs the replicas, who waits for that and tells
//! what there is. A decision is in the database before anybody acts on it.

use std::sync::{Arc, Mutex, PoisonError};

use cluster::{Bytes, Load, MemoryCosts, ModelShape, Plan, StageLoad, stage_memory};
use protocol::node::NodeFacts;
use protocol::plan_files::{PlanFile, PlanFileError, PlannerFile};
use registry::{DeploymentRecord, EventKind, NewPlan, PlanOrigin, PlanRecord, Registry, RegistryError};
use serde_json::Value;
use thiserror::Error;
use tokio::sync::watch;

use crate::chain::Chain;
use crate::check::{Fault, Grounds, KnownNode, check};
use crate::difference::{Desired, Health, Memory, Observed, Step, Wanted, difference};
use crate::reload::ReloadNeeds;
use crate::view::{DeploymentView, PlanView, StepView, in_short};

/// Decisions that are looked through for one to go back to.
const HISTORY: u32 = 100;

/// The model that is served, and how.
#[derive(Debug, Clone)]
pub struct ServedModel {
    /// SHA-256 in hex: plans are for the model that has it.
    pub hash: String,
    /// What it is called, the likeliest first.
    pub names: Vec<String>,
    /// What it is made of.
    pub shape: ModelShape,
    /// Tokens per slot.
    pub n_ctx: u32,
    /// Rows computed at once.
    pub n_ubatch: u32,
    /// What stages take besides weights and cache.
    pub costs: MemoryCosts,
    /// What to do about memory that seems not to suffice.
    pub memory: MemoryRule,
}

/// What to do about memory that seems not to suffice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryRule {
    /// Old replicas make room before new ones are started.
    Heed,
    /// New ones are started all the same.
    Ignore,
}

/// What is desired.
#[derive(Debug, Clone, PartialEq)]
pub struct Goal {
    /// The plan.
    pub plan: Plan,
    /// Its replicas, as they are compared with what runs.
    pub replicas: Vec<Wanted>,
    /// By which the plan is known.
    pub id: u64,
    /// Who made it.
    pub origin: PlanOrigin,
    /// The number of the decision for it.
    pub decision: u64,
}

/// A replica that is there, and how it is in words.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// What is known of it.
    pub observed: Observed,
    /// Why it does not serve, if it does not.
    pub reason: Option<String>,
}

/// Why a plan is not taken, or not desired.
#[derive(Debug, Error)]
pub enum DeployError {
    /// It is not there, or cannot be kept.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// It is no plan.
    #[error(transparent)]
    File(#[from] PlanFileError),
    /// It cannot be.
    #[error("the plan cannot be: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Faults(Vec<Fault>),
    /// It is for a model that is not served now.
    #[error("plan {plan} is for another model, {model}")]
    OtherModel {
        /// Which.
        plan: u64,
        /// Its model's hash.
        model: String,
    },
    /// There is nothing to go back to.
    #[error("no other plan was desired before")]
    NothingBefore,
    /// The work was cut off.
    #[error("the work was cut off: {0}")]
    CutOff(String),
}

/// The desired plan. Clones are handles of the same one.
#[derive(Debug, Clone)]
pub struct Deployment(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    model: ServedModel,
    goal: watch::Sender<Option<Goal>>,
    seen: watch::Sender<Vec<Seen>>,
    /// Held while a decision is made, so that decisions are desired in the order in which they are kept.
    deciding: Mutex<()>,
}

type Result<T> = std::result::Result<T, DeployError>;

impl Deployment {
    /// With the plan that was last desired for this model, if there is one.
    pub fn open(registry: Registry, model: ServedModel) -> Result<Self> {
        let inner = Inner {
            registry,
            model,
            goal: watch::Sender::new(None),
            seen: watch::Sender::new(Vec::new()),
            deciding: Mutex::new(()),
        };
        let this = Self(Arc::new(inner));
        if let Some((decision, plan)) = this.history()?.into_iter().next() {
            let goal = this.goal_of(&plan, decision.id)?;
            this.0.goal.send_replace(Some(goal));
        }
        Ok(this)
    }

    /// What is desired, to wait for its changes.
    pub fn watch(&self) -> watch::Receiver<Option<Goal>> {
        self.0.goal.subscribe()
    }

    /// What is there, to wait for its changes.
    pub fn watch_seen(&self) -> watch::Receiver<Vec<Seen>> {
        self.0.seen.subscribe()
    }

    /// The model that is served.
    pub fn model(&self) -> &ServedModel {
        &self.0.model
    }

    /// Who is a member, and where all is kept.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// Tells what is there.
    pub fn tell(&self, seen: Vec<Seen>) {
        self.0.seen.send_if_modified(|before| {
            let differs = *before != seen;
            *before = seen;
            differs
        });
    }

    /// Takes a plan from outside, as `shoal plan` writes it, alone or in its report. Nodes that it names must be there.
    pub fn add_text(&self, text: &str) -> Result<PlanRecord> {
        let file = read_plan(text)?;
        let nodes = self.nodes();
        check(&file, self.grounds(Some(&nodes))).map_err(DeployError::Faults)?;
        self.keep(&file, PlanOrigin::Given)
    }

    /// Takes a plan; nodes that it names may come later.
    pub fn add(&self, file: &PlanFile, origin: PlanOrigin) -> Result<PlanRecord> {
        check(file, self.grounds(None)).map_err(DeployError::Faults)?;
        self.keep(file, origin)
    }

    /// Lets a plan be desired.
    pub fn apply(&self, plan: u64, reason: &str) -> Result<Goal> {
        let _deciding = self.0.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let record = self.0.registry.plan(plan)?;
        // Before it is kept: what cannot be is not desired.
        self.goal_of(&record, 0)?;
        let decision = self.0.registry.deploy(plan, reason)?;
        let goal = self.goal_of(&record, decision)?;
        self.0.goal.send_replace(Some(goal.clone()));
        Ok(goal)
    }

    /// Which plan was desired before the one that is.
    pub fn before(&self) -> Result<u64> {
        let history = self.history()?;
        let now = history.first().map(|(decision, _)| decision.plan);
        let before = history.iter().map(|(decision, _)| decision.plan).find(|plan| Some(*plan) != now);
        before.ok_or(DeployError::NothingBefore)
    }

    /// What was last desired of what was not made because nodes came or went.
    pub fn base(&self) -> Result<Option<Goal>> {
        let mut history = self.history()?.into_iter();
        let base = history.find(|(_, plan)| plan.origin != PlanOrigin::Replanned);
        base.map(|(decision, plan)| self.goal_of(&plan, decision.id)).transpose()
    }

    /// What was last desired of what somebody asked for, before anything was made of it because of nodes or of demand.
    pub fn asked(&self) -> Result<Option<Goal>> {
        let mut history = self.history()?.into_iter();
        let asked = history.find(|(_, plan)| matches!(plan.origin, PlanOrigin::Given | PlanOrigin::Started));
        asked.map(|(decision, plan)| self.goal_of(&plan, decision.id)).transpose()
    }

    /// What it takes to get to a plan, which need not be kept, from what is there now.
    pub fn reload_for(&self, plan: &Plan) -> ReloadNeeds {
        let replicas: Vec<Wanted> =
            plan.replicas.iter().map(|one| Wanted { chain: Chain::of(one), role: one.role }).collect();
        let (plan, origin) = (plan.clone(), PlanOrigin::Adapted);
        let goal = Goal { plan, replicas, id: 0, origin, decision: u64::MAX };
        let seen = self.0.seen.borrow().clone();
        ReloadNeeds::of(&self.steps(&goal, &seen), &goal, &seen, &self.0.model.shape)
    }

    /// The steps to a plan from what is there now.
    pub fn steps_to(&self, plan: u64) -> Result<Vec<StepView>> {
        let goal = self.goal_of(&self.0.registry.plan(plan)?, u64::MAX)?;
        let seen = self.0.seen.borrow().clone();
        Ok(self.steps(&goal, &seen).iter().map(|step| StepView::new(step, &goal, &seen)).collect())
    }

    /// The same for who takes them.
    pub fn steps(&self, goal: &Goal, seen: &[Seen]) -> Vec<Step> {
        let observed: Vec<Observed> = seen.iter().map(|seen| seen.observed.clone()).collect();
        let free = self.free_memory(&observed);
        let needs: &dyn Fn(&Chain) -> Memory = &|chain| self.needs(chain);
        let desired = Desired { replicas: &goal.replicas, decision: goal.decision };
        difference(desired, &observed, &free, needs)
    }

    /// All plans, the newest first.
    pub fn plans(&self) -> Result<Vec<PlanView>> {
        let desired = self.desired();
        Ok(self.0.registry.plans()?.iter().map(|record| PlanView::new(record, desired)).collect())
    }

    /// One of them.
    pub fn plan(&self, id: u64) -> Result<PlanView> {
        Ok(PlanView::new(&self.0.registry.plan(id)?, self.desired()))
    }

    /// What is desired, what is there, and what is to be done.
    pub fn view(&self) -> Result<DeploymentView> {
        let (goal, seen) = (self.0.goal.borrow().clone(), self.0.seen.borrow().clone());
        let steps = goal.as_ref().map_or_else(Vec::new, |goal| {
            self.steps(goal, &seen).iter().map(|step| StepView::new(step, goal, &seen)).collect()
        });
        let history = self.history()?.into_iter().map(|(decision, _)| decision);
        Ok(DeploymentView::new((goal.as_ref(), &seen), steps, history))
    }

    /// Does something that may wait for the disk, away from the threads of connections.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&this)).await;
        done.unwrap_or_else(|error| Err(DeployError::CutOff(error.to_string())))
    }

    /// Tells of something. That it cannot be kept is no reason not to go on.
    pub fn note(&self, kind: EventKind, text: &str) {
        tracing::info!(kind = kind.as_str(), "{text}");
        if let Err(error) = self.0.registry.tell(kind, text) {
            tracing::warn!(%error, "an event could not be kept");
        }
    }

    /// The same with numbers for programs.
    pub fn note_with(&self, kind: EventKind, text: &str, facts: &Value) {
        tracing::info!(kind = kind.as_str(), %facts, "{text}");
        if let Err(error) = self.0.registry.tell_with(kind, text, facts) {
            tracing::warn!(%error, "an event could not be kept");
        }
    }

    /// Which plan is desired.
    pub fn desired(&self) -> Option<u64> {
        self.0.goal.borrow().as_ref().map(|goal| goal.id)
    }

    /// What the nodes say of themselves that are there and reached, by name.
    pub fn facts(&self) -> Vec<NodeFacts> {
        let presence = self.0.registry.watch_presence();
        let here = presence.borrow();
        let reached = here.values().filter(|node| node.reached.address().is_some());
        let mut facts: Vec<NodeFacts> = reached.map(|node| node.facts.clone()).collect();
        facts.sort_by(|a, b| a.name.cmp(&b.name));
        facts
    }

    /// The same, as plans are checked against them.
    pub fn nodes(&self) -> Vec<KnownNode> {
        let known = |node: NodeFacts| KnownNode { name: node.name, devices: node.devices };
        self.facts().into_iter().map(known).collect()
    }

    fn keep(&self, file: &PlanFile, origin: PlanOrigin) -> Result<PlanRecord> {
        let plan = file.plan()?;
        let text = serde_json::to_string(file)
            .map_err(|source| PlanFileError::Json { what: PlanFile::WHAT, source })?;
        let new = NewPlan { model: &self.0.model.hash, origin, plan: &text };
        let id = self.0.registry.add_plan(&new, &in_short(&plan))?;
        Ok(self.0.registry.plan(id)?)
    }

    fn goal_of(&self, record: &PlanRecord, decision: u64) -> Result<Goal> {
        if record.model != self.0.model.hash {
            return Err(DeployError::OtherModel { plan: record.id, model: record.model.clone() });
        }
        let file = PlanFile::from_json(&record.plan)?;
        let plan = check(&file, self.grounds(None)).map_err(DeployError::Faults)?;
        let wanted = plan.replicas.iter().map(|one| Wanted { chain: Chain::of(one), role: one.role });
        let replicas = wanted.collect();
        Ok(Goal { plan, replicas, id: record.id, origin: record.origin, decision })
    }

    /// The decisions for plans of this model, the newest first.
    fn history(&self) -> Result<Vec<(DeploymentRecord, PlanRecord)>> {
        let mut history = Vec::new();
        for decision in self.0.registry.deployments(HISTORY)? {
            let plan = self.0.registry.plan(decision.plan)?;
            if plan.model == self.0.model.hash {
                history.push((decision, plan));
            }
        }
        Ok(history)
    }

    fn grounds<'a>(&'a self, nodes: Option<&'a [KnownNode]>) -> Grounds<'a> {
        Grounds { model: &self.0.model.shape, names: &self.0.model.names, nodes }
    }

    /// Memory of each node's host that a chain takes.
    fn needs(&self, chain: &Chain) -> Memory {
        let ServedModel { shape, n_ctx, n_ubatch, costs, .. } = &self.0.model;
        let n_ubatch = (*n_ubatch).max(chain.slots);
        let load = Load { slots: chain.slots, n_ctx: *n_ctx, n_ubatch };
        let mut needs = Memory::new();
        for place in &chain.stages {
            let weights = shape.slice_bytes(place.layers);
            let stage = StageLoad { layers: place.layers, weights, gpu_layers: place.gpu_blocks };
            let takes = match self.0.model.memory {
                MemoryRule::Heed => stage_memory(shape, &stage, load, costs).total(),
                MemoryRule::Ignore => Bytes::ZERO,
            };
            *needs.entry(place.node.clone()).or_insert(Bytes::ZERO) += takes;
        }
        needs
    }

    /// What the nodes that are there have free, when what loads has loaded.
    fn free_memory(&self, observed: &[Observed]) -> Memory {
        let presence = self.0.registry.watch_presence();
        let reached: Vec<_> = presence
            .borrow()
            .values()
            .filter(|node| node.reached.address().is_some())
            .map(|node| (node.facts.name.clone(), node.heartbeat.memory_available))
            .collect();
        let mut free: Memory = reached.into_iter().collect();
        for one in observed.iter().filter(|one| one.health == Health::Loading) {
            for (node, takes) in self.needs(&one.chain) {
                if let Some(free) = free.get_mut(&node) {
                    *free = free.saturating_sub(takes);
                }
            }
        }
        free
    }
}

/// Reads a plan: a plan file, or a report of `shoal plan --json` with one in it.
pub fn read_plan(text: &str) -> Result<PlanFile> {
    let Ok(Value::Object(mut report)) = serde_json::from_str(text) else {
        return Ok(PlanFile::from_json(text)?);
    };
    let Some(plan) = report.remove("plan") else { return Ok(PlanFile::from_json(text)?) };
    let mut file = PlanFile::from_json(&plan.to_string())?;
    if let Some(Value::String(model)) = report.remove("model") {
        file.model.get_or_insert(model);
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{model, plan_file};

    fn served(hash: &str) -> ServedModel {
        let shape = model(30);
        ServedModel {
            hash: hash.into(),
            names: vec!["fish".into(), hash.into()],
            n_ctx: 512,
            n_ubatch: 512,
            costs: MemoryCosts::assumed(&shape),
            memory: MemoryRule::Heed,
            shape,
        }
    }

    fn plan_of(node: &str) -> PlanFile {
        let stage = format!(r#"{{"device": "{node}", "start": 0, "end": 30, "gpu_blocks": 0}}"#);
        plan_file(&format!(r#"[{{"role": "mixed", "slots": 2, "limit": "memory", "stages": [{stage}]}}]"#))
    }

    #[test]
    fn a_decision_outlives_the_process_and_can_be_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(folder.path()).unwrap();
        let deployment = Deployment::open(registry.clone(), served("ab")).unwrap();
        assert_eq!(deployment.desired(), None);
        assert!(matches!(deployment.before(), Err(DeployError::NothingBefore)));
        let ids = ["a", "b"].map(|node| deployment.add(&plan_of(node), PlanOrigin::Given).unwrap().id);
        assert_eq!(deployment.desired(), None, "a plan that was only made");
        for id in ids {
            deployment.apply(id, "asked for").unwrap();
        }
        let again = Deployment::open(registry.clone(), served("ab")).unwrap();
        let goal = again.watch().borrow().clone().unwrap();
        assert_eq!((goal.id, goal.replicas[0].chain.to_string().as_str()), (ids[1], "b[0..30], 2 slots"));
        assert_eq!(again.before().unwrap(), ids[0]);
        let back = again.apply(again.before().unwrap(), "taken back").unwrap();
        assert!(back.decision > goal.decision && back.id == ids[0]);
        assert_eq!(again.before().unwrap(), ids[1]);
        let view = serde_json::to_value(again.view().unwrap()).unwrap();
        assert_eq!((&view["plan"], &view["history"][0]["reason"]), (&ids[0].into(), &"taken back".into()));
        assert_eq!(view["steps"][0]["waits_for"], "node a to be there");

        // Plans of another model are not in the way.
        let other = Deployment::open(registry, served("cd")).unwrap();
        assert_eq!(other.desired(), None);
        assert!(matches!(other.apply(ids[0], "x"), Err(DeployError::OtherModel { .. })));
        assert!(other.apply(77, "x").unwrap_err().to_string().contains("no plan 77"));
    }

    #[test]
    fn a_plan_from_outside_must_name_nodes_that_are_there_and_may_come_in_a_report() {
        let folder = tempfile::tempdir().unwrap();
        let deployment = Deployment::open(Registry::open(folder.path()).unwrap(), served("ab")).unwrap();
        let text = serde_json::to_string(&plan_of("a")).unwrap();
        let said = deployment.add_text(&text).unwrap_err().to_string();
        assert!(said.contains("there is no node a"), "{said}");
        let report = format!(r#"{{"model": "whale", "plan": {text}, "score": 1.5}}"#);
        let said = deployment.add_text(&report).unwrap_err().to_string();
        assert!(
            said.contains("\"whale\", and fish is served") && said.contains("there is no node a"),
            "{said}"
        );
        for broken in ["", "[]", "{}", r#"{"plan": 3}"#, &text.replace("slots", "slits")] {
            assert!(matches!(deployment.add_text(broken), Err(DeployError::File(_))), "{broken}");
        }
        assert!(deployment.plans().unwrap().is_empty());
    }
}
