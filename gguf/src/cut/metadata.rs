//! The metadata of a slice: the model's, with everything that depends on a block's number made explicit and cut.

use super::{DUMMY_VOCAB, Slice};
use crate::architectures::{EmbeddingScale, HiddenInput, SizeRule, WithoutSliding};
use crate::model::{Keys, deepseek2_is_lite};
use crate::write::Writer;
use crate::{Array, Value};

/// Arrays under the architecture's prefix that never have one element per block, even if their length says so.
const NOT_PER_BLOCK: &[&str] = &[
    "rope.dimension_sections",
    "classifier.output_labels",
    "target_layers",
    "ple.layers",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
];

/// Wider than any context, and small enough that llama.cpp's sums of it with batch sizes stay in 32 bits.
const WIDEST_WINDOW: u32 = 1 << 22;

/// `LLAMA_EXPERT_GATING_FUNC_TYPE_…` in `src/llama-hparams.h`.
const GATING_SOFTMAX: u32 = 1;
const GATING_SIGMOID: u32 = 2;

pub(super) fn put(writer: &mut Writer, slice: Slice<'_>) {
    let architecture = slice.hparams.architecture.name;
    let prefix = format!("{architecture}.");
    for (key, value) in slice.gguf.metadata() {
        match key.strip_prefix(&prefix) {
            Some(own) if is_dropped(slice, own) => {}
            Some(own) => writer.set(key, cut_value(slice, own, value)),
            None if key.starts_with("tokenizer.") && !slice.is_last() => {}
            None => writer.set(key, value.clone()),
        }
    }
    state(writer, slice);
    if !slice.is_last() {
        writer.set("tokenizer.ggml.model", "none");
        writer.set(format!("{prefix}vocab_size"), slice.n_vocab.min(DUMMY_VOCAB));
    }
    writer.set("shoal.slice.start", slice.range.start());
    writer.set("shoal.slice.end", slice.range.end());
    writer.set("shoal.slice.n_layer", slice.hparams.n_layer);
}

/// How a slice states its sliding windows.
enum Sliding<'a> {
    /// The model has none.
    None,
    /// Block by block.
    Blocks(&'a [bool]),
    /// As a model without.
    NoWindow,
    /// As a model in which every block slides, but never far enough to matter.
    WidestWindow,
}

fn sliding<'a>(slice: Slice<'a>) -> Sliding<'a> {
    let Some(sliding) = &slice.hparams.sliding_window else { return Sliding::None };
    let (start, end) = (slice.range.start() as usize, slice.range.end() as usize);
    let blocks = sliding.blocks.get(start..end).unwrap_or_default();
    match sliding.without {
        WithoutSliding::NoWindow if !blocks.contains(&true) => Sliding::NoWindow,
        WithoutSliding::WidestWindow if !blocks.contains(&true) => Sliding::WidestWindow,
        _ => Sliding::Blocks(blocks),
    }
}

/// Keys that do not hold in a slice.
fn is_dropped(slice: Slice<'_>, own: &str) -> bool {
    match own {
        "nextn_predict_layers" => true,
        "vocab_size" => !slice.is_last(),
        // What sliding blocks have of their own must not come to those that only seem to slide.
        "rope.freq_base_swa"
        | "rope.dimension_count_swa"
        | "attention.key_length_swa"
        | "attention.value_length_swa" => matches!(sliding(slice), Sliding::WidestWindow),
        _ => false,
    }
}

/// A value, cut where it has one element per block.
fn cut_value(slice: Slice<'_>, own: &str, value: &Value) -> Value {
    let Value::Array(array) = value else { return value.clone() };
    let blocks = [slice.hparams.n_layer_all as usize, slice.hparams.n_layer as usize];
    if NOT_PER_BLOCK.contains(&own) || !blocks.contains(&array.len()) {
        return value.clone();
    }
    array.slice(slice.range.start() as usize, slice.range.end() as usize).into()
}

