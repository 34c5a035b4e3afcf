//! Profiles: what was measured on each device for one model.

use cluster::{
    Attention, BlockCurves, BlockKind, Bytes, ColdCall, ComputeBuffers, DeviceId, DeviceProfile, FeedForward,
    Millis, ProcessorProfile, Surface,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CurveError, PlanFileError, PlannerFile, current};

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfilesFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// One entry for each device.
    pub profiles: Vec<ProfileEntry>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileEntry {
    /// Its name, as in the cluster file.
    pub device: String,
    /// The model that was measured, by hash or name.
    pub model: String,
    /// The runtime's version.
    pub runtime: String,
    /// On the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<ProcessorEntry>,
    /// On the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<ProcessorEntry>,
    /// What every visit of a stage in a chain costs.
    pub hop_overhead_ms: f64,
    /// Compute buffers.
    pub buffers: BuffersEntry,
    /// Looking token embeddings up, by rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<CurveEntry>,
    /// How much longer a call takes after an idle gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_call: Option<ColdCallEntry>,
}

/// What a call takes on top after an idle gap: `extra_ms[i]` after `gaps_ms[i]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ColdCallEntry {
    /// Idle times, rising.
    pub gaps_ms: Vec<f64>,
    /// Extra times, at least zero.
    pub extra_ms: Vec<f64>,
}

/// Compute buffers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BuffersEntry {
    /// With prefill-sized batches.
    pub prefill_bytes: u64,
    /// With decode-sized batches only.
    pub decode_bytes: u64,
}

/// One processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProcessorEntry {
    /// Each type of block.
    pub blocks: Vec<BlockEntry>,
    /// Output norm and LM head, by rows.
    pub head: CurveEntry,
    /// What one call costs however many blocks it computes, by rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CurveEntry>,
}

/// One type of block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockEntry {
    /// How it mixes tokens.
    pub attention: AttentionEntry,
    /// How it transforms each.
    pub feed_forward: FeedForwardEntry,
    /// One decode step, by rows and depth of the cache.
    pub decode: CurveEntry,
    /// One prefill chunk, by tokens.
    pub prefill: CurveEntry,
}

/// Token mixing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "type")]
pub enum AttentionEntry {
    /// Every earlier token.
    Full,
    /// The last so many tokens.
    SlidingWindow {
        /// How many.
        window: u32,
    },
    /// A recurrent state.
    Recurrent,
}

/// Token transformation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeedForwardEntry {
    /// All weights for every token.
    Dense,
    /// A router picks experts.
    MixtureOfExperts,
}

/// Measured times: `ms[i · depths.len() + j]` is the time of `rows[i]` rows at depth `depths[j]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CurveEntry {
    /// Rows or tokens, rising.
    pub rows: Vec<u32>,
    /// Depths of the cache, rising; left out where there is one.
    #[serde(default = "no_depth", skip_serializing_if = "is_no_depth")]
    pub depths: Vec<u32>,
    /// Milliseconds.
    pub ms: Vec<f64>,
}

fn no_depth() -> Vec<u32> {
    vec![0]
}

fn is_no_depth(depths: &[u32]) -> bool {
    depths == [0]
}

impl PlannerFile for ProfilesFile {
    const WHAT: &'static str = "the profile file";

    fn version(&self) -> u32 {
        self.version
    }
}

impl ProfilesFile {
    /// The profiles in the cluster's nouns.
    pub fn profiles(&self) -> Result<Vec<DeviceProfile>, PlanFileError> {
        let read = |entry: &ProfileEntry| {
            entry.profile().map_err(|source| PlanFileError::Curve { device: entry.device.clone(), source })
        };
        self.profiles.iter().map(read).collect()
    }

    /// The file of some profiles.
    pub fn new(profiles: &[DeviceProfile]) -> Self {
        Self { version: current(), profiles: profiles.iter().map(ProfileEntry::new).collect() }
    }
}

impl ProfileEntry {
    fn profile(&self) -> Result<DeviceProfile, CurveError> {
        let processor = |of: &Option<ProcessorEntry>| of.as_ref().map(ProcessorEntry::profile).transpose();
        Ok(DeviceProfile {
            device: DeviceId(self.device.clone()),
            model: self.model.clone(),
            runtime: self.runtime.clone(),
            gpu: processor(&self.gpu)?,
            cpu: processor(&self.cpu)?,
            hop_overhead: Millis(self.hop_overhead_ms),
            buffers: ComputeBuffers {
                prefill: Bytes(self.buffers.prefill_bytes),
                decode: Bytes(self.buffers.decode_bytes),
            },
            embedding: self.embedding.as_ref().map(CurveEntry::surface).transpose()?,
            cold_call: self.cold_call.as_ref().map(ColdCallEntry::cold_call).transpose()?,
        })
    }

    fn new(profile: &DeviceProfile) -> Self {
        Self {
            device: profile.device.0.clone(),
            model: profile.model.clone(),
            runtime: profile.runtime.clone(),
            gpu: profile.gpu.as_ref().map(ProcessorEntry::new),
            cpu: profile.cpu.as_ref().map(ProcessorEntry::new),
            hop_overhead_ms: profile.hop_overhead.0,
            buffers: BuffersEntry {
                prefill_bytes: profile.buffers.prefill.0,
                decode_bytes: profile.buffers.decode.0,
            },
            embedding: profile.embedding.as_ref().map(CurveEntry::new),
            cold_call: profile.cold_call.as_ref().map(ColdCallEntry::new),
        }
    }
}

