//! From the medians of all measurements to what the planner reads: curves of blocks, head and calls.

use std::collections::BTreeMap;

use cluster::{BlockCurves, LayerRange, ModelShape, ProcessorProfile, Surface, SurfaceError};
use protocol::plan_files::MeasuredPartEntry;
use thiserror::Error;

use crate::fit::{Calls, Growth, Timed, costs, surface};
use crate::reduction::Reduction;
use crate::sampling::Point;

/// The measurements do not suffice for a profile.
#[derive(Debug, Error)]
pub enum CurvesError {
    /// None of a kind.
    #[error("no {0} could be measured")]
    Nothing(&'static str),
    /// They make no curve.
    #[error("the {what} make no curve: {source}")]
    Surface {
        /// Which.
        what: &'static str,
        /// Why.
        source: SurfaceError,
    },
}

/// Points and their medians, in milliseconds.
pub(crate) type Medians = [(Point, f64)];

/// Everything that one phase's calls tell.
#[derive(Default)]
struct Told {
    call: Vec<Timed>,
    /// By type of block.
    blocks: Vec<Vec<Timed>>,
}

/// The profile of a processor.
pub(crate) fn processor_profile(
    shape: &ModelShape,
    reduction: &Reduction,
    medians: &Medians,
) -> Result<ProcessorProfile, CurvesError> {
    let counts = |range: LayerRange| reduction.counts(shape, range);
    let decode = tell_apart(medians, MeasuredPartEntry::Decode, &counts, &[]);
    let prefill = tell_apart(medians, MeasuredPartEntry::Prefill, &counts, &decode.call);
    let mut blocks = Vec::with_capacity(reduction.kinds.len());
    for (i, kind) in reduction.kinds.iter().enumerate() {
        let curve = |told: &Told, what, missing| {
            let points = told.blocks.get(i).filter(|points| !points.is_empty());
            let points = points.ok_or(CurvesError::Nothing(missing))?;
            let growth = Growth::of(kind.attention);
            surface(points, growth).map_err(|source| CurvesError::Surface { what, source })
        };
        blocks.push(BlockCurves {
            kind: *kind,
            decode: curve(&decode, "decode times", "decode step")?,
            prefill: curve(&prefill, "prefill times", "prefill chunk")?,
        });
    }
    let calls: Vec<Timed> = decode.call.iter().chain(&prefill.call).copied().collect();
    let call = surface(&calls, Growth::Unbounded)
        .map_err(|source| CurvesError::Surface { what: "call times", source })?;
    let head = head(medians, reduction, &decode, &counts)?;
    Ok(ProcessorProfile { blocks, head, call: Some(call) })
}

/// The curve of what does not depend on blocks: embedding look-ups and hops.
pub(crate) fn flat(medians: &Medians, part: MeasuredPartEntry) -> Option<Surface> {
    let points: Vec<Timed> = of_part(medians, part).map(|(point, ms)| timed(point, ms)).collect();
    surface(&points, Growth::None).ok()
}

/// Costs at every number of rows and depth. `fixed` are fixed costs of fewer rows.
fn tell_apart(
    medians: &Medians,
    part: MeasuredPartEntry,
    counts: &dyn Fn(LayerRange) -> Vec<f64>,
    fixed: &[Timed],
) -> Told {
    let mut at: BTreeMap<(u32, u32), Calls> = BTreeMap::new();
    for (point, ms) in of_part(medians, part) {
        if let Some(layers) = point.layers {
            at.entry((point.depth, point.rows)).or_default().push((counts(layers), ms));
        }
    }
    let mut told = Told::default();
    for ((depth, rows), calls) in at {
        // The fixed cost is that of rows copied and masks made: it grows with the rows.
        let known = |calls: &[Timed], depth| {
            calls.iter().filter(|known| known.depth == depth).max_by_key(|known| known.rows).copied()
        };
        let before = known(&told.call, depth).or_else(|| known(&told.call, 0)).or_else(|| known(fixed, 0));
        let known_call = before.map(|known| known.ms * f64::from(rows) / f64::from(known.rows.max(1)));
        let Some(found) = costs(&calls, known_call) else { continue };
        told.call.push(Timed { rows, depth, ms: found.call });
        told.blocks.resize(found.blocks.len(), Vec::new());
        for (of_kind, ms) in told.blocks.iter_mut().zip(found.blocks) {
            of_kind.push(Timed { rows, depth, ms });
        }
    }
    told
}

/// The last slice's time less that of a like one without the head, or less what its call and blocks are known to take.
fn head(
    medians: &Medians,
    reduction: &Reduction,
    decode: &Told,
    counts: &dyn Fn(LayerRange) -> Vec<f64>,
) -> Result<Surface, CurvesError> {
    let of_last = counts(reduction.last);
    let known = |rows: u32| {
        let at = |points: &[Timed]| points.iter().find(|p| p.rows == rows && p.depth == 0).map(|p| p.ms);
        let blocks = of_last.iter().zip(&decode.blocks).map(|(count, points)| Some(count * at(points)?));
        Some(at(&decode.call)? + blocks.sum::<Option<f64>>()?)
    };
    let beside = |rows: u32| {
        let mut twins = of_part(medians, MeasuredPartEntry::WithoutHead);
        twins.find(|(point, _)| point.rows == rows).map(|(_, ms)| ms)
    };
    let points = of_part(medians, MeasuredPartEntry::Head).filter_map(|(point, ms)| {
        let rest = beside(point.rows).or_else(|| known(point.rows))?;
        // What is not above the noise is next to nothing.
        Some(timed(point, (ms - rest).max(ms * 0.001)))
    });
    let points: Vec<Timed> = points.collect();
    if points.is_empty() {
        return Err(CurvesError::Nothing("head"));
    }
    surface(&points, Growth::None).map_err(|source| CurvesError::Surface { what: "head times", source })
}

fn of_part(medians: &Medians, part: MeasuredPartEntry) -> impl Iterator<Item = (&Point, f64)> {
    medians.iter().filter(move |(point, _)| point.part == part).map(|(point, ms)| (point, *ms))
}

fn timed(point: &Point, ms: f64) -> Timed {
    Timed { rows: point.rows, depth: point.depth, ms }
}
