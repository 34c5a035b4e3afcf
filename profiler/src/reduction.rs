//! Which few blocks stand for a whole model.
//!
//! A call costs something by itself, and then so much for each block of each type. With slices of different sizes these are
//! told apart: one slice more than there are types. Among all slices that llama.cpp can run, those are chosen from whose times
//! the whole model's follows with the least error: errors of measurement grow with what has to be extrapolated, and files that
//! mix quantisations have blocks of one type but of different sizes, of which the slices should hold a fair sample.

use cluster::{BlockKind, Bytes, LayerRange, ModelShape};
use thiserror::Error;

use crate::linear::solve;

/// Blocks of a slice, at most. More add little accuracy.
const LONGEST: u32 = 8;

/// Candidates that are combined, at most: those with the fewest bytes.
const CANDIDATES: usize = 24;

/// Relative error of one measurement, as measured on a shared host.
const NOISE: f64 = 0.02;

/// The model cannot be measured by a part of it.
#[derive(Debug, Error)]
#[error("the model cannot be measured by some of its {n_layer} blocks: {reason}")]
pub struct NotReducible {
    n_layer: u32,
    reason: &'static str,
}

/// The slices that are measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Reduction {
    /// Types of blocks, in the order of their first appearance.
    pub(crate) kinds: Vec<BlockKind>,
    /// Slices without the head, smallest first.
    pub(crate) slices: Vec<LayerRange>,
    /// The smallest slice with the head.
    pub(crate) last: LayerRange,
    /// A slice of the same types without it.
    pub(crate) twin: Option<LayerRange>,
}

#[derive(Debug, Clone)]
struct Candidate {
    range: LayerRange,
    counts: Vec<u32>,
    bytes: u64,
    /// Bytes above those of as many average blocks.
    excess: f64,
}

impl Reduction {
    /// Chooses slices of at most `budget` bytes together, or, if there are none, the smallest.
    pub fn of(shape: &ModelShape, budget: Bytes) -> Result<Self, NotReducible> {
        let fail = |reason| NotReducible { n_layer: shape.n_layer(), reason };
        let kinds = kinds_of(shape);
        let candidates = candidates(shape, &kinds);
        let slices = choose(shape, &kinds, &candidates, budget).ok_or_else(|| {
            fail("no slices that can be cut out tell the cost of a call from that of its blocks")
        })?;
        let last = (0..shape.n_layer())
            .rev()
            .filter_map(|start| LayerRange::new(start, shape.n_layer()).ok())
            .find(|range| shape.check_range(*range).is_ok())
            .ok_or_else(|| fail("no slice holds its head"))?;
        let of_last = candidate(shape, &kinds, last);
        let twins = candidates.iter().filter(|other| other.counts == of_last.counts);
        let twin = twins.min_by_key(|other| other.bytes.abs_diff(of_last.bytes)).map(|other| other.range);
        Ok(Self { kinds, slices, last, twin })
    }

    /// All ranges that have to be cut.
    pub fn ranges(&self) -> Vec<LayerRange> {
        let mut ranges = self.slices.clone();
        for range in self.twin.into_iter().chain([self.last]) {
            if !ranges.contains(&range) {
                ranges.push(range);
            }
        }
        ranges
    }

    /// Blocks of each type in `range`.
    pub(crate) fn counts(&self, shape: &ModelShape, range: LayerRange) -> Vec<f64> {
        candidate(shape, &self.kinds, range).counts.into_iter().map(f64::from).collect()
    }
}

/// Blocks of each type of a whole model, or of a part of it.
pub fn blocks_by_kind(shape: &ModelShape, range: LayerRange) -> Vec<(BlockKind, u32)> {
    let kinds = kinds_of(shape);
    let counts = candidate(shape, &kinds, range).counts;
    kinds.into_iter().zip(counts).filter(|(_, count)| *count > 0).collect()
}

fn kinds_of(shape: &ModelShape) -> Vec<BlockKind> {
    let mut kinds: Vec<BlockKind> = Vec::new();
    for block in &shape.blocks {
        if !kinds.contains(&block.kind) {
            kinds.push(block.kind);
        }
    }
    kinds
}

fn candidate(shape: &ModelShape, kinds: &[BlockKind], range: LayerRange) -> Candidate {
    let blocks = shape.blocks.get(range.start() as usize..range.end() as usize).unwrap_or_default();
    let count = |kind: &BlockKind| blocks.iter().filter(|block| block.kind == *kind).count() as u32;
    let counts: Vec<u32> = kinds.iter().map(count).collect();
    let bytes = shape.block_bytes(range).0;
    let fair: f64 =
        kinds.iter().zip(&counts).map(|(kind, count)| f64::from(*count) * mean_bytes(shape, *kind)).sum();
    Candidate { range, counts, bytes, excess: bytes as f64 - fair }
}

