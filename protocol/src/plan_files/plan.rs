//! `plan.json`: which devices form which replica.

use cluster::{
    DeviceId, LayerRange, Limit, LinkEncoding, Millis, Plan, Prediction, ReplicaPlan, Role, StagePlan,
    TokensPerSecond,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{PlanFileError, PlannerFile, current};

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// The model that it is for: its name, or its SHA-256.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What it was chosen by.
    pub objective: String,
    /// The replicas.
    pub replicas: Vec<ReplicaEntry>,
    /// Devices that do nothing.
    #[serde(default)]
    pub idle: Vec<String>,
    /// What it should give.
    #[serde(default)]
    pub prediction: PredictionEntry,
}

/// A replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicaEntry {
    /// `prefill`, `decode` or `mixed`.
    pub role: RoleEntry,
    /// Sequences it has room for.
    pub slots: u32,
    /// Its chain; the last stage is the master.
    pub stages: Vec<StageEntry>,
    /// Prompt tokens per second, busy.
    #[serde(default)]
    pub prefill_tokens_per_second: f64,
    /// Generated tokens per second, with every slot busy.
    #[serde(default)]
    pub decode_tokens_per_second: f64,
    /// Time per output token with every slot busy.
    #[serde(default)]
    pub tpot_ms: f64,
    /// What keeps it from being faster or larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitEntry>,
}

/// A role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as cluster::Role")]
pub enum RoleEntry {
    Prefill,
    Decode,
    Mixed,
}

/// A stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageEntry {
    /// Where it runs.
    pub device: String,
    /// First block.
    pub start: u32,
    /// One past the last block.
    pub end: u32,
    /// How many of them, the last ones, are on the GPU.
    pub gpu_blocks: u32,
    /// How hidden rows leave it.
    #[serde(default)]
    pub encoding: EncodingEntry,
    /// Share of the time in which it computes, with all slots busy.
    #[serde(default)]
    pub load: f64,
}

/// How hidden rows travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as cluster::LinkEncoding")]
pub enum EncodingEntry {
    #[default]
    F32,
    F16,
    Q8_0,
}

/// What limits a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as cluster::Limit")]
pub enum LimitEntry {
    Stage(u32),
    Link(u32),
    Memory,
    Qos,
    SlotCap,
}

/// What a plan should give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictionEntry {
    /// Mean time to first token.
    pub ttft_ms: f64,
    /// Mean time per output token.
    pub tpot_ms: f64,
    /// Mean wait.
    pub wait_ms: f64,
    /// Longest wait.
    pub max_wait_ms: f64,
    /// Share of requests generated more slowly than asked for.
    pub below_min_rate: f64,
}

impl PlannerFile for PlanFile {
    const WHAT: &'static str = "the plan";

    fn version(&self) -> u32 {
        self.version
    }
}

impl PlanFile {
    /// The plan in the cluster's nouns.
    pub fn plan(&self) -> Result<Plan, PlanFileError> {
        let predicted = self.prediction;
        Ok(Plan {
            objective: self.objective.clone(),
            replicas: self.replicas.iter().map(ReplicaEntry::replica).collect::<Result<_, _>>()?,
            idle: self.idle.iter().cloned().map(DeviceId).collect(),
            prediction: Prediction {
                ttft: Millis(predicted.ttft_ms),
                tpot: Millis(predicted.tpot_ms),
                wait: Millis(predicted.wait_ms),
                max_wait: Millis(predicted.max_wait_ms),
                below_min_rate: predicted.below_min_rate,
            },
        })
    }

    /// The file of a plan.
    pub fn new(plan: &Plan) -> Self {
        let predicted = plan.prediction;
        Self {
            version: current(),
            model: None,
            objective: plan.objective.clone(),
            replicas: plan.replicas.iter().map(ReplicaEntry::new).collect(),
            idle: plan.idle.iter().map(|device| device.0.clone()).collect(),
            prediction: PredictionEntry {
                ttft_ms: predicted.ttft.0,
                tpot_ms: predicted.tpot.0,
                wait_ms: predicted.wait.0,
                max_wait_ms: predicted.max_wait.0,
                below_min_rate: predicted.below_min_rate,
            },
        }
    }
}

