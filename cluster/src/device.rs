//! What a host can compute and hold: devices, their memory, and curves measured on them.
//!
//! A curve says nothing about how it was measured; that is the profiler's business.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{BlockKind, Bytes, MemoryCosts, Millis};

/// A host that runs an agent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub String);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What one stage runs on: a GPU together with its host's CPU, or a CPU alone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId(pub String);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Memory that a stage may use, as budgets: what the host needs for itself is already taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceMemory {
    /// A GPU with memory of its own, and the host's RAM. `vram` is zero where there is no GPU.
    Discrete {
        /// Memory of the GPU.
        vram: Bytes,
        /// Memory of the host.
        ram: Bytes,
    },
    /// One memory that GPU and CPU share (Apple Silicon, GB10): counted once.
    Unified {
        /// All of it.
        total: Bytes,
    },
}

/// A device of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name, unique in the cluster.
    pub id: DeviceId,
    /// The host it sits in.
    pub node: NodeId,
    /// Its budgets.
    pub memory: DeviceMemory,
}

/// Times measured at some numbers of rows and some depths of the KV cache, interpolated between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Surface {
    rows: Vec<u32>,
    depths: Vec<u32>,
    times: Vec<Millis>,
}

/// Why measurements are not a surface.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum SurfaceError {
    /// No measurement at all.
    #[error("a curve has no points: measure it at one number of rows at least")]
    Empty,
    /// Rows or depths that do not rise strictly.
    #[error("a curve's rows and depths must rise strictly, and rows start at 1 or more")]
    NotRising,
    /// Not one time for every pair of rows and depth.
    #[error("a curve of {rows} numbers of rows and {depths} depths has {times} times instead of {}", rows * depths)]
    WrongLength {
        /// Numbers of rows.
        rows: usize,
        /// Depths.
        depths: usize,
        /// Times given.
        times: usize,
    },
    /// A time that no computation takes.
    #[error("a curve has a time of {time_ms} ms: times must be finite and above zero")]
    BadTime {
        /// The offending time, in milliseconds.
        time_ms: f64,
    },
}

impl Surface {
    /// `times[r · depths.len() + d]` is the time of `rows[r]` rows at depth `depths[d]`.
    pub fn new(rows: Vec<u32>, depths: Vec<u32>, times: Vec<Millis>) -> Result<Self, SurfaceError> {
        if rows.is_empty() || depths.is_empty() {
            return Err(SurfaceError::Empty);
        }
        let rising = |of: &[u32]| of.windows(2).all(|pair| pair[0] < pair[1]);
        if rows[0] == 0 || !rising(&rows) || !rising(&depths) {
            return Err(SurfaceError::NotRising);
        }
        if times.len() != rows.len() * depths.len() {
            return Err(SurfaceError::WrongLength {
                rows: rows.len(),
                depths: depths.len(),
                times: times.len(),
            });
        }
        if let Some(bad) = times.iter().find(|time| !(time.0.is_finite() && time.0 > 0.0)) {
            return Err(SurfaceError::BadTime { time_ms: bad.0 });
        }
        Ok(Self { rows, depths, times })
    }

    /// A curve that does not depend on the depth.
    pub fn flat(rows: Vec<u32>, times: Vec<Millis>) -> Result<Self, SurfaceError> {
        Self::new(rows, vec![0], times)
    }

    /// The time of `rows` rows at `depth`: linear between measurements and, beyond the last, along the last two.
    /// Below the first number of rows it is never less than the share of the first measurement.
    pub fn at(&self, rows: f64, depth: f64) -> Millis {
        let first = f64::from(self.rows[0]);
        if rows < first && self.rows.len() == 1 {
            return Millis(self.along_depth(0, depth) * rows / first);
        }
        let (low, high, share) = bracket(&self.rows, rows);
        let (a, b) = (self.along_depth(low, depth), self.along_depth(high, depth));
        let floor = self.along_depth(0, depth) * (rows / first).min(1.0);
        Millis((a + (b - a) * share).max(floor))
    }

