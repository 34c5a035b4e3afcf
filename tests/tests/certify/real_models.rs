//! Real models, where `scripts/fetch-models.sh` has put them.

use anyhow::Result;
use cluster::LayerRange;
use tests::models::{SMOLLM2, model_path};

use crate::comparison::compare;
use crate::cutting::open;

/// Compares the whole model with its slices between each of `cuts`.
fn certify(file_name: &str, cuts: &[&[u32]]) -> Result<()> {
    let path = model_path(file_name)?;
    let model = open(&path)?;
    let n_layer = gguf::model_shape(&model)?.n_layer();
    let splits: Result<Vec<_>, _> = cuts.iter().map(|cuts| LayerRange::from_cuts(cuts, n_layer)).collect();
    compare(&path, &model, &splits?)
}

#[test]
fn smollm2_cut_in_three_is_the_whole() -> Result<()> {
    certify(SMOLLM2, &[&[10, 20]])
}

#[test]
fn smollm2_cut_after_every_block_is_the_whole() -> Result<()> {
    let every: Vec<u32> = (1..30).collect();
    certify(SMOLLM2, &[&every])
}

/// The optional models are large: their tests pass, and say so, where they are not there.
macro_rules! optional {
    ($($test:ident: $file_name:literal, $cuts:expr;)*) => {
        $(#[test]
        fn $test() -> Result<()> {
            if let Err(error) = model_path($file_name) {
                eprintln!("not tested: {error}");
                return Ok(());
            }
            certify($file_name, $cuts)
        })*
    };
}

optional! {
    qwen2_5_coder_cut_in_three_is_the_whole: "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf", &[&[8, 16]];
    gemma_3_cut_in_three_is_the_whole: "Gemma-3-270M-Q4_K_M.gguf", &[&[5, 11]];
}