fn mean_bytes(shape: &ModelShape, kind: BlockKind) -> f64 {
    let of_kind = shape.blocks.iter().filter(|block| block.kind == kind);
    let (count, bytes) =
        of_kind.fold((0.0, 0.0), |(n, sum), block| (n + 1.0, sum + block.weight_bytes.0 as f64));
    if count > 0.0 { bytes / count } else { 0.0 }
}

/// Slices without the head; of those with equally many blocks of each type the fairest sample.
fn candidates(shape: &ModelShape, kinds: &[BlockKind]) -> Vec<Candidate> {
    let mut best: Vec<Candidate> = Vec::new();
    for start in 0..shape.n_layer().saturating_sub(1) {
        for end in start + 1..(start + LONGEST + 1).min(shape.n_layer()) {
            let Ok(range) = LayerRange::new(start, end) else { continue };
            if shape.check_range(range).is_err() {
                continue;
            }
            let new = candidate(shape, kinds, range);
            match best.iter_mut().find(|old| old.counts == new.counts) {
                Some(old) if new.excess.abs() < old.excess.abs() => *old = new,
                Some(_) => {}
                None => best.push(new),
            }
        }
    }
    best.sort_by_key(|candidate| candidate.bytes);
    best
}

/// The best combination within the budget, else the smallest.
fn choose(
    shape: &ModelShape,
    kinds: &[BlockKind],
    candidates: &[Candidate],
    budget: Bytes,
) -> Option<Vec<LayerRange>> {
    let whole: Vec<f64> = std::iter::once(1.0)
        .chain(kinds.iter().map(|kind| shape.blocks.iter().filter(|b| b.kind == *kind).count() as f64))
        .collect();
    let pool = &candidates[..candidates.len().min(CANDIDATES)];
    let mut best: Option<(bool, f64, Vec<usize>)> = None;
    combinations(pool.len(), kinds.len() + 1, &mut |chosen| {
        let slices: Vec<&Candidate> = chosen.iter().map(|i| &pool[*i]).collect();
        let Some(error) = expected_error(&slices, &whole, shape) else { return };
        let bytes: u64 = slices.iter().map(|slice| slice.bytes).sum();
        let is_over = bytes > budget.0;
        let rank = if is_over { bytes as f64 } else { error };
        if best.as_ref().is_none_or(|(over, least, _)| (is_over, rank) < (*over, *least)) {
            best = Some((is_over, rank, chosen.to_vec()));
        }
    });
    best.map(|(_, _, chosen)| chosen.into_iter().map(|i| pool[i].range).collect())
}

/// Relative error of the whole model's time, as it follows from the slices' times; none where it does not follow.
fn expected_error(slices: &[&Candidate], whole: &[f64], shape: &ModelShape) -> Option<f64> {
    let n = whole.len();
    let entry = |slice: &Candidate, i: usize| if i == 0 { 1.0 } else { f64::from(slice.counts[i - 1]) };
    let transposed = (0..n).map(|i| slices.iter().map(|slice| entry(slice, i)).collect()).collect();
    // The whole's time is the sum of the slices' times with these weights.
    let weights = solve(transposed, whole.to_vec())?;
    let length = |slice: &Candidate| 1.0 + f64::from(slice.range.len());
    let variance: f64 = slices.iter().zip(&weights).map(|(slice, w)| (w * length(slice)).powi(2)).sum();
    let excess: f64 = slices.iter().zip(&weights).map(|(slice, w)| w * slice.excess).sum();
    let total: u64 = shape.blocks.iter().map(|block| block.weight_bytes.0).sum();
    let blocks = 1.0 + f64::from(shape.n_layer());
    Some(NOISE * variance.sqrt() / blocks + (excess / (total as f64).max(1.0)).abs())
}

/// Calls `each` with every rising choice of `k` numbers below `n`.
fn combinations(n: usize, k: usize, each: &mut dyn FnMut(&[usize])) {
    fn extend(n: usize, k: usize, chosen: &mut Vec<usize>, each: &mut dyn FnMut(&[usize])) {
        if chosen.len() == k {
            return each(chosen);
        }
        let first = chosen.last().map_or(0, |last| last + 1);
        for next in first..n {
            chosen.push(next);
            extend(n, k, chosen, each);
            chosen.pop();
        }
    }
    extend(n, k, &mut Vec::with_capacity(k), each);
}

