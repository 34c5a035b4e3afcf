//! Idle gaps measured on a small random model: how many numbers come out and of what kind, not how large they are.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
#![forbid(unsafe_code)]

use std::ops::ControlFlow;
use std::path::Path;

use cluster::{LayerRange, Millis, ModelHash};
use gguf::cut::{CutOptions, Uncertified};
use llama::testing::{RandomModel, WeightType};
use llama::{ContextParams, EmbeddingTable, Model, ModelParams, Output, SliceContext};
use node::{CutRequest, Existing, ModelFile, SliceFolder, StoredSlices};
use profiler::idle_gap::{
    COLD_CALL_ROWS, Experiment, Gaps, HiddenRows, IdleGapError, Setup, cold_call, slices_for, svg,
    text_tokens,
};

fn model(folder: &Path) -> ModelFile {
    let path = folder.join("model.gguf");
    let model = RandomModel::new("llama")
        .weights("", WeightType::Q4_1)
        .set_arch("vocab_size", 128_u32)
        .set_arch("context_length", 128_u32)
        .set_arch("embedding_length", 64_u32)
        .set_arch("block_count", 4_u32)
        .set_arch("feed_forward_length", 128_u32)
        .set_arch("attention.head_count", 4_u32)
        .set_arch("attention.head_count_kv", 2_u32)
        .set_arch("attention.layer_norm_rms_epsilon", 1e-5_f32)
        .set_arch("rope.freq_base", 10000.0_f32);
    model.save(&path).unwrap();
    ModelFile::open(&path).unwrap()
}

fn slices(model: &ModelFile, ranges: &[LayerRange], folder: &Path) -> StoredSlices {
    let options = CutOptions { uncertified: Uncertified::Refuse };
    let request = CutRequest { model, hash: ModelHash([7; 32]), ranges, options };
    let folder = SliceFolder::new(folder.join("slices"), Existing::Replace);
    folder.ensure(&request, &mut |_| ControlFlow::Continue(())).unwrap()
}

const SETUP: Setup = Setup { threads: 1, gpu_layers: 0, tokens: 3 };

#[test]
fn every_cut_is_measured_with_every_gap() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let cuts = [1, 3];
    let stored = slices(&model, &slices_for(&cuts, 4).unwrap(), folder.path());
    let mut experiment = Experiment::load(&model, &stored, &cuts, SETUP).unwrap();
    let gaps = Gaps::new(&[Millis(2.0), Millis(0.5)]).unwrap();
    let mut replays = Vec::new();
    let observer = &mut |done, total| {
        replays.push((done, total));
        ControlFlow::Continue(())
    };
    let points = experiment.run(&gaps, 4, observer).unwrap();

    // A baseline and three gaps of two cuts, over four rounds and one to warm up.
    assert_eq!(replays, (0..40).map(|done| (done, 40)).collect::<Vec<_>>());
    let which: Vec<(u32, f64)> = points.iter().map(|point| (point.cut, point.gap.0)).collect();
    assert_eq!(which, [(1, 0.0), (1, 0.5), (1, 2.0), (3, 0.0), (3, 0.5), (3, 2.0)]);
    for point in &points {
        assert!(point.actual_gap.0 >= 0.5 * point.gap.0, "{point:?}");
        assert!(point.per_token.median > point.actual_gap.0, "{point:?}");
        assert!(point.per_token.lower <= point.per_token.median, "{point:?}");
        assert!(
            point.extra.lower <= point.extra.median && point.extra.median <= point.extra.upper,
            "{point:?}"
        );
    }
    assert!(svg(&points, "test").contains("cut 3"));
}

#[test]
fn a_measurement_can_be_stopped_and_begun_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let stored = slices(&model, &slices_for(&[2], 4).unwrap(), folder.path());
    let mut experiment = Experiment::load(&model, &stored, &[2], SETUP).unwrap();
    let gaps = Gaps::new(&[Millis(0.1)]).unwrap();
    let stopped = experiment.run(&gaps, 3, &mut |done, _| {
        if done == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(IdleGapError::Stopped)));
    assert_eq!(experiment.run(&gaps, 3, &mut |_, _| ControlFlow::Continue(())).unwrap().len(), 2);
}

#[test]
fn more_tokens_than_the_models_context_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let stored = slices(&model, &slices_for(&[2], 4).unwrap(), folder.path());
    let refused = Experiment::load(&model, &stored, &[2], Setup { tokens: 95, ..SETUP }).err().unwrap();
    assert!(matches!(refused, IdleGapError::Context { tokens: 95, needed: 129, n_ctx: 128 }), "{refused}");
}

#[test]
fn a_cold_call_correction_comes_from_one_block() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let stored = slices(&model, &[LayerRange::new(1, 2).unwrap()], folder.path());
    let block = Model::load(&stored.slices[0].path, ModelParams::default()).unwrap();
    let params = ContextParams {
        threads: 1,
        threads_batch: 1,
        ..ContextParams::new(Output::Hidden, 1, COLD_CALL_ROWS)
    };
    let mut context = SliceContext::new(&block, &params).unwrap();
    let mut table = EmbeddingTable::open(&stored.embedding.path).unwrap();
    let rows = HiddenRows::embedded(&mut table, &text_tokens(model.path(), COLD_CALL_ROWS).unwrap()).unwrap();

    let cold = cold_call(&mut context, &rows, &mut || ControlFlow::Continue(())).unwrap();
    assert!(!cold.gaps().is_empty() && cold.gaps().len() <= 4, "{cold:?}");
    assert!(cold.extra().windows(2).all(|pair| pair[0].0 <= pair[1].0), "{cold:?}");
    assert_eq!(context.next_position(0), 0);
    assert!(cold_call(&mut context, &rows, &mut || ControlFlow::Break(())).is_err());
    let few = HiddenRows::new(64, vec![0.0; 64]).unwrap();
    let refused = cold_call(&mut context, &few, &mut || ControlFlow::Continue(())).err().unwrap();
    assert!(matches!(refused, IdleGapError::Rows { .. }), "{refused}");
}