/// States what llama.cpp would otherwise derive from the number of blocks or a block's place among them.
fn state(writer: &mut Writer, slice: Slice<'_>) {
    let hparams = slice.hparams;
    let (start, end) = (slice.range.start() as usize, slice.range.end() as usize);
    let mut set = |key: &str, value: Value| {
        writer.set(format!("{}.{key}", hparams.architecture.name), value);
    };
    let cut = |blocks: &[bool]| Array::Bool(blocks.get(start..end).unwrap_or_default().to_vec());
    set("block_count", slice.range.len().into());
    match sliding(slice) {
        Sliding::None => {}
        Sliding::Blocks(blocks) => {
            set("attention.sliding_window_pattern", Array::Bool(blocks.to_vec()).into());
        }
        Sliding::NoWindow => set("attention.sliding_window", 0.into()),
        Sliding::WidestWindow => {
            set("attention.sliding_window", WIDEST_WINDOW.into());
            set("attention.sliding_window_pattern", Array::Bool(vec![true; end - start]).into());
        }
    }
    if let Some(recurrent) = &hparams.recurrent {
        set("attention.recurrent_layers", cut(recurrent).into());
    }
    if let Some(leading) = hparams.leading_dense {
        let leading = leading.saturating_sub(slice.range.start()).min(slice.range.len());
        set("leading_dense_block_count", leading.into());
    }
    if let EmbeddingScale::Key { .. } = hparams.architecture.embedding_scale {
        set("embedding_scale", 0.0.into());
    }
    match hparams.architecture.size_rule {
        SizeRule::None | SizeRule::Constant { .. } => {}
        SizeRule::MiniCpm => state_minicpm(slice, &mut set),
        SizeRule::Deepseek2 => state_deepseek2(slice, &mut set),
    }
    if hparams.architecture.hidden_input == HiddenInput::MultiRope {
        state_sections(slice, &mut set);
    }
    if let HiddenInput::OverNode(node) = hparams.architecture.hidden_input {
        writer.set("shoal.slice.input_node", node);
    }
}

/// `src/models/minicpm.cpp` has a default that depends on the number of blocks.
fn state_minicpm(slice: Slice<'_>, set: &mut dyn FnMut(&str, Value)) {
    if slice.gguf.get("minicpm.residual_scale").is_none() {
        set("residual_scale", (1.4 / (slice.hparams.n_layer as f32).sqrt()).into());
    }
}

/// `src/models/deepseek2.cpp` guesses from the number of blocks and the vocabulary whether queries are compressed
/// and how experts are gated.
fn state_deepseek2(slice: Slice<'_>, set: &mut dyn FnMut(&str, Value)) {
    let hparams = slice.hparams;
    if deepseek2_is_lite(hparams) {
        set("attention.q_lora_rank", 0.into());
    }
    let gating = slice.gguf.get("deepseek2.expert_gating_func").and_then(Value::as_u64);
    if gating.unwrap_or(0) == 0 {
        // GLM 4.7 Lite, whose files do not state it.
        let sigmoid = matches!(hparams.n_layer, 47 | 48) && hparams.declared_vocab == 154_880;
        let gating = if sigmoid { GATING_SIGMOID } else { GATING_SOFTMAX };
        set("expert_gating_func", gating.into());
    }
}

/// Sections for M-RoPE (`ggml_mrope_cache_init` in `ggml/src/ggml-cpu/ops.cpp`) of which only the first two are not
/// empty: for a text position (p, p, p, 0) every pair of dimensions is then rotated by p, as without M-RoPE.
fn state_sections(slice: Slice<'_>, set: &mut dyn FnMut(&str, Value)) {
    const KEY: &str = "rope.dimension_sections";
    let Ok(keys) = Keys::new(slice.gguf) else { return };
    let stated = keys.get(KEY).and_then(Value::as_array).and_then(Array::as_u64s).unwrap_or_default();
    if stated.len() >= 2 && stated[0] > 0 && stated[1] > 0 {
        return;
    }
    let rotated = keys.u32("rope.dimension_count").ok().flatten().unwrap_or(slice.hparams.head.key);
    let pairs = (rotated / 2).min(i32::MAX as u32) as i32;
    let first = pairs / 2;
    set(KEY, Array::I32(vec![first, pairs - first, 0, 0]).into());
}
