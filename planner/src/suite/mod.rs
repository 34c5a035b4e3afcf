//! The paper's 36 configurations under all objectives, compared by simulation on workloads that no plan was chosen by.

mod report;

pub use report::{Evaluation, Measured, chart, markdown};

use cluster::Plan;
use serde::Serialize;

use crate::problem::Problem;
use crate::replay::predict;
use crate::settings::{DecodeReading, ObjectiveKind, Settings};
use crate::solve::{PlanError, solve};
use crate::testbed::{Configuration, Testbed, TestbedError};

/// Seeds of the workloads that plans are compared on; plans are chosen with seeds 1, 2 and 3.
pub const SEEDS: [u64; 8] = [101, 102, 103, 104, 105, 106, 107, 108];
/// Waits below this, in seconds, count as equal: nobody calls that congestion.
pub const EQUAL_BELOW: f64 = 0.5;

/// One number for each objective.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[allow(missing_docs, reason = "the fields are the objectives")]
pub struct ByObjective<T> {
    pub els: T,
    pub ft: T,
    pub splitwise: T,
    pub queue: T,
}

impl<T> ByObjective<T> {
    /// The one of an objective.
    pub fn of(&mut self, kind: ObjectiveKind) -> &mut T {
        match kind {
            ObjectiveKind::Els => &mut self.els,
            ObjectiveKind::Ft => &mut self.ft,
            ObjectiveKind::Splitwise => &mut self.splitwise,
            ObjectiveKind::Queue => &mut self.queue,
        }
    }

    /// All of them, in the order of [`ObjectiveKind::ALL`].
    pub fn all(&self) -> [&T; 4] {
        [&self.els, &self.ft, &self.splitwise, &self.queue]
    }
}

/// What came out for one configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The configuration, in words.
    pub name: String,
    /// The longest wait, in seconds, the mean over [`SEEDS`].
    pub max_wait_s: ByObjective<f64>,
    /// Mean time to first token, in seconds.
    pub ttft_s: ByObjective<f64>,
    /// Mean time per output token, in seconds.
    pub tpot_s: ByObjective<f64>,
    /// The plans, in short.
    pub plans: ByObjective<String>,
    /// Whether any objective's plan lets requests wait.
    pub congested: bool,
}

/// How much longer the longest wait is than `queue`'s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    /// Geometric mean over the congested configurations.
    pub geometric_mean: f64,
    /// The largest of them.
    pub largest: f64,
    /// Congested configurations in which `queue` waits longer.
    pub lost: usize,
}

/// The whole suite.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Suite {
    /// Every configuration.
    pub configurations: Vec<Outcome>,
    /// Configurations in which any plan lets requests wait.
    pub congested: usize,
    /// Against each other objective.
    pub ratio_to_queue: Ratios,
}

/// Ratios to `queue`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the fields are the objectives")]
pub struct Ratios {
    pub els: Ratio,
    pub ft: Ratio,
    pub splitwise: Ratio,
}

/// Why the suite did not run.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The test bed.
    #[error(transparent)]
    Testbed(#[from] TestbedError),
    /// A configuration has no plan.
    #[error("no plan for {name}")]
    Plan {
        /// The configuration.
        name: String,
        /// Why.
        #[source]
        source: PlanError,
    },
}

/// What is happening with an objective, for who measures how long planning takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Planning begins.
    Planning(ObjectiveKind),
    /// The plan is there; comparing it begins.
    Planned(ObjectiveKind),
}

/// Plans and compares one configuration.
pub fn outcome(
    bed: &Testbed,
    configuration: &Configuration,
    reading: DecodeReading,
    observe: &mut dyn FnMut(Event),
) -> Result<Outcome, SuiteError> {
    let problem = bed.problem(configuration)?;
    let mut outcome = Outcome {
        name: configuration.name(),
        max_wait_s: ByObjective::default(),
        ttft_s: ByObjective::default(),
        tpot_s: ByObjective::default(),
        plans: ByObjective::default(),
        congested: false,
    };
    let failed = |source| SuiteError::Plan { name: configuration.name(), source };
    for kind in ObjectiveKind::ALL {
        let settings = bed.settings(kind, reading);
        observe(Event::Planning(kind));
        let solution = solve(&problem, &settings).map_err(failed)?;
        observe(Event::Planned(kind));
        compare(&problem, &settings, &solution.plan, &mut outcome).map_err(failed)?;
    }
    Ok(outcome)
}

fn compare(
    problem: &Problem,
    settings: &Settings,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<(), PlanError> {
    let prediction = predict(problem, settings, plan, &SEEDS)?;
    let kind = settings.objective;
    *outcome.max_wait_s.of(kind) = prediction.max_wait.0 / 1e3;
    *outcome.ttft_s.of(kind) = prediction.ttft.0 / 1e3;
    *outcome.tpot_s.of(kind) = prediction.tpot.0 / 1e3;
    *outcome.plans.of(kind) = crate::table::in_short(plan);
    outcome.congested |= prediction.max_wait.0 / 1e3 >= EQUAL_BELOW;
    Ok(())
}

/// The summary of outcomes.
pub fn suite(configurations: Vec<Outcome>) -> Suite {
    let congested: Vec<&Outcome> = configurations.iter().filter(|outcome| outcome.congested).collect();
    let ratio = |of: fn(&ByObjective<f64>) -> f64| {
        let against = |outcome: &&Outcome| {
            of(&outcome.max_wait_s).max(EQUAL_BELOW) / outcome.max_wait_s.queue.max(EQUAL_BELOW)
        };
        let ratios: Vec<f64> = congested.iter().map(against).collect();
        Ratio {
            geometric_mean: (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp(),
            largest: ratios.iter().copied().fold(0.0, f64::max),
            lost: ratios.iter().filter(|r| **r < 1.0).count(),
        }
    };
    let ratio_to_queue =
        Ratios { els: ratio(|w| w.els), ft: ratio(|w| w.ft), splitwise: ratio(|w| w.splitwise) };
    Suite { congested: congested.len(), ratio_to_queue, configurations }
}
