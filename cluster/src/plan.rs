//! A plan: which devices form which replica, cut where, for which phase, and what that should give.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DeviceId, LayerRange, LinkEncoding, Millis, TokensPerSecond};

/// What a replica is used for. It holds the whole model in any case: a role is a routing decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Generates, from KV that it is handed.
    Decode,
    /// Does both.
    Mixed,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        })
    }
}

/// One stage of a replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// Where it runs.
    pub device: DeviceId,
    /// Its blocks.
    pub layers: LayerRange,
    /// How many of them, the last ones, are on the GPU; the others are on the CPU.
    pub gpu_blocks: u32,
    /// How hidden rows leave it.
    pub encoding: LinkEncoding,
    /// Share of a step in which it computes, with all slots busy.
    pub load: f64,
}

impl StagePlan {
    /// Blocks on the CPU.
    pub fn cpu_blocks(&self) -> u32 {
        self.layers.len().saturating_sub(self.gpu_blocks)
    }
}

/// One replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaPlan {
    /// What it is used for.
    pub role: Role,
    /// Its chain; the last stage is the master.
    pub stages: Vec<StagePlan>,
    /// Sequences it has room for.
    pub slots: u32,
    /// Prompt tokens per second with every stage busy; zero where it does not prefill.
    pub prefill_rate: TokensPerSecond,
    /// Generated tokens per second with every slot busy; zero where it does not decode.
    pub decode_rate: TokensPerSecond,
    /// Time per output token of one request with every slot busy.
    pub tpot: Millis,
    /// What keeps it from being faster or larger.
    pub limit: Limit,
}

/// What limits a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The stage with this index is the slowest.
    Stage(u32),
    /// The link out of the stage with this index is slower than any stage.
    Link(u32),
    /// One more slot does not fit into memory.
    Memory,
    /// One more slot would make generation slower than asked for.
    Qos,
    /// The largest number of slots allowed is reached.
    SlotCap,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stage(stage) => write!(f, "stage {stage}"),
            Self::Link(stage) => write!(f, "link after stage {stage}"),
            Self::Memory => f.write_str("memory for slots"),
            Self::Qos => f.write_str("generation speed asked for"),
            Self::SlotCap => f.write_str("slots allowed"),
        }
    }
}

/// What the simulator predicts for a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Mean time to first token.
    pub ttft: Millis,
    /// Mean time per output token.
    pub tpot: Millis,
    /// Mean wait.
    pub wait: Millis,
    /// Longest wait, the mean over seeds.
    pub max_wait: Millis,
    /// Share of requests that were generated more slowly than asked for.
    pub below_min_rate: f64,
}

/// The whole plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of the objective it was chosen by.
    pub objective: String,
    /// Its replicas, prefill first.
    pub replicas: Vec<ReplicaPlan>,
    /// Devices that do nothing.
    pub idle: Vec<DeviceId>,
    /// What it should give.
    pub prediction: Prediction,
}

impl Plan {
    /// Prompt tokens per second of all replicas.
    pub fn prefill_rate(&self) -> TokensPerSecond {
        TokensPerSecond(self.replicas.iter().map(|replica| replica.prefill_rate.0).sum())
    }

    /// Generated tokens per second of all replicas.
    pub fn decode_rate(&self) -> TokensPerSecond {
        TokensPerSecond(self.replicas.iter().map(|replica| replica.decode_rate.0).sum())
    }
}