#[cfg(test)]
mod tests {
    use cluster::{Attention, BlockShape, FeedForward, RangeRule};

    use super::*;

    /// A model whose blocks are given by letters: F(ull), S(liding), R(ecurrent), each of so many MiB.
    fn model(blocks: &[(char, u64)], range_rules: Vec<RangeRule>) -> ModelShape {
        let block = |&(letter, mib): &(char, u64)| BlockShape {
            kind: BlockKind {
                attention: match letter {
                    'S' => Attention::SlidingWindow { window: 512 },
                    'R' => Attention::Recurrent,
                    _ => Attention::Full,
                },
                feed_forward: FeedForward::Dense,
            },
            weight_bytes: Bytes::from_mib(mib),
            kv_elements_per_token: 512,
            state_bytes_per_slot: Bytes::ZERO,
        };
        ModelShape {
            architecture: "llama".to_owned(),
            name: None,
            n_embd: 64,
            n_vocab: 64,
            n_ctx_train: 4096,
            n_head: vec![1; blocks.len()],
            n_head_kv: vec![1; blocks.len()],
            blocks: blocks.iter().map(block).collect(),
            embedding_bytes: Bytes::ZERO,
            head_bytes: Bytes::ZERO,
            tied: false,
            global_bytes: Bytes::ZERO,
            experts: None,
            range_rules,
        }
    }

    fn lengths(reduction: &Reduction) -> Vec<u32> {
        reduction.slices.iter().map(|range| range.len()).collect()
    }

    #[test]
    fn a_model_of_equal_blocks_is_one_block_and_as_many_as_there_is_room_for() {
        let shape = model(&[('F', 10); 24], Vec::new());
        let tight = Reduction::of(&shape, Bytes::from_mib(1)).unwrap();
        assert_eq!(lengths(&tight), [1, 2], "the least that tells a call from its blocks");
        let wide = Reduction::of(&shape, Bytes::from_mib(50)).unwrap();
        assert_eq!(lengths(&wide), [1, 4]);
        assert_eq!((wide.last.start(), wide.twin.unwrap().len()), (23, 1));
        assert_eq!(wide.ranges().len(), 3);
    }

    #[test]
    fn blocks_of_mixed_quantisation_are_sampled_fairly() {
        let blocks: Vec<(char, u64)> = (0..24).map(|i| ('F', if i % 2 == 0 { 12 } else { 8 })).collect();
        let reduction = Reduction::of(&model(&blocks, Vec::new()), Bytes::from_mib(80)).unwrap();
        assert_eq!(lengths(&reduction), [2, 6], "as many large blocks as small ones");
    }

    #[test]
    fn hybrid_models_are_measured_by_slices_with_both_kinds() {
        let blocks: Vec<(char, u64)> = (0..16).map(|i| (if i % 4 == 3 { 'F' } else { 'R' }, 10)).collect();
        let shape = model(&blocks, vec![RangeRule::BothMemories]);
        let reduction = Reduction::of(&shape, Bytes::from_mib(100)).unwrap();
        assert_eq!((reduction.kinds.len(), reduction.slices.len()), (2, 3));
        assert!(reduction.slices.iter().all(|range| shape.check_range(*range).is_ok()));
        let rows: Vec<Vec<f64>> = reduction
            .slices
            .iter()
            .map(|range| [vec![1.0], reduction.counts(&shape, *range)].concat())
            .collect();
        assert!(solve(rows, vec![1.0; 3]).is_some(), "call and both types are told apart");
        assert_eq!(reduction.last.len(), 2);
    }

    #[test]
    fn sliding_and_full_attention_are_two_types() {
        let blocks: Vec<(char, u64)> = (0..18).map(|i| (if i % 6 == 5 { 'F' } else { 'S' }, 4)).collect();
        let shape = model(&blocks, Vec::new());
        let reduction = Reduction::of(&shape, Bytes::from_mib(30)).unwrap();
        assert_eq!(reduction.slices.len(), 3);
        assert_eq!(blocks_by_kind(&shape, LayerRange::new(0, 18).unwrap())[1].1, 3);
    }

    #[test]
    fn a_model_that_runs_only_as_a_whole_is_refused() {
        let shape = model(&[('F', 1); 4], vec![RangeRule::WholeOnly]);
        assert!(Reduction::of(&shape, Bytes::from_mib(8)).unwrap_err().to_string().contains("4 blocks"));
        assert!(Reduction::of(&model(&[('F', 1)], Vec::new()), Bytes::from_mib(8)).is_err());
    }
}
