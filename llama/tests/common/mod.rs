//! Models and rows for the tests of this crate.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::path::PathBuf;

use llama::testing::{RandomModel, WeightType};
use llama::{ContextParams, ExtraBuffers, Model, ModelParams, Output, RowInput, Rows, SliceContext};

/// SmolLM2-135M (llama, Q4_1), which `scripts/fetch-models.sh` fetches.
pub fn smollm2_path() -> PathBuf {
    let folder = std::env::var_os("SHOAL_MODELS").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/shoal/models"),
        PathBuf::from,
    );
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-models.sh", path.display());
    path
}

/// SmolLM2 without repacked weights, so that results do not depend on the number of rows computed at once.
pub fn smollm2() -> Model {
    let params = ModelParams { extra_buffers: ExtraBuffers::Plain, ..ModelParams::default() };
    Model::load(&smollm2_path(), params).unwrap()
}

/// What all small models have in common.
///
/// Their matrices are Q4_1, as SmolLM2's: ggml's product for that type does not depend on the number of rows, while the
/// one for f32 does (ggml-cpu/llamafile/sgemm.cpp).
fn small(architecture: &str, blocks: u32) -> RandomModel {
    RandomModel::new(architecture)
        .weights("", WeightType::Q4_1)
        .set_arch("vocab_size", 128_u32)
        .set_arch("context_length", 1024_u32)
        .set_arch("embedding_length", 64_u32)
        .set_arch("block_count", blocks)
        .set_arch("feed_forward_length", 128_u32)
        .set_arch("attention.head_count", 4_u32)
        .set_arch("attention.head_count_kv", 2_u32)
        .set_arch("attention.layer_norm_rms_epsilon", 1e-5_f32)
        .set_arch("rope.freq_base", 10000.0_f32)
}

/// `small` with heads of 16 and a sliding window of 32 tokens.
fn small_sliding(architecture: &str, blocks: u32) -> RandomModel {
    small(architecture, blocks)
        .set_arch("attention.key_length", 16_u32)
        .set_arch("attention.value_length", 16_u32)
        .set_arch("attention.sliding_window", 32_u32)
}

/// A small model with full attention in every block.
pub fn random_llama() -> RandomModel {
    small("llama", 3)
}

/// A small model with a sliding window of 32 tokens in most blocks.
pub fn random_gemma3() -> RandomModel {
    small_sliding("gemma3", 7)
}

/// A small model that alternates sliding window and full attention, whose graph scales whatever rows come in.
pub fn random_gemma2() -> RandomModel {
    small_sliding("gemma2", 2)
}

/// A small hybrid of recurrent and attention blocks, with M-RoPE.
pub fn random_qwen35() -> RandomModel {
    small("qwen35", 4)
        .set_arch("attention.key_length", 32_u32)
        .set_arch("attention.value_length", 32_u32)
        .set_arch("rope.dimension_count", 32_u32)
        .set_arch("rope.dimension_sections", vec![4_i32, 4, 4, 0])
        .set_arch("ssm.conv_kernel", 4_u32)
        .set_arch("ssm.inner_size", 64_u32)
        .set_arch("ssm.state_size", 16_u32)
        .set_arch("ssm.time_step_rank", 4_u32)
        .set_arch("ssm.group_count", 2_u32)
        .set_arch("full_attention_interval", 4_u32)
}

/// `count` rows of `width` numbers in [-0.5, 0.5), the same for the same `seed`.
pub fn random_rows(seed: u64, count: usize, width: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u32 << 24) as f32 - 0.5
    };
    (0..count * width).map(|_| next()).collect()
}

/// One thread, 512 tokens a slot. ggml's threads spin while they wait for each other, which takes hundreds of times as long
/// once there are more of them than idle cores.
pub fn params(output: Output, n_slots: u32) -> ContextParams {
    ContextParams {
        threads: 1,
        threads_batch: 1,
        max_outputs: 512,
        ..ContextParams::new(output, n_slots, 512)
    }
}

/// The rows of one sequence.
#[derive(Clone)]
pub struct Sequence {
    pub slot: u32,
    pub rows: Vec<f32>,
    pub width: usize,
}

impl Sequence {
    pub fn new(slot: u32, count: usize, width: usize) -> Self {
        Self { slot, rows: random_rows(u64::from(slot) + 1, count, width), width }
    }

    pub fn len(&self) -> usize {
        self.rows.len() / self.width
    }

    pub fn row(&self, position: usize) -> &[f32] {
        &self.rows[position * self.width..(position + 1) * self.width]
    }
}

/// Rows of a run, in the order they are pushed.
#[derive(Default)]
pub struct Batch {
    pub hidden: Vec<f32>,
    pub slots: Vec<u32>,
    pub positions: Vec<u32>,
    pub outputs: Vec<bool>,
}

impl Batch {
    pub fn push(&mut self, sequence: &Sequence, position: usize) {
        self.hidden.extend_from_slice(sequence.row(position));
        self.slots.push(sequence.slot);
        self.positions.push(u32::try_from(position).unwrap());
        self.outputs.push(true);
    }

    pub fn rows(&self) -> Rows<'_> {
        Rows {
            input: RowInput::Hidden(&self.hidden),
            slots: &self.slots,
            positions: &self.positions,
            outputs: &self.outputs,
        }
    }
}

/// Runs `batch` and returns the result of each row, hidden row or logits.
pub fn run(context: &mut SliceContext, batch: &Batch) -> Vec<Vec<f32>> {
    context.run(&batch.rows()).unwrap();
    let n = batch.slots.len();
    match context.params().output {
        Output::Logits => (0..n).map(|row| context.logits(row).unwrap().to_vec()).collect(),
        Output::Hidden => {
            let width = context.model().n_embd() as usize;
            assert_eq!(context.hidden().len(), n * width);
            context.hidden().chunks_exact(width).map(<[f32]>::to_vec).collect()
        }
    }
}

/// What each row of `sequence` gives when it is run alone in a context of its own, one row at a time.
pub fn one_by_one(model: &Model, output: Output, sequence: &Sequence) -> Vec<Vec<f32>> {
    in_steps(model, &params(output, 1), sequence, &vec![1; sequence.len()])
}

/// What each row of `sequence` gives when it is run alone in a context of its own, with the given numbers of rows.
pub fn in_steps(
    model: &Model,
    params: &ContextParams,
    sequence: &Sequence,
    counts: &[usize],
) -> Vec<Vec<f32>> {
    let mut context = SliceContext::new(model, &ContextParams { n_slots: 1, ..params.clone() }).unwrap();
    let alone = Sequence { slot: 0, ..sequence.clone() };
    let mut results = Vec::new();
    for count in counts.iter().filter(|count| **count > 0) {
        let mut batch = Batch::default();
        (results.len()..results.len() + count).for_each(|position| batch.push(&alone, position));
        results.extend(run(&mut context, &batch));
    }
    results
}

/// Asserts that two results are equal to the bit.
pub fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    assert!(expected.iter().all(|number| number.is_finite()), "{what}: the reference is not finite");
    let difference = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let same = got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "{what}: the largest difference is {difference}");
}