    /// The surface with all times of so many rows multiplied by a factor, which must be finite and above zero.
    #[must_use]
    pub(crate) fn scaled_by_rows(&self, factor: impl Fn(u32) -> f64) -> Self {
        let times = self.rows.iter().zip(self.times.chunks(self.depths.len()));
        let times = times.flat_map(|(rows, times)| {
            let factor = factor(*rows);
            times.iter().map(move |time| Millis(time.0 * factor))
        });
        Self { times: times.collect(), ..self.clone() }
    }

    /// The measured numbers of rows.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The measured depths.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// The measurements, rows major.
    pub fn times(&self) -> &[Millis] {
        &self.times
    }

    fn along_depth(&self, row: usize, depth: f64) -> f64 {
        let of_row = &self.times[row * self.depths.len()..][..self.depths.len()];
        let (low, high, share) = bracket(&self.depths, depth);
        let (a, b) = (of_row[low].0, of_row[high].0);
        (a + (b - a) * share).max(of_row[0].0.min(a).min(b))
    }
}

/// The two points around `x` and how far between them it lies; beyond the ends, the nearest two.
fn bracket(points: &[u32], x: f64) -> (usize, usize, f64) {
    if points.len() == 1 {
        return (0, 0, 0.0);
    }
    let above = points.partition_point(|&p| f64::from(p) <= x).clamp(1, points.len() - 1);
    let (low, high) = (f64::from(points[above - 1]), f64::from(points[above]));
    (above - 1, above, (x - low) / (high - low))
}

/// Times of one type of block on one processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockCurves {
    /// The type of block.
    pub kind: BlockKind,
    /// One decode step, by rows in the batch and depth of each row's cache.
    pub decode: Surface,
    /// One prefill chunk, by tokens in the chunk.
    pub prefill: Surface,
}

/// Everything measured on one processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessorProfile {
    /// One entry for each type of block of the model.
    pub blocks: Vec<BlockCurves>,
    /// Output norm and LM head, by rows.
    pub head: Surface,
    /// What one call costs however many blocks it computes, by rows; where it was not measured, the blocks' times
    /// hold their share of it.
    pub call: Option<Surface>,
}

impl ProcessorProfile {
    /// The curves of a type of block.
    pub fn block(&self, kind: BlockKind) -> Option<&BlockCurves> {
        self.blocks.iter().find(|curves| curves.kind == kind)
    }
}

/// Memory that computing takes besides weights and cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeBuffers {
    /// With prefill-sized batches.
    pub prefill: Bytes,
    /// With decode-sized batches only.
    pub decode: Bytes,
}

/// What was measured on one device for one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// The device.
    pub device: DeviceId,
    /// The model, by hash or name: profiles of different models are never mixed.
    pub model: String,
    /// The runtime's version, as llama.cpp names it: nor are profiles of different runtimes.
    pub runtime: String,
    /// On the GPU, where there is one.
    pub gpu: Option<ProcessorProfile>,
    /// On the CPU, where blocks may run there.
    pub cpu: Option<ProcessorProfile>,
    /// What the runtime adds to every visit of a stage in a chain of several.
    pub hop_overhead: Millis,
    /// Compute buffers.
    pub buffers: ComputeBuffers,
    /// Looking token embeddings up, by rows, on the CPU of the first stage.
    pub embedding: Option<Surface>,
    /// How much longer a call takes after the device has idled.
    pub cold_call: Option<ColdCall>,
    /// What a stage on the host's CPU takes besides weights and cache; where it was not measured, it is assumed.
    pub memory: Option<MemoryCosts>,
}

/// Time that a call takes on top after an idle gap (DySCo, the controlled idle-gap experiment): caches have cooled, clocks
/// have dropped, threads sleep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ColdCall {
    gaps: Vec<Millis>,
    extra: Vec<Millis>,
}

/// Why numbers are not a cold-call correction.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum ColdCallError {
    /// No gap, or not one extra time for each.
    #[error("a cold-call correction has {gaps} gaps and {extra} times: it needs as many, and one at least")]
    WrongLength {
        /// Gaps given.
        gaps: usize,
        /// Times given.
        extra: usize,
    },
    /// Gaps that do not rise, or a number that is negative or not finite.
    #[error(
        "a cold-call correction's gaps must rise strictly, and all its times be finite and at least 0 ms"
    )]
    BadNumber,
}