impl ProcessorEntry {
    fn profile(&self) -> Result<ProcessorProfile, CurveError> {
        let block = |entry: &BlockEntry| {
            Ok::<_, CurveError>(BlockCurves {
                kind: BlockKind {
                    attention: entry.attention.into(),
                    feed_forward: match entry.feed_forward {
                        FeedForwardEntry::Dense => FeedForward::Dense,
                        FeedForwardEntry::MixtureOfExperts => FeedForward::MixtureOfExperts,
                    },
                },
                decode: entry.decode.surface()?,
                prefill: entry.prefill.surface()?,
            })
        };
        let blocks = self.blocks.iter().map(block).collect::<Result<_, _>>()?;
        let call = self.call.as_ref().map(CurveEntry::surface).transpose()?;
        Ok(ProcessorProfile { blocks, head: self.head.surface()?, call })
    }

    fn new(profile: &ProcessorProfile) -> Self {
        let block = |curves: &BlockCurves| BlockEntry {
            attention: curves.kind.attention.into(),
            feed_forward: match curves.kind.feed_forward {
                FeedForward::Dense => FeedForwardEntry::Dense,
                FeedForward::MixtureOfExperts => FeedForwardEntry::MixtureOfExperts,
            },
            decode: CurveEntry::new(&curves.decode),
            prefill: CurveEntry::new(&curves.prefill),
        };
        Self {
            blocks: profile.blocks.iter().map(block).collect(),
            head: CurveEntry::new(&profile.head),
            call: profile.call.as_ref().map(CurveEntry::new),
        }
    }
}

impl CurveEntry {
    fn surface(&self) -> Result<Surface, CurveError> {
        let times = self.ms.iter().copied().map(Millis).collect();
        Ok(Surface::new(self.rows.clone(), self.depths.clone(), times)?)
    }

    fn new(surface: &Surface) -> Self {
        Self {
            rows: surface.rows().to_vec(),
            depths: surface.depths().to_vec(),
            ms: surface.times().iter().map(|time| time.0).collect(),
        }
    }
}

impl ColdCallEntry {
    fn cold_call(&self) -> Result<ColdCall, CurveError> {
        let times = |of: &[f64]| of.iter().copied().map(Millis).collect();
        Ok(ColdCall::new(times(&self.gaps_ms), times(&self.extra_ms))?)
    }

    fn new(cold_call: &ColdCall) -> Self {
        let numbers = |of: &[Millis]| of.iter().map(|time| time.0).collect();
        Self { gaps_ms: numbers(cold_call.gaps()), extra_ms: numbers(cold_call.extra()) }
    }
}

impl From<AttentionEntry> for Attention {
    fn from(entry: AttentionEntry) -> Self {
        match entry {
            AttentionEntry::Full => Self::Full,
            AttentionEntry::SlidingWindow { window } => Self::SlidingWindow { window },
            AttentionEntry::Recurrent => Self::Recurrent,
        }
    }
}

impl From<Attention> for AttentionEntry {
    fn from(attention: Attention) -> Self {
        match attention {
            Attention::Full => Self::Full,
            Attention::SlidingWindow { window } => Self::SlidingWindow { window },
            Attention::Recurrent => Self::Recurrent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{"profiles": [{
        "device": "desk/gpu", "model": "m", "runtime": "b6767",
        "gpu": {
            "blocks": [{
                "attention": {"type": "sliding_window", "window": 128}, "feed_forward": "mixture_of_experts",
                "decode": {"rows": [1, 2], "depths": [0, 4096], "ms": [0.2, 0.3, 0.3, 0.5]},
                "prefill": {"rows": [128, 512], "ms": [2.0, 5.0]}
            }],
            "head": {"rows": [1, 8], "ms": [1.0, 1.5]}, "call": {"rows": [1, 8], "ms": [0.1, 0.2]}
        },
        "hop_overhead_ms": 0.4, "cold_call": {"gaps_ms": [5.0, 25.0], "extra_ms": [0.5, 1.5]},
        "embedding": {"rows": [1, 32], "ms": [0.01, 0.1]}, "buffers": {"prefill_bytes": 1900000000, "decode_bytes": 900000000}
    }]}"#;

    #[test]
    fn a_profile_survives_the_way_into_nouns_and_back() {
        let file = ProfilesFile::from_json(EXAMPLE).unwrap();
        let profiles = file.profiles().unwrap();
        assert_eq!(profiles[0].gpu.as_ref().unwrap().blocks[0].decode.at(2.0, 2048.0), Millis(0.4));
        assert_eq!(ProfilesFile::new(&profiles), file);
    }

    #[test]
    fn a_curve_that_is_none_is_refused_with_its_device() {
        let zero = EXAMPLE.replace("[2.0, 5.0]", "[2.0, 0.0]");
        let error = ProfilesFile::from_json(&zero).unwrap().profiles().unwrap_err();
        assert!(error.to_string().contains("desk/gpu"), "{error}");
    }
}