impl ReplicaEntry {
    fn replica(&self) -> Result<ReplicaPlan, PlanFileError> {
        let stage = |entry: &StageEntry| {
            Ok(StagePlan {
                device: DeviceId(entry.device.clone()),
                layers: LayerRange::new(entry.start, entry.end)?,
                gpu_blocks: entry.gpu_blocks,
                encoding: match entry.encoding {
                    EncodingEntry::F32 => LinkEncoding::F32,
                    EncodingEntry::F16 => LinkEncoding::F16,
                    EncodingEntry::Q8_0 => LinkEncoding::Q8_0,
                },
                load: entry.load,
            })
        };
        Ok(ReplicaPlan {
            role: match self.role {
                RoleEntry::Prefill => Role::Prefill,
                RoleEntry::Decode => Role::Decode,
                RoleEntry::Mixed => Role::Mixed,
            },
            stages: self.stages.iter().map(stage).collect::<Result<_, PlanFileError>>()?,
            slots: self.slots,
            prefill_rate: TokensPerSecond(self.prefill_tokens_per_second),
            decode_rate: TokensPerSecond(self.decode_tokens_per_second),
            tpot: Millis(self.tpot_ms),
            limit: match self.limit {
                Some(LimitEntry::Link(stage)) => Limit::Link(stage),
                Some(LimitEntry::Memory) => Limit::Memory,
                Some(LimitEntry::Qos) => Limit::Qos,
                Some(LimitEntry::SlotCap) => Limit::SlotCap,
                Some(LimitEntry::Stage(stage)) => Limit::Stage(stage),
                None => Limit::Stage(0),
            },
        })
    }

    fn new(replica: &ReplicaPlan) -> Self {
        let stage = |stage: &StagePlan| StageEntry {
            device: stage.device.0.clone(),
            start: stage.layers.start(),
            end: stage.layers.end(),
            gpu_blocks: stage.gpu_blocks,
            encoding: match stage.encoding {
                LinkEncoding::F32 => EncodingEntry::F32,
                LinkEncoding::F16 => EncodingEntry::F16,
                LinkEncoding::Q8_0 => EncodingEntry::Q8_0,
            },
            load: stage.load,
        };
        Self {
            role: match replica.role {
                Role::Prefill => RoleEntry::Prefill,
                Role::Decode => RoleEntry::Decode,
                Role::Mixed => RoleEntry::Mixed,
            },
            slots: replica.slots,
            stages: replica.stages.iter().map(stage).collect(),
            prefill_tokens_per_second: replica.prefill_rate.0,
            decode_tokens_per_second: replica.decode_rate.0,
            tpot_ms: replica.tpot.0,
            limit: Some(match replica.limit {
                Limit::Stage(stage) => LimitEntry::Stage(stage),
                Limit::Link(stage) => LimitEntry::Link(stage),
                Limit::Memory => LimitEntry::Memory,
                Limit::Qos => LimitEntry::Qos,
                Limit::SlotCap => LimitEntry::SlotCap,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{
        "version": 1, "objective": "queue", "idle": ["m1"],
        "replicas": [{
            "role": "decode", "slots": 8, "tpot_ms": 40.0, "decode_tokens_per_second": 200.0, "limit": {"stage": 1},
            "stages": [
                {"device": "a", "start": 0, "end": 10, "gpu_blocks": 7, "encoding": "f16", "load": 0.8},
                {"device": "b", "start": 10, "end": 24, "gpu_blocks": 14}
            ]
        }]
    }"#;

    #[test]
    fn a_plan_survives_the_way_into_nouns_and_back() {
        let plan = PlanFile::from_json(EXAMPLE).unwrap().plan().unwrap();
        assert_eq!(plan.replicas[0].stages[0].cpu_blocks(), 3);
        let again = PlanFile::new(&plan);
        assert_eq!(again.plan().unwrap(), plan);
        assert_eq!(PlanFile::from_json(&serde_json::to_string(&again).unwrap()).unwrap(), again);
    }

    #[test]
    fn a_stage_without_blocks_is_refused() {
        let empty = EXAMPLE.replace("\"start\": 10", "\"start\": 24");
        assert!(PlanFile::from_json(&empty).unwrap().plan().is_err());
    }
}
