//! What stands behind a profile's curves: on which host and of which model they were measured, every measurement with its
//! spread, and what could not be measured.

use cluster::{Bytes, LayerRange, LayerRangeError, MemoryCosts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{AttentionEntry, FeedForwardEntry, ModelShapeFile};

/// How a profile came about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredEntry {
    /// The model's name, for people.
    pub model_name: String,
    /// The model.
    pub model: ModelShapeFile,
    /// The host.
    pub host: HostEntry,
    /// What llama.cpp was built with.
    pub features: Vec<String>,
    /// CPU threads.
    pub threads: u32,
    /// Tokens per slot.
    pub n_ctx: u32,
    /// Seconds since 1970 at the end.
    pub taken_unix_s: u64,
    /// Bytes that a cached token takes, by type of block, as llama.cpp allocates them.
    pub kv: Vec<KvEntry>,
    /// Most memory that any of the measuring processes held.
    pub peak_resident_bytes: u64,
    /// Every measurement.
    pub measurements: Vec<MeasurementEntry>,
    /// What was not measured, and why.
    pub failures: Vec<FailureEntry>,
}

/// A host and its processors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostEntry {
    /// Its name in the network.
    pub name: String,
    /// All RAM.
    pub ram_total_bytes: u64,
    /// RAM that new processes could use. Swap is never counted.
    pub ram_available_bytes: u64,
    /// What the user wants kept free; already taken off nothing above.
    pub reserve_bytes: u64,
    /// Processors that were found.
    pub processors: Vec<ProcessorFactsEntry>,
}

/// A CPU or GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProcessorFactsEntry {
    /// ggml's name, such as `CPU` or `CUDA0`.
    pub name: String,
    /// The product's name.
    pub description: String,
    /// What it is.
    pub kind: ProcessorKindEntry,
    /// Its memory: of the host, for a CPU or a GPU that shares it.
    pub memory_total_bytes: u64,
    /// Of it free.
    pub memory_free_bytes: u64,
}

/// What a processor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessorKindEntry {
    /// The host's CPU.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares the host's memory: what is in it counts once.
    UnifiedGpu,
}

/// Cached bytes of a type of block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KvEntry {
    /// How the type mixes tokens.
    pub attention: AttentionEntry,
    /// How it transforms each.
    pub feed_forward: FeedForwardEntry,
    /// Bytes for each token and block; of a sliding-window block only its window's tokens count.
    pub bytes_per_token: f64,
    /// Bytes for each sequence and block, of a recurrent block.
    pub bytes_per_slot: f64,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredPartEntry {
    /// A decode step of some blocks, one row per sequence.
    Decode,
    /// A prefill chunk of some blocks.
    Prefill,
    /// A decode step of the model's last blocks with norm and head.
    Head,
    /// A decode step of as many blocks without them, measured at the same time.
    WithoutHead,
    /// Looking token embeddings up.
    Embedding,
    /// A frame on its way from stage to stage, on this host.
    Hop,
}

/// A measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasurementEntry {
    /// ggml's name of the processor.
    pub processor: String,
    /// What was measured.
    pub part: MeasuredPartEntry,
    /// The first block, and the one after the last; left out where none was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayersEntry>,
    /// Rows computed at once.
    pub rows: u32,
    /// Tokens in each cache before.
    pub depth: u32,
    /// Runs that count.
    pub samples: u32,
    /// The middle run.
    pub median_ms: f64,
    /// A quarter of the runs was faster.
    pub lower_quartile_ms: f64,
    /// A quarter of the runs was slower.
    pub upper_quartile_ms: f64,
    /// The runs differed much even after more of them.
    #[serde(default)]
    pub noisy: bool,
}

/// Blocks `[start, end)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayersEntry {
    /// The first.
    pub start: u32,
    /// The one after the last.
    pub end: u32,
}

/// Something that was not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FailureEntry {
    /// What it was.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// Memory that a stage takes besides weights and cache.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryCostsEntry {
    /// Compute buffers, for each row computed at once, while blocks compute.
    pub row_bytes: u64,
    /// Compute buffers, for each row and each cell of one slot's caches.
    pub row_and_cell_bytes: u64,
    /// Compute buffers, for each row, while the head computes.
    pub head_row_bytes: u64,
    /// Compute buffers, for each row of logits.
    pub output_bytes: u64,
    /// What ggml's kernels take for themselves, for each row.
    pub work_row_bytes: u64,
    /// All that a row takes, but for its mask, where the model's last block is alone.
    pub last_row_bytes: u64,
    /// A row on its way from one stage to the next, at each of the two ends.
    pub frame_row_bytes: u64,
    /// A process with a stage, without anything that depends on its model.
    pub runtime_bytes: u64,
    /// The vocabulary, on the master.
    pub vocabulary_bytes: u64,
}

impl From<LayerRange> for LayersEntry {
    fn from(range: LayerRange) -> Self {
        Self { start: range.start(), end: range.end() }
    }
}

impl TryFrom<LayersEntry> for LayerRange {
    type Error = LayerRangeError;

    fn try_from(entry: LayersEntry) -> Result<Self, LayerRangeError> {
        Self::new(entry.start, entry.end)
    }
}

impl From<MemoryCosts> for MemoryCostsEntry {
    fn from(costs: MemoryCosts) -> Self {
        Self {
            row_bytes: costs.row.0,
            row_and_cell_bytes: costs.row_and_cell.0,
            head_row_bytes: costs.head_row.0,
            output_bytes: costs.output.0,
            work_row_bytes: costs.work_row.0,
            last_row_bytes: costs.last_row.0,
            frame_row_bytes: costs.frame_row.0,
            runtime_bytes: costs.runtime.0,
            vocabulary_bytes: costs.vocabulary.0,
        }
    }
}

impl From<MemoryCostsEntry> for MemoryCosts {
    fn from(entry: MemoryCostsEntry) -> Self {
        Self {
            row: Bytes(entry.row_bytes),
            row_and_cell: Bytes(entry.row_and_cell_bytes),
            head_row: Bytes(entry.head_row_bytes),
            output: Bytes(entry.output_bytes),
            work_row: Bytes(entry.work_row_bytes),
            last_row: Bytes(entry.last_row_bytes),
            frame_row: Bytes(entry.frame_row_bytes),
            runtime: Bytes(entry.runtime_bytes),
            vocabulary: Bytes(entry.vocabulary_bytes),
        }
    }
}
