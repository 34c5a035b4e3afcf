//! One test per certified architecture.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use cluster::LayerRange;
use gguf::architectures::{Support, TABLE};
use gguf::write::{Data, Writer};
use gguf::{Array, Value};

use crate::comparison::{Chain, compare, transcript_of_whole};
use crate::conversation::converse;
use crate::cutting::{SliceFolder, open, splits_at_every_boundary};
use crate::recipes::recipes;

/// Makes the tests, and [`TESTED`] of their architectures.
macro_rules! certify {
    ($($test:ident: $architecture:literal,)*) => {
        mod slices_compute_what_the_whole_does {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::certify($architecture)
            })*
        }

        const TESTED: &[&str] = &[$($architecture),*];
    };
}

certify! {
    llama: "llama",
    qwen2: "qwen2",
    qwen3: "qwen3",
    qwen3moe: "qwen3moe",
    gpt_oss: "gpt-oss",
    gemma2: "gemma2",
    gemma3: "gemma3",
    phi3: "phi3",
    gpt2: "gpt2",
    smollm3: "smollm3",
    granite: "granite",
    olmo2: "olmo2",
    mistral3: "mistral3",
    deepseek2: "deepseek2",
    glm4moe: "glm4moe",
    qwen35: "qwen35",
    qwen3next: "qwen3next",
    arcee: "arcee",
    cohere2: "cohere2",
    command_r: "command-r",
    ernie4_5: "ernie4_5",
    exaone4: "exaone4",
    falcon: "falcon",
    gemma: "gemma",
    granitemoe: "granitemoe",
    hunyuan_dense: "hunyuan-dense",
    internlm2: "internlm2",
    minicpm: "minicpm",
    mpt: "mpt",
    nemotron: "nemotron",
    phi2: "phi2",
    phimoe: "phimoe",
    qwen2moe: "qwen2moe",
    qwen2vl: "qwen2vl",
    qwen35moe: "qwen35moe",
    seed_oss: "seed_oss",
    stablelm: "stablelm",
    starcoder2: "starcoder2",
}

/// Builds every recipe of an architecture, cuts it at every boundary, and compares.
fn certify(architecture: &'static str) -> Result<()> {
    let recipes = recipes(architecture);
    ensure!(!recipes.is_empty(), "no random model of {architecture} is described");
    for recipe in recipes {
        let folder = tempfile::tempdir()?;
        let path = recipe.build(folder.path())?;
        let model = open(&path)?;
        let splits = splits_at_every_boundary(&gguf::model_shape(&model)?);
        ensure!(splits.iter().any(|ranges| ranges.len() > 1), "{architecture} is not cut at all");
        compare(&path, &model, &splits).with_context(|| format!("{architecture} {}", recipe.variant))?;
    }
    Ok(())
}

#[test]
fn every_certified_architecture_is_tested_and_no_other_is() {
    let certified = TABLE.iter().filter(|row| row.support == Support::Certified).map(|row| row.name);
    let (mut certified, mut tested): (Vec<_>, Vec<_>) = (certified.collect(), TESTED.to_vec());
    certified.sort_unstable();
    tested.sort_unstable();
    assert_eq!(certified, tested);
}

/// Changes one value of a slice, and converses with the chain that has it.
fn with_a_changed_slice(architecture: &'static str, key: &str, value: Option<Value>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = recipes(architecture)[0].build(folder.path())?;
    let model = open(&path)?;
    let whole = transcript_of_whole(&path)?;
    let files = SliceFolder { model: &model, folder: folder.path() };
    let ranges = LayerRange::from_cuts(&[3], gguf::model_shape(&model)?.n_layer())?;
    let mut untouched = Chain::load(&files, &ranges)?;
    whole.check_equals(&converse(&mut untouched, 512)?)?;
    rewrite(&files.slice(ranges[1])?, key, value)?;
    whole.check_equals(&converse(&mut Chain::load(&files, &ranges)?, 512)?)
}

fn rewrite(path: &Path, key: &str, value: Option<Value>) -> Result<()> {
    let slice = open(path)?;
    ensure!(slice.get(key).is_some(), "the slice does not state {key}");
    let mut writer = Writer::new();
    for (other, stated) in slice.metadata() {
        match &value {
            Some(value) if other == key => writer.set(key, value.clone()),
            None if other == key => {}
            _ => writer.set(other, stated.clone()),
        }
    }
    for tensor in slice.tensors() {
        let data = Data::Copy { part: slice.parts()[tensor.part].clone(), offset: tensor.offset };
        writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, data)?;
    }
    let bytes = writer.plan()?.to_bytes()?;
    std::fs::remove_file(path)?;
    Ok(std::fs::write(path, bytes)?)
}

#[test]
fn a_wrong_slice_is_noticed() {
    let cases = [
        ("gemma3", "gemma3.attention.sliding_window_pattern", None),
        ("gpt-oss", "gpt-oss.attention.sliding_window_pattern", None),
        ("granite", "granite.embedding_scale", Some(Value::F32(12.0))),
        ("gemma2", "shoal.slice.input_node", None),
        ("minicpm", "minicpm.residual_scale", None),
        ("glm4moe", "glm4moe.rope.dimension_sections", Some(Array::I32(vec![8, 8, 8, 8]).into())),
    ];
    for (architecture, key, value) in cases {
        let error = with_a_changed_slice(architecture, key, value).unwrap_err().to_string();
        assert!(error.contains("differ"), "{architecture}: {error}");
    }
}
