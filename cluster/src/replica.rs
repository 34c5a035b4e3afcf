//! What is known of a running replica: the words in which an agent tells an orchestrator.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Epoch, LayerRange, NodeId, StageIndex};

/// Whether a replica can answer, and if not, why. Nothing answers "ready" that would not answer a chat.
#[derive(Debug, Clone, PartialEq)]
pub enum ReplicaState {
    /// Stages are being started or loaded.
    Loading {
        /// Loaded share of the weights, 0 to 1.
        progress: f32,
        /// What is being waited for, for people.
        waiting_for: String,
    },
    /// Every stage is loaded and linked.
    Ready {
        /// Where the master's engine listens.
        master: SocketAddr,
        /// The replica's incarnation.
        epoch: Epoch,
    },
    /// It cannot serve until something changes.
    Down {
        /// Which stage or step failed and how, for people.
        reason: String,
    },
}

/// Where a stage's memory goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageMemory {
    /// Weights.
    pub weights: Bytes,
    /// KV cache and recurrent states.
    pub cache: Bytes,
    /// Compute and output buffers.
    pub compute: Bytes,
    /// Everything else of the process: code, vocabulary, runtime.
    pub runtime: Bytes,
}

impl StageMemory {
    /// The sum of all parts.
    pub fn total(&self) -> Bytes {
        self.weights + self.cache + self.compute + self.runtime
    }
}

/// What a loaded stage says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    /// Its place in the chain.
    pub stage: StageIndex,
    /// Its blocks.
    pub layers: LayerRange,
    /// Blocks on a GPU.
    pub gpu_layers: u32,
    /// The node that runs it for the agent; none where the agent does so itself.
    pub node: Option<NodeId>,
    /// The process's id, on its host.
    pub pid: u32,
    /// CPU threads.
    pub threads: u32,
    /// Memory as llama.cpp's own breakdown and the slice's size say.
    pub estimated: StageMemory,
    /// Resident memory the operating system reports for the process.
    pub resident: Bytes,
}
