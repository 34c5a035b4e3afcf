//! The experiment: slices loaded, rows recorded, rounds of replays, and what they come to.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cluster::{Bytes, LayerRange, Millis, ModelShape};
use llama::{ContextParams, EmbeddingTable, Model, ModelParams, Output, SliceContext};
use node::{ModelFile, StoredFile, StoredSlices};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::replay::{Pass, Replayer, SETTLING};
use super::{Gaps, HiddenRows, IdleGapError, PROMPT, Point, text_tokens};
use crate::statistics::{Quartiles, median};

/// Rounds whose zero-gap times are one baseline: neighbours in time, since the host's speed drifts.
const SMOOTHED_OVER: usize = 3;

/// Told before each replay how many of how many are done; `Break` stops.
pub type Observer<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// How slices are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// CPU threads.
    pub threads: u32,
    /// Blocks of each slice on GPUs.
    pub gpu_layers: u32,
    /// Tokens of one replay.
    pub tokens: u32,
}

/// The slices of a model that an experiment at `cuts` needs: what lies between the cuts, to record rows with, and then
/// for each cut everything after it.
pub fn slices_for(cuts: &[u32], n_layer: u32) -> Result<Vec<LayerRange>, IdleGapError> {
    let refuse = || IdleGapError::Cuts { cuts: cuts.to_vec(), n_layer };
    let between = LayerRange::from_cuts(cuts, n_layer).map_err(|_| refuse())?;
    let suffixes = cuts.iter().map(|&cut| LayerRange::new(cut, n_layer).map_err(|_| refuse()));
    let suffixes = suffixes.collect::<Result<Vec<_>, _>>()?;
    if suffixes.is_empty() {
        return Err(refuse());
    }
    Ok(between.into_iter().take(cuts.len()).chain(suffixes).collect())
}

/// Loaded slices and the rows to replay into them.
pub struct Experiment {
    suffixes: Vec<Suffix>,
    tokens: u32,
}

struct Suffix {
    cut: u32,
    context: SliceContext,
    rows: HiddenRows,
}

impl Experiment {
    /// Records rows at `cuts` and loads the slices after them. `stored` holds the slices that [`slices_for`] named.
    pub fn load(
        model: &ModelFile,
        stored: &StoredSlices,
        cuts: &[u32],
        setup: Setup,
    ) -> Result<Self, IdleGapError> {
        let n_rows = rows_needed(model.shape(), setup.tokens)?;
        let (between, suffixes) = stored.slices.split_at(cuts.len().min(stored.slices.len()));
        check_memory(suffixes.iter().map(|file| file.bytes).sum(), node::available_memory())?;
        let mut embedding = EmbeddingTable::open(&stored.embedding.path)?;
        let mut rows = HiddenRows::embedded(&mut embedding, &text_tokens(model.path(), n_rows)?)?;
        let mut loaded = Vec::with_capacity(cuts.len());
        for (&cut, (before, after)) in cuts.iter().zip(between.iter().zip(suffixes)) {
            rows = rows.through(&before.path, setup.threads)?;
            loaded.push(Suffix { cut, context: context(after, n_rows, setup)?, rows: rows.clone() });
        }
        Ok(Self { suffixes: loaded, tokens: setup.tokens })
    }

    /// Measures every cut with every gap, `repeat` times.
    pub fn run(
        &mut self,
        gaps: &Gaps,
        repeat: u32,
        observer: &mut Observer<'_>,
    ) -> Result<Vec<Point>, IdleGapError> {
        let replays = self.suffixes.iter_mut().map(|suffix| Replay {
            cut: suffix.cut,
            context: &mut suffix.context,
            rows: &suffix.rows,
        });
        let rounds = Rounds { gaps, tokens: self.tokens, repeat, budget: Duration::MAX };
        rounds.run(&mut replays.collect::<Vec<_>>(), observer)
    }
}

/// Rows of a replay, if the model takes as many.
fn rows_needed(shape: &ModelShape, tokens: u32) -> Result<u32, IdleGapError> {
    let needed = tokens.saturating_add(PROMPT + SETTLING);
    let n_ctx = shape.n_ctx_train;
    if needed <= n_ctx { Ok(needed) } else { Err(IdleGapError::Context { tokens, needed, n_ctx }) }
}

/// Slices that do not all stay in memory would be read from disk after a gap, and not because of it.
fn check_memory(needed: Bytes, available: Bytes) -> Result<(), IdleGapError> {
    if needed <= available { Ok(()) } else { Err(IdleGapError::Memory { needed, available }) }
}

fn context(slice: &StoredFile, n_ctx: u32, setup: Setup) -> Result<SliceContext, IdleGapError> {
    let params = ModelParams { gpu_layers: setup.gpu_layers, ..ModelParams::default() };
    let model = Model::load(&slice.path, params)?;
    let params = ContextParams {
        n_batch: PROMPT,
        n_ubatch: PROMPT,
        threads: setup.threads,
        threads_batch: setup.threads,
        ..ContextParams::new(Output::Logits, 1, n_ctx)
    };
    Ok(SliceContext::new(&model, &params)?)
}

/// A slice and what is replayed into it.
pub(super) struct Replay<'a> {
    pub(super) cut: u32,
    pub(super) context: &'a mut SliceContext,
    pub(super) rows: &'a HiddenRows,
}

/// How often what is replayed.
pub(super) struct Rounds<'a> {
    pub(super) gaps: &'a Gaps,
    pub(super) tokens: u32,
    pub(super) repeat: u32,
    /// After this time no further round begins, once there are enough for a baseline.
    pub(super) budget: Duration,
}

