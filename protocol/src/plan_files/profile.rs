//! Profiles: what was measured on each device for one model.

use cluster::{
    Attention, BlockCurves, BlockKind, Bytes, ColdCall, ComputeBuffers, DeviceId, DeviceProfile, FeedForward,
    MemoryCosts, Millis, ProcessorProfile, Surface,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CurveError, MeasuredEntry, MemoryCostsEntry, PlanFileError, PlannerFile, current};

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
    /// What a stage on the CPU takes besides weights and cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryCostsEntry>,
    /// How all of this was measured; left out of a profile made by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Box<MeasuredEntry>>,
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
        self.profiles.iter().map(ProfileEntry::profile).collect()
    }

    /// The file of some profiles, without how they were measured.
    pub fn new(profiles: &[DeviceProfile]) -> Self {
        Self { version: current(), profiles: profiles.iter().map(ProfileEntry::new).collect() }
    }
}

/// A number or curve that cannot be used, and where it is in the entry.
struct Fault(String, CurveError);

impl Fault {
    /// Puts the name of what holds the field before it.
    fn inside(self, holder: &str) -> Self {
        Self(format!("{holder}.{}", self.0), self.1)
    }
}

fn inside<T>(holder: &str, read: Result<T, Fault>) -> Result<T, Fault> {
    read.map_err(|fault| fault.inside(holder))
}

impl ProfileEntry {
    /// The profile in the cluster's nouns. An error names the device and the field.
    pub fn profile(&self) -> Result<DeviceProfile, PlanFileError> {
        self.read().map_err(|Fault(field, source)| PlanFileError::Curve {
            device: self.device.clone(),
            field,
            source,
        })
    }

    fn read(&self) -> Result<DeviceProfile, Fault> {
        let processor = |name: &str, of: &Option<ProcessorEntry>| {
            of.as_ref().map(|entry| inside(name, entry.profile())).transpose()
        };
        if !(self.hop_overhead_ms.is_finite() && self.hop_overhead_ms >= 0.0) {
            let source = CurveError::Number { value: self.hop_overhead_ms };
            return Err(Fault("hop_overhead_ms".to_owned(), source));
        }
        Ok(DeviceProfile {
            device: DeviceId(self.device.clone()),
            model: self.model.clone(),
            runtime: self.runtime.clone(),
            gpu: processor("gpu", &self.gpu)?,
            cpu: processor("cpu", &self.cpu)?,
            hop_overhead: Millis(self.hop_overhead_ms),
            buffers: ComputeBuffers {
                prefill: Bytes(self.buffers.prefill_bytes),
                decode: Bytes(self.buffers.decode_bytes),
            },
            embedding: self.embedding.as_ref().map(|curve| curve.surface("embedding")).transpose()?,
            cold_call: self.cold_call.as_ref().map(ColdCallEntry::cold_call).transpose()?,
            memory: self.memory.map(MemoryCosts::from),
        })
    }

    /// The entry of a profile, without how it was measured.
    pub fn new(profile: &DeviceProfile) -> Self {
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
            memory: profile.memory.map(MemoryCostsEntry::from),
            measured: None,
        }
    }
}

impl ProcessorEntry {
    fn profile(&self) -> Result<ProcessorProfile, Fault> {
        let blocks = self.blocks.iter().enumerate();
        let blocks = blocks.map(|(i, entry)| inside(&format!("blocks[{i}]"), entry.curves()));
        Ok(ProcessorProfile {
            blocks: blocks.collect::<Result<_, _>>()?,
            call: self.call.as_ref().map(|curve| curve.surface("call")).transpose()?,
            head: self.head.surface("head")?,
        })
    }

    fn new(profile: &ProcessorProfile) -> Self {
        let block = |curves: &BlockCurves| BlockEntry {
            attention: curves.kind.attention.into(),
            feed_forward: curves.kind.feed_forward.into(),
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

impl BlockEntry {
    fn curves(&self) -> Result<BlockCurves, Fault> {
        Ok(BlockCurves {
            kind: BlockKind { attention: self.attention.into(), feed_forward: self.feed_forward.into() },
            decode: self.decode.surface("decode")?,
            prefill: self.prefill.surface("prefill")?,
        })
    }
}

impl CurveEntry {
    fn surface(&self, name: &str) -> Result<Surface, Fault> {
        let times = self.ms.iter().copied().map(Millis).collect();
        let surface = Surface::new(self.rows.clone(), self.depths.clone(), times);
        surface.map_err(|source| Fault(name.to_owned(), source.into()))
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
    fn cold_call(&self) -> Result<ColdCall, Fault> {
        let times = |of: &[f64]| of.iter().copied().map(Millis).collect();
        ColdCall::new(times(&self.gaps_ms), times(&self.extra_ms))
            .map_err(|source| Fault("cold_call".to_owned(), source.into()))
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

impl From<FeedForwardEntry> for FeedForward {
    fn from(entry: FeedForwardEntry) -> Self {
        match entry {
            FeedForwardEntry::Dense => Self::Dense,
            FeedForwardEntry::MixtureOfExperts => Self::MixtureOfExperts,
        }
    }
}

impl From<FeedForward> for FeedForwardEntry {
    fn from(feed_forward: FeedForward) -> Self {
        match feed_forward {
            FeedForward::Dense => Self::Dense,
            FeedForward::MixtureOfExperts => Self::MixtureOfExperts,
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

    fn refusal(from: &str, to: &str) -> String {
        let text = EXAMPLE.replace(from, to);
        assert_ne!(text, EXAMPLE, "{from}");
        match ProfilesFile::from_json(&text) {
            Err(error) => error.to_string(),
            Ok(file) => file.profiles().unwrap_err().to_string(),
        }
    }

    #[test]
    fn a_curve_that_is_none_is_refused_with_its_device_and_field() {
        for (good, bad, field) in [
            ("[2.0, 5.0]", "[2.0, 0.0]", "gpu.blocks[0].prefill"),
            ("[2.0, 5.0]", "[2.0, -5.0]", "gpu.blocks[0].prefill"),
            ("[0.2, 0.3, 0.3, 0.5]", "[0.2, 0.3, 0.3]", "gpu.blocks[0].decode"),
            ("[1.0, 1.5]", "[]", "gpu.head"),
            ("[0.1, 0.2]", "[0.1, 1e999]", "call.ms[1]"),
            ("\"hop_overhead_ms\": 0.4", "\"hop_overhead_ms\": -1", "hop_overhead_ms"),
            ("\"extra_ms\": [0.5, 1.5]", "\"extra_ms\": [-0.5, 1.5]", "cold_call"),
            ("[0.01, 0.1]", "[NaN, 0.1]", "embedding.ms[0]"),
            ("\"ms\": [2.0, 5.0]", "\"seconds\": [2.0, 5.0]", "prefill"),
        ] {
            let error = refusal(good, bad);
            assert!(error.contains(field), "{bad}: {error}");
        }
        assert!(refusal("[2.0, 5.0]", "[2.0, 0.0]").contains("desk/gpu"));
    }

    #[test]
    fn another_version_is_refused_by_number_whatever_else_it_holds() {
        let error = refusal("{\"profiles\"", "{\"version\": 7, \"new\": 1, \"profiles\"");
        assert!(error.contains("version 7"), "{error}");
    }
}
