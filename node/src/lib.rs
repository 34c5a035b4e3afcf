//! The agent of a host: finds and cuts models, checks that they fit, and keeps stage workers running.
//!
//! llama.cpp runs in the workers, never in here: native code can abort its process, and the agent must survive
//! that. This crate knows no HTTP and no prompt; it tells others about a replica in the words of `cluster`.
#![forbid(unsafe_code)]

pub mod agent;
mod client;
mod delivery;
mod folders;
mod host;
pub mod links;
pub mod membership;
mod memory;
mod model_file;
mod model_hash;
mod prepare;
mod progress;
mod resolve;
mod service;
mod slices;
#[cfg(test)]
mod test_model;
mod turns;

pub use client::{NodeClient, NodeError};
pub use delivery::{SliceLimits, SlicePort};
pub use folders::{Folders, NoHomeFolder};
pub use host::{available_memory, default_threads, disk_space, host_name, resident_memory};
pub use memory::{MemoryCheck, MemoryError};
pub use model_file::{ModelFile, ModelFileError};
pub use model_hash::{HashError, model_hash};
pub use prepare::{
    DEFAULT_CONTEXT, Layout, PrepareError, PreparedReplica, PreparedStage, ReplicaPlan, ReplicaRequest,
};
pub use progress::{Observer, Progress, Work};
pub use resolve::{ResolveError, resolve_model};
pub use service::{NodeConfig, NodeServeError, NodeWords, RunningNode};
pub use slices::{
    CutRequest, Existing, Origin, Pin, SliceError, SliceFolder, SliceStore, StoredFile, StoredSlices,
};
pub use turns::{TurnsError, TurnsFile};
