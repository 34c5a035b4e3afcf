//! Plans, steps and what is there as programs see them: the JSON of the admin API.

use cluster::{Plan, Role};
use registry::{DeploymentRecord, PlanOrigin, PlanRecord, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chain::Chain;
use crate::deployment::{Goal, Seen};
use crate::difference::{Act, Health, Leaving, Step, Wait};

/// A plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanView {
    id: u64,
    made: Timestamp,
    origin: PlanOrigin,
    /// SHA-256 of its model.
    model: String,
    desired: bool,
    /// As `shoal plan` writes it.
    plan: Value,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepView {
    /// `start`, `role`, `keep`, `drain` or `stop`.
    pub act: String,
    /// The replica's number, but for one that is to be started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replica: Option<usize>,
    /// Its place in the plan, of one that is to be started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<usize>,
    /// The replica's stages and slots.
    pub chain: String,
    /// The role that it gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// What has to be first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// What is desired, what is there, and what is to be done.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeploymentView {
    /// The plan that is desired.
    plan: Option<u64>,
    /// Which decision that was.
    decision: Option<u64>,
    /// Whether all is as the plan asks, and serves.
    reached: bool,
    replicas: Vec<ReplicaView>,
    steps: Vec<StepView>,
    /// The newest decision first.
    history: Vec<DecisionView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ReplicaView {
    replica: usize,
    role: String,
    /// `loading`, `serving`, `down`, `given up`, `draining` or `drained`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    slots: u32,
    stages: Vec<StageView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct StageView {
    node: String,
    first_block: u32,
    end_block: u32,
    gpu_blocks: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct DecisionView {
    decision: u64,
    plan: u64,
    at: Timestamp,
    reason: String,
}

impl PlanView {
    pub(crate) fn new(record: &PlanRecord, desired: Option<u64>) -> Self {
        Self {
            id: record.id,
            made: record.made,
            origin: record.origin,
            model: record.model.clone(),
            desired: desired == Some(record.id),
            plan: serde_json::from_str(&record.plan).unwrap_or_default(),
        }
    }
}

impl StepView {
    /// Of a step to a goal, from what is there.
    pub fn new(step: &Step, goal: &Goal, seen: &[Seen]) -> Self {
        let chain_of = |number: usize| {
            let one = seen.iter().find(|seen| seen.observed.number == number);
            one.map(|seen| seen.observed.chain.to_string()).unwrap_or_default()
        };
        let (act, replica, place, role) = match step.act {
            Act::Start(place) => ("start", None, Some(place), goal.replicas.get(place).map(|one| one.role)),
            Act::SetRole(number, role) => ("role", Some(number), None, Some(role)),
            Act::Resume(number) => ("keep", Some(number), None, None),
            Act::Drain(number) => ("drain", Some(number), None, None),
            Act::Stop(number) => ("stop", Some(number), None, None),
        };
        let wanted = |place: usize| goal.replicas.get(place).map(|one| one.chain.to_string());
        let chain = replica.map(chain_of).or_else(|| wanted(place?));
        Self {
            act: act.to_owned(),
            replica,
            place,
            chain: chain.unwrap_or_default(),
            role: role.map(|role: Role| role.to_string()),
            waits_for: waits_for(&step.wait),
        }
    }

    /// For people.
    pub fn in_words(&self) -> String {
        let number = self.replica.map_or_else(String::new, |number| format!(" {number}"));
        let what = match (self.act.as_str(), &self.role) {
            ("role", Some(role)) => format!("let replica{number} be {role}"),
            ("start", Some(role)) => format!("start a replica ({role})"),
            (act, _) => format!("{act} replica{number}"),
        };
        let waits = self.waits_for.as_ref().map_or_else(String::new, |what| format!("; waits for {what}"));
        format!("{what}: {}{waits}", self.chain)
    }
}

fn waits_for(wait: &Wait) -> Option<String> {
    let list = |all: &[usize]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Some(match wait {
        Wait::Nothing => return None,
        Wait::Nodes(nodes) => {
            let names: Vec<&str> = nodes.iter().map(|node| node.0.as_str()).collect();
            format!("node {} to be there", names.join(", "))
        }
        Wait::Serving(places) => format!("replica {} of the plan to serve", list(places)),
        Wait::Stopped(replicas) => format!("memory of replica {}, which is stopped before", list(replicas)),
        Wait::Vacant => "its requests to end".to_owned(),
    })
}

impl DeploymentView {
    pub(crate) fn new(
        (goal, seen): (Option<&Goal>, &[Seen]),
        steps: Vec<StepView>,
        history: impl Iterator<Item = DeploymentRecord>,
    ) -> Self {
        let all_serve = seen.iter().all(|seen| seen.observed.health == Health::Serving);
        let decision = |record: DeploymentRecord| DecisionView {
            decision: record.id,
            plan: record.plan,
            at: record.at,
            reason: record.reason,
        };
        Self {
            plan: goal.map(|goal| goal.id),
            decision: goal.map(|goal| goal.decision),
            reached: goal.is_some() && steps.is_empty() && all_serve,
            replicas: seen.iter().map(ReplicaView::new).collect(),
            steps,
            history: history.map(decision).collect(),
        }
    }
}

impl ReplicaView {
    fn new(seen: &Seen) -> Self {
        let one = &seen.observed;
        let state = match (one.leaving, one.health) {
            (Leaving::Draining, _) => "draining",
            (Leaving::Drained, _) => "drained",
            (Leaving::No, Health::Loading) => "loading",
            (Leaving::No, Health::Serving) => "serving",
            (Leaving::No, Health::Down) => "down",
            (Leaving::No, Health::GivenUp) => "given up",
        };
        let stages = one.chain.stages.iter().map(|place| StageView {
            node: place.node.0.clone(),
            first_block: place.layers.start(),
            end_block: place.layers.end(),
            gpu_blocks: place.gpu_blocks,
        });
        Self {
            replica: one.number,
            role: one.role.to_string(),
            state,
            reason: seen.reason.clone(),
            slots: one.chain.slots,
            stages: stages.collect(),
        }
    }
}

/// A plan in a line.
pub(crate) fn in_short(plan: &Plan) -> String {
    let replicas = plan.replicas.iter().map(|one| format!("{} {}", one.role, Chain::of(one)));
    replicas.collect::<Vec<_>>().join("; ")
}