impl Rounds<'_> {
    /// Runs one round to warm up, and the others to measure.
    pub(super) fn run(
        &self,
        replays: &mut [Replay<'_>],
        observer: &mut Observer<'_>,
    ) -> Result<Vec<Point>, IdleGapError> {
        // Of each slice, one replay without a gap for the baseline, and then one for each gap.
        let gaps: Vec<Millis> = std::iter::once(Millis(0.0)).chain(self.gaps.all().iter().copied()).collect();
        let mut turns: Vec<(usize, usize)> =
            (0..replays.len()).flat_map(|slice| (0..gaps.len()).map(move |gap| (slice, gap))).collect();
        let mut passes = vec![vec![Vec::new(); gaps.len()]; replays.len()];
        let total = u64::from(self.repeat + 1) * turns.len() as u64;
        let mut done = 0;
        let (mut replayer, mut random) = (Replayer::default(), StdRng::seed_from_u64(1));
        let started = Instant::now();
        for round in 0..=self.repeat {
            if round as usize > SMOOTHED_OVER && started.elapsed() > self.budget {
                break;
            }
            turns.shuffle(&mut random);
            for &(slice, gap) in &turns {
                if observer(done, total).is_break() {
                    return Err(IdleGapError::Stopped);
                }
                let Replay { context, rows, .. } = &mut replays[slice];
                let pass = replayer.pass(context, rows, gaps[gap], self.tokens)?;
                if round > 0 {
                    passes[slice][gap].push(pass);
                }
                done += 1;
            }
        }
        replays.iter_mut().for_each(|replay| replay.context.clear());
        let of_slice = replays.iter().zip(&passes);
        Ok(of_slice.flat_map(|(replay, passes)| points(replay.cut, self.gaps, passes)).collect())
    }
}

/// What the passes of one slice come to. The first entry of `passes` is the baseline's, the others are the gaps'.
fn points(cut: u32, gaps: &Gaps, passes: &[Vec<Pass>]) -> Vec<Point> {
    let Some((without, with)) = passes.split_first() else { return Vec::new() };
    let calls: Vec<f64> = without.iter().map(|pass| pass.gap.0 + pass.call.0).collect();
    let baseline = smoothed(&calls);
    let point = |(&gap, passes): (&Millis, &Vec<Pass>)| {
        let column = |of: fn(&Pass) -> f64| passes.iter().map(of).collect::<Vec<f64>>();
        let per_token = column(|pass| pass.gap.0 + pass.call.0);
        // L − d is the time of the call.
        let extra: Vec<f64> =
            passes.iter().zip(&baseline).map(|(pass, baseline)| pass.call.0 - baseline).collect();
        Point {
            cut,
            gap,
            actual_gap: Millis(median(&column(|pass| pass.gap.0))),
            per_token: Quartiles::of(&per_token),
            extra: Quartiles::of(&extra),
        }
    };
    gaps.all().iter().zip(with).map(point).collect()
}

/// Each value replaced by the median of itself and its neighbours.
fn smoothed(values: &[f64]) -> Vec<f64> {
    let half = SMOOTHED_OVER / 2;
    let around = |i: usize| &values[i.saturating_sub(half)..(i + half + 1).min(values.len())];
    (0..values.len()).map(|i| median(around(i))).collect()
}

#[cfg(test)]
mod tests {

    use super::*;

    fn pass(gap: f64, call: f64) -> Pass {
        Pass { gap: Millis(gap), call: Millis(call) }
    }

    #[test]
    fn an_experiment_needs_what_is_between_the_cuts_and_what_is_after_each() {
        let names = |cuts: &[u32]| {
            let ranges = slices_for(cuts, 30).unwrap();
            ranges.iter().map(|range| (range.start(), range.end())).collect::<Vec<_>>()
        };
        assert_eq!(names(&[5, 15]), [(0, 5), (5, 15), (5, 30), (15, 30)]);
        assert_eq!(names(&[29]), [(0, 29), (29, 30)]);
        for bad in [&[][..], &[0], &[30], &[5, 5], &[9, 4]] {
            assert!(matches!(slices_for(bad, 30), Err(IdleGapError::Cuts { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_gap_costs_what_its_calls_take_longer_than_those_without() {
        let gaps = Gaps::new(&[Millis(5.0)]).unwrap();
        let without = vec![pass(0.0, 2.0), pass(0.0, 2.2), pass(0.0, 2.1)];
        let control = vec![pass(0.0, 2.1); 3];
        let with = vec![pass(5.1, 3.1), pass(4.9, 3.1), pass(5.2, 3.1)];
        let points = points(7, &gaps, &[without, control, with]);
        assert_eq!(points.len(), 2);
        assert_eq!((points[0].cut, points[0].gap), (7, Millis(0.0)));
        assert!(points[0].extra.median.abs() < 1e-9);
        assert_eq!((points[1].gap, points[1].actual_gap), (Millis(5.0), Millis(5.1)));
        assert!((points[1].extra.median - 1.0).abs() < 1e-9, "{:?}", points[1].extra);
        assert!((points[1].per_token.median - 8.2).abs() < 1e-9, "{:?}", points[1].per_token);
    }

    #[test]
    fn the_baseline_follows_drift_but_not_outliers() {
        assert_eq!(smoothed(&[1.0, 9.0, 2.0, 3.0, 3.0]), [5.0, 2.0, 3.0, 3.0, 3.0]);
        assert_eq!(smoothed(&[4.0]), [4.0]);
    }

    #[test]
    fn slices_that_do_not_fit_are_refused_with_both_numbers() {
        let needed = Bytes::from_mib(6);
        check_memory(needed, needed).unwrap();
        let refused = check_memory(needed, Bytes::from_mib(5)).unwrap_err().to_string();
        assert!(refused.contains("6.0 MiB") && refused.contains("5.0 MiB"), "{refused}");
    }
}
