//! Contiguous ranges of blocks, and how a model is shared out evenly.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Bytes;

/// Blocks `[start, end)` of a model; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LayerRange {
    start: u32,
    end: u32,
}

/// Why a cut of a model is not one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayerRangeError {
    /// `start >= end`.
    #[error("layer range {start}..{end} is empty or reversed")]
    Empty {
        /// First block asked for.
        start: u32,
        /// One past the last block asked for.
        end: u32,
    },
    /// A cut point that is not strictly between its neighbours.
    #[error("cut {cut} is out of order or range: cuts must rise strictly between 0 and {n_layer}")]
    BadCut {
        /// The offending cut.
        cut: u32,
        /// Number of blocks of the model.
        n_layer: u32,
    },
    /// More stages than blocks, or none.
    #[error("{stages} stages asked of a model with {n_layer} blocks: each stage needs at least one block")]
    TooManyStages {
        /// Stages asked for.
        stages: u32,
        /// Number of blocks of the model.
        n_layer: u32,
    },
    /// No split of the blocks into so many ranges has only ranges that can be slices.
    #[error(
        "the model's {n_layer} blocks cannot be split into {stages} stages that llama.cpp can each run: ask for \
         another number of stages"
    )]
    NoSplit {
        /// Stages asked for.
        stages: u32,
        /// Number of blocks of the model.
        n_layer: u32,
    },
}

impl LayerRange {
    /// Blocks `[start, end)`.
    pub const fn new(start: u32, end: u32) -> Result<Self, LayerRangeError> {
        if start < end { Ok(Self { start, end }) } else { Err(LayerRangeError::Empty { start, end }) }
    }

    /// First block.
    pub const fn start(self) -> u32 {
        self.start
    }

    /// One past the last block.
    pub const fn end(self) -> u32 {
        self.end
    }

