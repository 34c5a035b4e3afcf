//! A sequence's keys and values in memory, always whole and in the order of positions, and how it is cut and put together.

use std::ops::Range;

use bytes::Bytes;

use crate::form::EXTENSION;
use crate::layer::Layer;
use crate::{BlobError, CacheCount, CacheKind, CellForm, Form, LayerLayout, Layout, ValueForm, ValueLayout};

/// A sequence's keys and values for some layers, with at least one token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// The first position of layers that have every one; 0 unless it was cut.
    pub(crate) first: u32,
    /// Position after the last of all layers.
    pub(crate) end: u32,
    pub(crate) cells: CellForm,
    pub(crate) extensions: Extensions,
    pub(crate) values: ValueForm,
    pub(crate) transposed: bool,
    pub(crate) layers: Vec<Layer>,
}

/// What extended cells say besides their position, from the first position of any layer to the end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Extensions {
    first: u32,
    bytes: Bytes,
}

impl Extensions {
    pub(crate) const fn new(first: u32, bytes: Bytes) -> Self {
        Self { first, bytes }
    }

    pub(crate) fn of(&self, position: u32) -> &[u8] {
        let start = (position - self.first) as usize * EXTENSION;
        self.bytes.get(start..start + EXTENSION).unwrap_or(&[])
    }

    /// Those of the positions `[from, to)`.
    fn range(&self, from: u32, to: u32) -> Self {
        if self.bytes.is_empty() {
            return Self::new(from, Bytes::new());
        }
        let at = |position: u32| (position - self.first) as usize * EXTENSION;
        Self::new(from, self.bytes.slice(at(from)..at(to)))
    }
}

impl Blob {
    /// A blob of zeros, for who computes nothing: of each layer, positions from its first on. It must have a token.
    pub fn blank(layout: &Layout, first: impl Fn(usize) -> u32, tokens: u32) -> Self {
        let zeros = |bytes: u64| Bytes::from(vec![0; bytes as usize]);
        let layer = |(index, layout): (usize, &LayerLayout)| {
            let first = first(index).min(tokens.saturating_sub(1));
            let cells = u64::from(tokens - first);
            let values = layout.bytes_per_token() - layout.key_bytes;
            let (keys, values) = (zeros(cells * layout.key_bytes), zeros(cells * values));
            Layer { layout: *layout, first, keys, values }
        };
        let has_values = layout.layers.iter().any(|layer| layer.values != ValueLayout::Absent);
        Self {
            first: 0,
            end: tokens,
            cells: layout.cells,
            extensions: Extensions::new(0, zeros(u64::from(tokens) * layout.cells.extension_bytes())),
            values: if has_values { ValueForm::Present } else { ValueForm::Absent },
            transposed: layout.transposed,
            layers: layout.layers.iter().enumerate().map(layer).collect(),
        }
    }

    /// Position after its last: the number of tokens of the sequence.
    pub const fn tokens(&self) -> u32 {
        self.end
    }

