//! How a random model is made: its metadata, as a converter would write them, and the tensors llama.cpp then asks for.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gguf::write::{Data, Writer};
use gguf::{Array, Value};
use llama::testing::{MetadataValue, RandomModel, WeightType};

use crate::cutting::open;

/// A small random model, not built yet.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    pub(crate) architecture: &'static str,
    /// What sets it apart from the architecture's other recipes.
    pub(crate) variant: &'static str,
    /// Under the architecture's prefix.
    metadata: Vec<(&'static str, Value)>,
    weights: Vec<(&'static str, WeightType)>,
    /// llama.cpp makes every tensor that it knows for an architecture; these it can do without, and so does the model.
    without: Vec<&'static str>,
}

impl Recipe {
    /// Eight blocks of a dense Transformer with grouped-query attention, in a mix of types as real files have it.
    pub(crate) fn new(architecture: &'static str, variant: &'static str) -> Self {
        Self { architecture, variant, metadata: Vec::new(), weights: Vec::new(), without: Vec::new() }
            .set("vocab_size", 512)
            .set("context_length", 1024)
            .set("embedding_length", 256)
            .set("block_count", 8)
            .set("feed_forward_length", 512)
            .set("attention.head_count", 4)
            .set("attention.head_count_kv", 2)
            .set("attention.key_length", 64)
            .set("attention.value_length", 64)
            .set("rope.dimension_count", 64)
            .set("rope.freq_base", 10_000.0)
            .weights("", WeightType::Q4K)
            .weights("ffn_down", WeightType::Q6K)
            .weights("attn_output", WeightType::Q8_0)
            .weights("token_embd", WeightType::Q6K)
    }

    /// Adds a value, or replaces it.
    pub(crate) fn set(self, key: &'static str, value: impl Into<Value>) -> Self {
        let mut recipe = self.unset(key);
        recipe.metadata.push((key, value.into()));
        recipe
    }

    /// Takes a value out.
    pub(crate) fn unset(mut self, key: &'static str) -> Self {
        self.metadata.retain(|(other, _)| *other != key);
        self
    }

    /// Types of the matrices whose name contains `part`.
    pub(crate) fn weights(mut self, part: &'static str, kind: WeightType) -> Self {
        self.weights.push((part, kind));
        self
    }

    /// All weights as llama.cpp makes them, in f32.
    pub(crate) fn unquantised(mut self) -> Self {
        self.weights.clear();
        self
    }

    /// Leaves out tensors: of every block, where the name is that of a block's tensor without its number.
    pub(crate) fn without(mut self, names: &[&'static str]) -> Self {
        self.without.extend_from_slice(names);
        self
    }

    /// Root mean square norms.
    pub(crate) fn rms_norm(self) -> Self {
        self.set("attention.layer_norm_rms_epsilon", 1e-5)
    }

    /// Norms with mean and bias.
    pub(crate) fn layer_norm(self) -> Self {
        self.set("attention.layer_norm_epsilon", 1e-5)
    }

    /// Two of four experts for each token.
    pub(crate) fn experts(self) -> Self {
        self.set("expert_count", 4)
            .set("expert_used_count", 2)
            .set("expert_feed_forward_length", 256)
            .set("feed_forward_length", 256)
    }

    /// Builds the model and writes it as `model.gguf` into `folder`.
    ///
    /// llama.cpp states every pattern over the blocks when it writes a file. Converters do not, and then the cutter has
    /// to know the patterns: so the file gets the recipe's own metadata, and only the tensors are llama.cpp's.
    pub(crate) fn build(&self, folder: &Path) -> Result<PathBuf> {
        let made = folder.join("made.gguf");
        self.random_model()?
            .save(&made)
            .with_context(|| format!("{} {}", self.architecture, self.variant))?;
        let tensors = open(&made)?;
        let mut writer = Writer::new();
        writer.set("general.architecture", self.architecture);
        writer.set("tokenizer.ggml.model", "none");
        for (key, value) in &self.metadata {
            writer.set(self.full(key), value.clone());
        }
        for tensor in tensors.tensors() {
            let name = tensor.block().map_or(tensor.name.as_str(), |(_, rest)| rest);
            // Scales are of NVFP4 weights only, but llama.cpp makes them for every matrix.
            if self.without.contains(&name) || name.ends_with(".scale") || name.ends_with(".input_scale") {
                continue;
            }
            let data = Data::Copy { part: tensors.parts()[tensor.part].clone(), offset: tensor.offset };
            writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, data)?;
        }
        let path = folder.join("model.gguf");
        std::fs::write(&path, writer.plan()?.to_bytes()?)?;
        Ok(path)
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn random_model(&self) -> Result<RandomModel> {
        let mut model = RandomModel::new(self.architecture);
        for (key, value) in &self.metadata {
            model = model.set_arch(key, metadata_value(value)?);
        }
        for (part, kind) in &self.weights {
            model = model.weights(part, *kind);
        }
        Ok(model)
    }
}

fn metadata_value(value: &Value) -> Result<MetadataValue> {
    Ok(match value {
        Value::U32(n) => (*n).into(),
        Value::F32(x) => (*x).into(),
        Value::Bool(b) => (*b).into(),
        Value::String(_) => value.as_str().context("not valid UTF-8")?.into(),
        Value::Array(Array::U32(items)) => items.clone().into(),
        Value::Array(Array::I32(items)) => items.clone().into(),
        Value::Array(Array::Bool(items)) => items.clone().into(),
        Value::Array(Array::F32(items)) => items.clone().into(),
        other => bail!("{other:?} has no place in a random model's metadata"),
    })
}