impl ColdCall {
    /// `extra[i]` is added after a gap of `gaps[i]`.
    pub fn new(gaps: Vec<Millis>, extra: Vec<Millis>) -> Result<Self, ColdCallError> {
        if gaps.is_empty() || gaps.len() != extra.len() {
            return Err(ColdCallError::WrongLength { gaps: gaps.len(), extra: extra.len() });
        }
        let sound = |times: &[Millis]| times.iter().all(|time| time.0.is_finite() && time.0 >= 0.0);
        if !sound(&gaps) || !sound(&extra) || !gaps.windows(2).all(|pair| pair[0].0 < pair[1].0) {
            return Err(ColdCallError::BadNumber);
        }
        Ok(Self { gaps, extra })
    }

    /// The extra time after a gap: linear from nothing at no gap, constant beyond the longest measured.
    pub fn after(&self, gap: Millis) -> Millis {
        let (mut low, mut below) = (0.0, 0.0);
        for (at, extra) in self.gaps.iter().zip(&self.extra) {
            if gap.0 <= at.0 {
                let span = at.0 - low;
                let share = if span > 0.0 { (gap.0 - low) / span } else { 1.0 };
                return Millis(below + (extra.0 - below) * share);
            }
            (low, below) = (at.0, extra.0);
        }
        Millis(below)
    }

    /// The measured gaps.
    pub fn gaps(&self) -> &[Millis] {
        &self.gaps
    }

    /// The extra time after each.
    pub fn extra(&self) -> &[Millis] {
        &self.extra
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(of: &[f64]) -> Vec<Millis> {
        of.iter().copied().map(Millis).collect()
    }

    #[test]
    fn a_surface_is_linear_between_its_points_and_beyond_the_last() {
        let surface = Surface::new(vec![1, 2, 4], vec![0, 100], millis(&[1., 2., 2., 4., 3., 6.])).unwrap();
        assert_eq!(surface.at(1.0, 0.0), Millis(1.0));
        assert_eq!(surface.at(3.0, 0.0), Millis(2.5));
        assert_eq!(surface.at(2.0, 50.0), Millis(3.0));
        assert_eq!(surface.at(8.0, 0.0), Millis(5.0));
        assert_eq!(surface.at(1.0, 200.0), Millis(3.0));
    }

    #[test]
    fn times_stay_positive_below_the_first_point() {
        let surface = Surface::flat(vec![128, 512], millis(&[1.0, 9.0])).unwrap();
        assert!(surface.at(1.0, 0.0).0 > 0.0);
    }

    #[test]
    fn a_cold_call_grows_from_nothing_and_stays_beyond_the_longest_gap() {
        let cold = ColdCall::new(millis(&[5.0, 10.0]), millis(&[1.0, 3.0])).unwrap();
        assert_eq!(cold.after(Millis(0.0)), Millis(0.0));
        assert_eq!(cold.after(Millis(2.5)), Millis(0.5));
        assert_eq!(cold.after(Millis(7.5)), Millis(2.0));
        assert_eq!(cold.after(Millis(99.0)), Millis(3.0));
        assert!(ColdCall::new(millis(&[5.0, 5.0]), millis(&[1.0, 3.0])).is_err());
        assert!(ColdCall::new(millis(&[5.0]), millis(&[f64::NAN])).is_err());
        assert!(ColdCall::new(vec![], vec![]).is_err());
    }

    #[test]
    fn impossible_measurements_are_refused() {
        assert_eq!(Surface::flat(vec![], vec![]), Err(SurfaceError::Empty));
        assert_eq!(Surface::flat(vec![2, 1], millis(&[1., 1.])), Err(SurfaceError::NotRising));
        assert_eq!(Surface::flat(vec![0], millis(&[1.])), Err(SurfaceError::NotRising));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(Surface::flat(vec![1], millis(&[bad])), Err(SurfaceError::BadTime { .. })));
        }
        assert!(matches!(
            Surface::new(vec![1], vec![0, 1], millis(&[1.])),
            Err(SurfaceError::WrongLength { times: 1, .. })
        ));
    }
}
