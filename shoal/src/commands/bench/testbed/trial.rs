//! One run: a configuration of the suite, its plan, its requests, and what the planner's simulator says of them. Nothing is started
//! here.

use anyhow::{Context, Result};
use cluster::{Plan, Role};
use planner::sim::{Bounds, Request, Served, ShortestWork, SimCluster, requests, simulate};
use planner::testbed::{Configuration, Testbed};
use planner::{DecodeReading, MIXED_CHUNK, ObjectiveKind, Problem, Settings, cluster_of, solve};

/// A run to be made.
pub(super) struct Trial {
    /// The configuration, in words.
    pub(super) name: String,
    /// By which the plan was chosen.
    pub(super) objective: ObjectiveKind,
    pub(super) problem: Problem,
    settings: Settings,
    pub(super) plan: Plan,
    /// The plan as the simulator has it.
    pub(super) cluster: SimCluster,
    pub(super) requests: Vec<Request>,
}

/// What is asked for of all trials.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workload {
    pub(super) seed: u64,
    /// Requests, if not as many as the configuration has.
    pub(super) requests: Option<u32>,
}

impl Trial {
    /// Plans, and draws the requests.
    pub(super) fn new(
        bed: &Testbed,
        configuration: &Configuration,
        objective: ObjectiveKind,
        workload: Workload,
    ) -> Result<Self> {
        let name = configuration.name();
        let mut problem = bed.problem(configuration)?;
        problem.workload.requests = workload.requests.unwrap_or(problem.workload.requests);
        let settings = bed.settings(objective, DecodeReading::Batched);
        let solved = solve(&problem, &settings).with_context(|| format!("planning {name}"))?;
        let cluster = cluster_of(&problem, &settings, &solved.plan)?;
        let requests = requests(&problem.workload, workload.seed);
        Ok(Self { name, objective, problem, settings, plan: solved.plan, cluster, requests })
    }

    /// What becomes of the requests in the simulator.
    pub(super) fn simulate(&self) -> Result<Vec<Served>> {
        let report = simulate(&self.cluster, &self.requests, &mut ShortestWork, Bounds::default());
        Ok(report.context("the simulator cannot serve the requests")?.served)
    }

    /// Tokens of each request's prompt.
    pub(super) fn prompts(&self) -> Vec<f64> {
        self.requests.iter().map(|request| request.prompt).collect()
    }

    /// Prompt tokens that a replica computes at once.
    pub(super) fn chunk(&self, role: Role) -> u32 {
        match role {
            Role::Prefill => self.settings.prefill_chunk,
            Role::Decode | Role::Mixed => self.settings.prefill_chunk.min(MIXED_CHUNK),
        }
    }
}
