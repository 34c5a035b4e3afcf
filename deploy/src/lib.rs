//! Which plan is desired, whether it can be, and by which steps the cluster gets from what runs to it.
//!
//! It decides and keeps; it starts nothing and asks nobody. Who runs replicas tells it what there is, and takes its steps. It knows
//! nothing of HTTP, agents or llama.cpp.
#![forbid(unsafe_code)]

mod chain;
mod check;
mod deployment;
mod difference;
mod even;
mod mend;
mod reload;
mod roles;
#[cfg(test)]
mod testing;
mod view;

pub use chain::{Chain, Place, node_and_device};
pub use check::{Fault, KnownNode, ReplicaFault, StageFault};
pub use deployment::{DeployError, Deployment, Goal, MemoryRule, Seen, ServedModel, read_plan};
pub use difference::{Act, Health, Leaving, Memory, Observed, Step, Wait, Wanted};
pub use even::{Cut, Even, EvenReplica};
pub use mend::mend;
pub use reload::ReloadNeeds;
pub use roles::with_roles;
pub use view::{DeploymentView, PlanView, StepView};
