//! The memory that a stage takes, estimated from a model's description and a few costs per row.
//!
//! The costs are measured by the profiler from llama.cpp's own breakdown; without a profile, [`MemoryCosts::assumed`] stands in.
//! One formula serves the agent's check before it loads, the planner, and the bench that compares it with processes.

use serde::{Deserialize, Serialize};

use crate::{Bytes, CacheRequest, LayerRange, ModelShape, StageMemory};

/// Bytes per cached element: f16, llama.cpp's default for keys and values.
const KV_ELEMENT_BYTES: u64 = 2;

/// A context is sized in steps of this many tokens (`GGML_PAD(n_ctx, 256)` in `src/llama-context.cpp`).
pub const CONTEXT_STEP: u32 = 256;

/// What each stage is asked to hold, alike for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Sequences.
    pub slots: u32,
    /// Tokens per sequence.
    pub n_ctx: u32,
    /// Rows computed at once.
    pub n_ubatch: u32,
}

/// What one stage holds of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLoad {
    /// Its blocks.
    pub layers: LayerRange,
    /// Bytes of all its tensors.
    pub weights: Bytes,
    /// How many of its blocks lie on a GPU.
    pub gpu_layers: u32,
}

/// What a stage takes besides weights and cache. Compute buffers are planned once for the largest batch, so they are linear in
/// its rows; while blocks compute, each row also has a mask over the cells that it may look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryCosts {
    /// Compute buffers, for each row computed at once, while blocks compute.
    pub row: Bytes,
    /// Compute buffers, for each row and each cell of one slot's caches.
    pub row_and_cell: Bytes,
    /// Compute buffers, for each row, while the head computes.
    pub head_row: Bytes,
    /// Compute buffers, for each row of logits.
    pub output: Bytes,
    /// What ggml's kernels take for themselves, for each row; llama.cpp does not count it.
    pub work_row: Bytes,
    /// All that a row takes, but for its mask, where the model's last block is alone: past its attention, only rows that
    /// want logits go on.
    pub last_row: Bytes,
    /// A row on its way from one stage to the next, at each of the two ends.
    pub frame_row: Bytes,
    /// A process with a stage, without anything that depends on its model.
    pub runtime: Bytes,
    /// The vocabulary, on the master.
    pub vocabulary: Bytes,
}

impl MemoryCosts {
    /// Costs of a model that was not measured.
    ///
    /// Measured for SmolLM2, Qwen2.5 and Gemma 3: a row takes 13 to 21 rows of hidden width (5 of them and 3 of the
    /// feed-forward width, which lie in the graph allocator's hands at once), a row and cell 2 bytes (the mask of flash attention
    /// is f16), a process 14.5 to 15 MiB on Linux and what the allocator keeps, and a token of the vocabulary 200 to 380
    /// bytes of text, hash tables and merges.
    pub fn assumed(shape: &ModelShape) -> Self {
        let hidden_row = Bytes(u64::from(shape.n_embd) * 4);
        Self {
            row: hidden_row * 21,
            row_and_cell: Bytes(2),
            head_row: hidden_row * 4,
            output: Bytes(u64::from(shape.n_vocab) * 4),
            work_row: hidden_row * 3,
            last_row: hidden_row * 9,
            frame_row: Bytes(u64::from(shape.n_embd) * 14),
            runtime: Bytes::from_mib(16),
            vocabulary: Bytes(u64::from(shape.n_vocab)) * 350,
        }
    }

    /// Compute buffers as llama.cpp counts them, of a slice with `cells` of one slot's caches.
    pub fn compute(&self, load: Load, cells: u64, is_last: bool) -> Bytes {
        let rows = rows_at_once(load);
        let blocks = (self.row + self.row_and_cell * cells) * rows;
        let head = self.head_row * rows + self.output * u64::from(load.slots);
        if is_last { blocks.max(head) } else { blocks }
    }

    /// Rows of a batch on their way into and out of a stage.
    fn frames(&self, shape: &ModelShape, stage: &StageLoad, load: Load) -> Bytes {
        let ends = u64::from(stage.layers.start() > 0) + u64::from(stage.layers.end() < shape.n_layer());
        self.frame_row * ends * u64::from(load.n_ubatch)
    }

    /// What the model's last block takes of its buffers and for its kernels, with `cells` of one slot's caches.
    fn last_block(&self, load: Load, cells: u64) -> Bytes {
        (self.last_row + self.row_and_cell * cells) * rows_at_once(load) + self.output * u64::from(load.slots)
    }
}

