//! Decides which devices form which replica, which blocks each holds, and which replicas prefill or decode.
//!
//! Pure: it is handed facts and hands back a plan. It does no I/O, reads no clock and no environment, and the same
//! input gives the same plan on any number of threads. `README.md` lists what can be relied on and what is not modelled.
#![forbid(unsafe_code)]

// The random problems of `tests/common` are used by unit tests too, and name this crate.
#[cfg(test)]
extern crate self as planner;

#[doc(hidden)]
pub mod bench;
mod bound;
mod chain;
mod diagnose;
pub mod draw;
mod evaluate;
#[cfg(test)]
mod exactness;
pub mod explain;
#[cfg(test)]
mod facts;
mod grouping;
mod instance;
mod layout;
mod objective;
mod partition;
mod prefill;
mod problem;
mod replay;
mod ring;
mod rng;
mod robust;
mod roles;
mod search;
mod settings;
pub mod sim;
mod solve;
pub mod suite;
pub mod table;
pub mod testbed;
mod watch;

pub use diagnose::{DeviceRoom, NoFit};
pub use evaluate::MIXED_CHUNK;
pub use problem::{Problem, ProblemError};
pub use replay::{SimSpeed, StageUse, cluster_of, predict, speeds_of, too_large, utilisation};
pub use rng::Rng;
pub use robust::{Doubt, InDoubt, compare_in_doubt, solve_robust};
pub use search::{CutShort, Method};
pub use settings::{
    BlockDetail, DecodeReading, Effort, EncodingRule, KvLayout, ObjectiveKind, Settings, SlotRule,
};
pub use solve::{PlanError, Solution, solve, solve_watched};
pub use watch::{Progress, Unwatched, Watch, Work};