    /// The first position of layers that have every one; 0 unless it was cut.
    pub const fn first_position(&self) -> u32 {
        self.first
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of keys and values.
    pub fn data_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| (layer.keys.len() + layer.values.len()) as u64).sum()
    }

    /// How its layers lie.
    pub fn layout(&self) -> Layout {
        let layers = self.layers.iter().map(|layer| layer.layout).collect();
        Layout { cells: self.cells, transposed: self.transposed, layers }
    }

    /// The form in which it [travels](Self::pieces): with a second cache for the layers that lack early positions, or are
    /// rotated otherwise than the others.
    pub fn form(&self) -> Form {
        let begins_here = |layer: &&Layer| layer.first == self.first;
        let rotation = self.layers.iter().find(begins_here).map(|layer| layer.layout.rotation);
        let kind = |layer: &Layer| match begins_here(&layer) && Some(layer.layout.rotation) == rotation {
            true => CacheKind::Full,
            false => CacheKind::Window,
        };
        let layers: Vec<CacheKind> = self.layers.iter().map(kind).collect();
        let caches = if layers.contains(&CacheKind::Window) { CacheCount::Two } else { CacheCount::One };
        Form { layers, caches, cells: self.cells, values: self.values }
    }

    /// Some of its layers, without copying them.
    ///
    /// # Errors
    /// When it does not have them all.
    pub fn part(&self, layers: Range<usize>) -> Result<Self, BlobError> {
        let has = self.layers.len();
        match self.layers.get(layers.clone()) {
            Some(part) => Ok(Self { layers: part.to_vec(), extensions: self.extensions.clone(), ..*self }),
            None => Err(BlobError::NoSuchLayers { asked: layers, has }),
        }
    }

    /// The layers of all `parts`, one after the other, without copying them. All must be of the same sequence.
    ///
    /// # Errors
    /// When there are none, or when they are not of one sequence.
    pub fn merge(parts: impl IntoIterator<Item = Self>) -> Result<Self, BlobError> {
        let mut parts = parts.into_iter();
        let mut merged = parts.next().ok_or(BlobError::Nothing)?;
        for part in parts {
            merged.check_sequence(&part)?;
            if part.extensions.first < merged.extensions.first {
                merged.extensions = part.extensions;
            }
            merged.layers.extend(part.layers);
        }
        Ok(merged)
    }

    /// Its positions below `to`, of the layers that have them all; of the others, none.
    #[must_use]
    pub fn before(&self, to: u32) -> Self {
        let to = to.clamp(self.first, self.end);
        let layers = self.layers.iter().map(|layer| {
            let from = if layer.first == self.first { layer.first } else { self.end };
            layer.positions(from, to.max(from), self.end)
        });
        let layers = layers.collect();
        Self { end: to, layers, extensions: self.extensions.range(self.extensions.first, to), ..*self }
    }

    /// Its positions from `from` on, or from a little before: layers that lack early positions keep what they have, which
    /// is little, and are told from the others by where they begin.
    #[must_use]
    pub fn from(&self, from: u32) -> Self {
        let mut from = from.clamp(self.first, self.end - 1);
        let begins_there =
            |from: u32| self.layers.iter().any(|layer| layer.first == from && from != self.first);
        while begins_there(from) {
            from -= 1;
        }
        let cut = |layer: &Layer| match layer.first == self.first {
            true => layer.positions(from, self.end, self.end),
            false => layer.clone(),
        };
        let layers: Vec<Layer> = self.layers.iter().map(cut).collect();
        let lowest = layers.iter().map(|layer| layer.first).fold(from, u32::min);
        Self { first: from, layers, extensions: self.extensions.range(lowest, self.end), ..*self }
    }

    /// Its positions, and those of `next` after them: of the layers that `next` lacks the beginning of. Copies.
    ///
    /// # Errors
    /// When they are not of the same layers, or do not adjoin.
    pub fn followed_by(&self, next: &Self) -> Result<Self, BlobError> {
        self.layout().check(&next.layout())?;
        let (end, begin) = (self.end, next.first);
        let pairs = || self.layers.iter().zip(&next.layers);
        let lacks = |layer: &Layer| layer.first == next.first;
        if end != begin || pairs().any(|(one, other)| lacks(other) && one.first != self.first) {
            return Err(BlobError::NotAdjacent { end, begin });
        }
        let layers =
            pairs().map(|(one, other)| if lacks(other) { one.followed_by(other) } else { other.clone() });
        let after = next.extensions.range(begin, next.end);
        let extensions = [self.extensions.bytes.as_ref(), after.bytes.as_ref()].concat();
        Ok(Self {
            end: next.end,
            layers: layers.collect(),
            extensions: Extensions::new(self.extensions.first, extensions.into()),
            ..*self
        })
    }

    fn check_sequence(&self, part: &Self) -> Result<(), BlobError> {
        let positions = |blob: &Self| format!("{}..{}", blob.first, blob.end);
        let form = |blob: &Self| format!("{:?}, {:?}", blob.cells, blob.values);
        let sides = [
            ("positions", positions(self), positions(part)),
            ("cells and values", form(self), form(part)),
            ("whether values are transposed", self.transposed.to_string(), part.transposed.to_string()),
        ];
        if let Some((what, one, other)) = sides.into_iter().find(|(_, one, other)| one != other) {
            return Err(BlobError::Parts { what, one, other });
        }
        // Where a cut took the beginning away, parts can differ in how much is left.
        let shared = self.extensions.first.max(part.extensions.first);
        if self.extensions.range(shared, self.end) == part.extensions.range(shared, part.end) {
            return Ok(());
        }
        let (one, other) = ("one set of tokens".to_owned(), "another".to_owned());
        Err(BlobError::Parts { what: "cells", one, other })
    }
}