/// Memory that a stage needs on its host.
pub fn stage_memory(shape: &ModelShape, stage: &StageLoad, load: Load, costs: &MemoryCosts) -> StageMemory {
    let on_host = host_layers(stage);
    let is_last = stage.layers.end() == shape.n_layer();
    let cache = on_host.map_or(Bytes::ZERO, |layers| shape.cache_bytes(layers, cache_request(load)));
    let cells = shape.cells(stage.layers, cache_request(load));
    let compute = if is_last && stage.layers.len() == 1 {
        costs.last_block(load, cells)
    } else {
        costs.compute(load, cells, is_last) + costs.work_row * rows_at_once(load)
    };
    let vocabulary = if is_last { costs.vocabulary } else { Bytes::ZERO };
    StageMemory {
        weights: share(stage.weights, on_host.map_or(0, LayerRange::len), stage.layers.len()),
        cache,
        compute: compute + row_buffers(shape, load, is_last) + costs.frames(shape, stage, load),
        runtime: costs.runtime + vocabulary,
    }
}

/// What a cache is asked to hold for `load`: contexts are sized in steps, and all their cells are allocated.
pub fn cache_request(load: Load) -> CacheRequest {
    CacheRequest {
        slots: load.slots,
        n_ctx: load.n_ctx.div_ceil(CONTEXT_STEP).saturating_mul(CONTEXT_STEP),
        n_ubatch: load.n_ubatch,
        kv_element_bytes: KV_ELEMENT_BYTES,
    }
}

/// Rows that a graph is planned for: no more than the caches of all slots hold.
fn rows_at_once(load: Load) -> u64 {
    let request = cache_request(load);
    let cells = u64::from(request.n_ctx) * u64::from(request.slots);
    u64::from(load.n_ubatch.max(load.slots)).min(cells)
}

/// Rows on their way into and out of a stage, which llama.cpp does not count: hidden rows in, and hidden rows out or, at the
/// end, a row of logits per slot.
fn row_buffers(shape: &ModelShape, load: Load, is_last: bool) -> Bytes {
    let hidden = Bytes(u64::from(load.n_ubatch)) * u64::from(shape.n_embd) * 4;
    let logits = Bytes(u64::from(load.slots.min(load.n_ubatch))) * u64::from(shape.n_vocab) * 4;
    hidden + if is_last { logits } else { hidden }
}

/// The blocks that stay in the host's memory; where GPU and CPU share one memory, all.
fn host_layers(stage: &StageLoad) -> Option<LayerRange> {
    let off = if cfg!(target_os = "macos") { 0 } else { stage.gpu_layers };
    // llama.cpp puts the last blocks on the GPU.
    LayerRange::new(stage.layers.start(), stage.layers.end().saturating_sub(off)).ok()
}

fn share(of: Bytes, part: u32, whole: u32) -> Bytes {
    Bytes((u128::from(of.0) * u128::from(part) / u128::from(whole)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: MemoryCosts = MemoryCosts {
        row: Bytes(30_000),
        row_and_cell: Bytes(2),
        head_row: Bytes(10_000),
        output: Bytes(200_000),
        work_row: Bytes(0),
        last_row: Bytes(12_000),
        frame_row: Bytes(0),
        runtime: Bytes(0),
        vocabulary: Bytes(0),
    };

    #[test]
    fn no_more_rows_are_planned_for_than_the_caches_hold() {
        let load = Load { slots: 1, n_ctx: 256, n_ubatch: 2048 };
        assert_eq!(COSTS.compute(load, 256, false), Bytes(256 * 30_512));
        let load = Load { slots: 4, n_ctx: 256, n_ubatch: 512 };
        assert_eq!(COSTS.compute(load, 256, false), Bytes(512 * 30_512));
    }

    #[test]
    fn the_head_counts_where_its_logits_are_larger_than_what_blocks_need() {
        let few = Load { slots: 16, n_ctx: 256, n_ubatch: 1 };
        assert_eq!(COSTS.compute(few, 256, true), Bytes(16 * 10_000 + 16 * 200_000));
        let many = Load { slots: 1, n_ctx: 4096, n_ubatch: 512 };
        assert_eq!(COSTS.compute(many, 4096, true), COSTS.compute(many, 4096, false));
    }
}
