//! Measures what the planner plans with: latency of reduced models, memory, and the cost of idling.
//!
//! Knows slices and llama.cpp; nothing of plans, replicas or requests.
//!
//! | file | is |
//! | --- | --- |
//! | `profile`, `entry`, `store`, `host` | a profile from beginning to end: the driver, its file, what is kept, the host |
//! | `reduction` | which few blocks stand for a model |
//! | `agenda`, `memory` | what is measured in which process, within a limit of memory; what a stage takes |
//! | `sampling`, `session`, `child`, `wire` | how often, and the processes that do it |
//! | `accuracy` | how well the parts foretell the whole |
//! | `worker`, `hop` | such a process: the only part that runs llama.cpp; the way from one stage to the next |
//! | `curves`, `fit`, `linear`, `statistics` | from samples to curves |
#![forbid(unsafe_code)]

mod accuracy;
mod agenda;
mod child;
mod curves;
mod entry;
mod fit;
pub mod hop;
mod host;
pub mod idle_gap;
mod linear;
mod memory;
mod profile;
mod reduction;
mod sampling;
mod session;
pub mod statistics;
mod store;
mod wire;
mod worker;

pub use accuracy::{
    ACCURACY_BUDGET, Accuracy, AccuracyError, AccuracyPoint, BenchRequest, accuracy, memory_costs,
};
pub use agenda::Files;
pub use curves::CurvesError;
pub use host::Host;
pub use profile::{Observer, ProfileError, Request, Settings, Step, choose_processors, profile};
pub use reduction::{NotReducible, Reduction, blocks_by_kind};
pub use store::{Key, ProfileStore};
pub use worker::{WorkerError, run_worker};