    /// Number of blocks, at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub const fn len(self) -> u32 {
        self.end - self.start
    }

    /// Whether block `layer` lies in this range.
    pub const fn contains(self, layer: u32) -> bool {
        self.start <= layer && layer < self.end
    }

    /// The ranges between `cuts`, which must rise strictly between 0 and `n_layer`.
    pub fn from_cuts(cuts: &[u32], n_layer: u32) -> Result<Vec<Self>, LayerRangeError> {
        let mut ranges = Vec::with_capacity(cuts.len() + 1);
        let mut start = 0;
        for &cut in cuts {
            if cut <= start || cut >= n_layer {
                return Err(LayerRangeError::BadCut { cut, n_layer });
            }
            ranges.push(Self { start, end: cut });
            start = cut;
        }
        ranges.push(Self::new(start, n_layer)?);
        Ok(ranges)
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// Splits blocks of the given sizes into `stages` contiguous ranges, each of which `allowed` accepts, whose largest
/// total is as small as possible.
///
/// `head` is added to the last stage. Exact, by dynamic programming in `O(stages · blocks²)`; ties go to the
/// split whose earlier stages are larger, so that the master, which also samples, has the least to hold.
pub fn split_by_bytes(
    blocks: &[Bytes],
    head: Bytes,
    stages: u32,
    allowed: &dyn Fn(LayerRange) -> bool,
) -> Result<Vec<LayerRange>, LayerRangeError> {
    let n = blocks.len();
    let k = stages as usize;
    if k == 0 || k > n {
        return Err(LayerRangeError::TooManyStages { stages, n_layer: n as u32 });
    }
    let mut prefix = vec![0_u64; n + 1];
    for (i, block) in blocks.iter().enumerate() {
        prefix[i + 1] = prefix[i].saturating_add(block.0);
    }
    // best[s][e]: the smallest possible largest stage when the first `s` stages hold blocks `[0, e)`.
    let mut best = vec![vec![u64::MAX; n + 1]; k + 1];
    let mut from = vec![vec![0_usize; n + 1]; k + 1];
    best[0][0] = 0;
    for s in 1..=k {
        let extra = if s == k { head.0 } else { 0 };
        for end in s..=n {
            for start in (s - 1)..end {
                let range = LayerRange { start: start as u32, end: end as u32 };
                if best[s - 1][start] == u64::MAX || !allowed(range) {
                    continue;
                }
                let load = (prefix[end] - prefix[start]).saturating_add(extra);
                let largest = best[s - 1][start].max(load);
                if largest <= best[s][end] {
                    best[s][end] = largest;
                    from[s][end] = start;
                }
            }
        }
    }
    if best[k][n] == u64::MAX {
        return Err(LayerRangeError::NoSplit { stages, n_layer: n as u32 });
    }
    let mut ranges = Vec::with_capacity(k);
    let mut end = n;
    for s in (1..=k).rev() {
        let start = from[s][end];
        ranges.push(LayerRange { start: start as u32, end: end as u32 });
        end = start;
    }
    ranges.reverse();
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(of: &[u64]) -> Vec<Bytes> {
        of.iter().copied().map(Bytes).collect()
    }

    #[test]
    fn cuts_out_of_order_or_range_are_refused() {
        for cuts in [&[0][..], &[10], &[12], &[4, 4], &[5, 3]] {
            assert!(LayerRange::from_cuts(cuts, 10).is_err(), "{cuts:?}");
        }
        let ranges = LayerRange::from_cuts(&[3, 7], 10).unwrap();
        assert_eq!(ranges.iter().map(ToString::to_string).collect::<Vec<_>>(), ["0..3", "3..7", "7..10"]);
    }

    #[test]
    fn equal_blocks_are_split_evenly_and_the_head_lightens_the_master() {
        let ranges = split_by_bytes(&sizes(&[10; 30]), Bytes(80), 3, &|_| true).unwrap();
        let lengths: Vec<u32> = ranges.iter().map(|r| r.len()).collect();
        assert_eq!(lengths.iter().sum::<u32>(), 30);
        assert!(lengths[2] < lengths[0], "{lengths:?}");
        assert!(lengths[0].abs_diff(lengths[1]) <= 1, "{lengths:?}");
    }

    #[test]
    fn a_stage_without_a_block_is_refused() {
        assert!(split_by_bytes(&sizes(&[1, 1]), Bytes(0), 3, &|_| true).is_err());
        assert!(split_by_bytes(&sizes(&[1, 1]), Bytes(0), 0, &|_| true).is_err());
    }

    #[test]
    fn a_split_uses_only_allowed_ranges() {
        let blocks = sizes(&[10; 12]);
        let multiple_of_4 = |range: LayerRange| range.start().is_multiple_of(4);
        let ranges = split_by_bytes(&blocks, Bytes(0), 3, &multiple_of_4).unwrap();
        assert_eq!(ranges.iter().map(|r| r.start()).collect::<Vec<_>>(), [0, 4, 8]);
        let error = split_by_bytes(&blocks, Bytes(0), 4, &multiple_of_4).unwrap_err();
        assert_eq!(error, LayerRangeError::NoSplit { stages: 4, n_layer: 12 });
    }

    #[test]
    fn the_split_is_the_best_of_all_splits() {
        let blocks = sizes(&[7, 1, 1, 9, 2, 3, 8]);
        let head = Bytes(4);
        let load = |r: &LayerRange, last: bool| {
            let own: u64 = blocks[r.start as usize..r.end as usize].iter().map(|b| b.0).sum();
            own + if last { head.0 } else { 0 }
        };
        let largest = |ranges: &[LayerRange]| {
            ranges.iter().enumerate().map(|(i, r)| load(r, i + 1 == ranges.len())).max().unwrap()
        };
        let found = largest(&split_by_bytes(&blocks, head, 3, &|_| true).unwrap());
        let mut best = u64::MAX;
        for a in 1..6 {
            for b in a + 1..7 {
                best = best.min(largest(&LayerRange::from_cuts(&[a, b], 7).unwrap()));
            }
        }
        assert_eq!(found, best);
    }
}
