//! Where a model is cut, and its slices as files.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cluster::{LayerRange, ModelShape};
use gguf::cut::{CutOptions, OutputPlan, plan_embedding, plan_slice};
use gguf::{Gguf, Part};

/// A model file, and the folder where its slices go. Certified architectures only: nothing is allowed that is not.
pub(crate) struct SliceFolder<'a> {
    pub(crate) model: &'a Gguf,
    pub(crate) folder: &'a Path,
}

/// Opens a model file.
pub(crate) fn open(path: &Path) -> Result<Gguf> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    Ok(Gguf::read(vec![Part::new(path.display().to_string(), file)])?)
}

impl SliceFolder<'_> {
    /// The file of one slice, which is cut if it is not there.
    pub(crate) fn slice(&self, range: LayerRange) -> Result<PathBuf> {
        let plan = plan_slice(self.model, range, &CutOptions::default())?;
        self.write(&format!("{}-{}.gguf", range.start(), range.end()), &plan)
    }

    /// The embedding file.
    pub(crate) fn embedding(&self) -> Result<PathBuf> {
        self.write("embedding.gguf", &plan_embedding(self.model, &CutOptions::default())?)
    }

    fn write(&self, name: &str, plan: &OutputPlan) -> Result<PathBuf> {
        let path = self.folder.join(name);
        if !path.is_file() {
            plan.write_to(&mut BufWriter::new(File::create(&path)?), &mut |_| {})?;
        }
        Ok(path)
    }
}

/// Splits that between them cut at every boundary where the model can be cut: the finest, an uneven one, and for each
/// boundary that these leave out the two parts it makes.
pub(crate) fn splits_at_every_boundary(shape: &ModelShape) -> Vec<Vec<LayerRange>> {
    let mut splits = vec![shape.finest_split()];
    splits.extend(uneven(shape));
    let mut covered: BTreeSet<u32> = splits.iter().flatten().map(|range| range.start()).collect();
    for boundary in 1..shape.n_layer() {
        if let Some(parts) = allowed(shape, &[boundary]).filter(|_| covered.insert(boundary)) {
            splits.push(parts);
        }
    }
    splits
}

/// The first split into three slices of different lengths, or else into two.
fn uneven(shape: &ModelShape) -> Option<Vec<LayerRange>> {
    let n = shape.n_layer();
    let threes = (1..n).flat_map(|first| (first + 1..n).map(move |second| vec![first, second]));
    let twos = (1..n).map(|cut| vec![cut]);
    threes.chain(twos).filter_map(|cuts| allowed(shape, &cuts)).find(|ranges| {
        let lengths: BTreeSet<u32> = ranges.iter().map(|range| range.len()).collect();
        lengths.len() == ranges.len()
    })
}

fn allowed(shape: &ModelShape, cuts: &[u32]) -> Option<Vec<LayerRange>> {
    let ranges = LayerRange::from_cuts(cuts, shape.n_layer()).ok()?;
    ranges.iter().all(|range| shape.check_range(*range).is_ok()).then_some(ranges)
}
