//! What two contexts must agree on before one takes the other's keys and values: types and sizes, layer by layer.

use std::fmt;
use std::ops::Range;

use crate::{BlobError, CellForm};

/// By how many numbers each is rotated before it is quantised (llama-kv-cache.cpp, `n_rot_k` and `n_rot_v`); 0 is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rotation {
    /// Of keys.
    pub keys: u32,
    /// Of values.
    pub values: u32,
}

/// A layer's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueLayout {
    /// None are kept.
    Absent,
    /// A row for each position.
    Rows {
        /// ggml's number of the type.
        element: i32,
        /// Bytes of a row.
        row_bytes: u64,
    },
    /// A row for each element, with a number for each position.
    Transposed {
        /// ggml's number of the type.
        element: i32,
        /// Bytes of a number.
        element_bytes: u32,
        /// Elements.
        elements: u32,
    },
}

/// How one layer's keys and values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerLayout {
    /// Of its cache.
    pub rotation: Rotation,
    /// ggml's number of the keys' type.
    pub key_element: i32,
    /// Bytes of a position's keys.
    pub key_bytes: u64,
    /// The values.
    pub values: ValueLayout,
}

/// How the layers of a blob lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// What cells say.
    pub cells: CellForm,
    /// Whether values are transposed, which they are without flash attention.
    pub transposed: bool,
    /// Each layer.
    pub layers: Vec<LayerLayout>,
}

impl LayerLayout {
    /// Bytes of one position's keys and values.
    pub const fn bytes_per_token(&self) -> u64 {
        let values = match self.values {
            ValueLayout::Absent => 0,
            ValueLayout::Rows { row_bytes, .. } => row_bytes,
            ValueLayout::Transposed { element_bytes, elements, .. } => {
                (element_bytes as u64).saturating_mul(elements as u64)
            }
        };
        self.key_bytes.saturating_add(values)
    }

    fn check(&self, got: &Self, layer: usize) -> Result<(), BlobError> {
        let keys =
            |layout: &Self| format!("rows of {} bytes of type {}", layout.key_bytes, layout.key_element);
        let sides = [
            ("rotation of keys and values", got.rotation.to_string(), self.rotation.to_string()),
            ("keys", keys(got), keys(self)),
            ("values", got.values.to_string(), self.values.to_string()),
        ];
        match sides.into_iter().find(|(_, got, own)| got != own) {
            Some((what, got, own)) => Err(BlobError::Layout { what, layer, got, own }),
            None => Ok(()),
        }
    }
}

impl Layout {
    /// The layout of some of its layers. Layers that it does not have are left out.
    #[must_use]
    pub fn part(&self, layers: Range<usize>) -> Self {
        Self { layers: self.layers.get(layers).unwrap_or(&[]).to_vec(), ..*self }
    }

    /// Bytes of `tokens` positions: keys and values, and the cells of two caches. A blob that travels is no larger, but
    /// for some tens of bytes per layer.
    pub fn bytes(&self, tokens: u32) -> u64 {
        let per_token: u64 = self.layers.iter().map(LayerLayout::bytes_per_token).sum();
        let cells = 2 * self.cells.bytes() as u64;
        u64::from(tokens).saturating_mul(per_token.saturating_add(cells))
    }

    /// Whether a blob of layout `other` fits here, layer by layer.
    ///
    /// # Errors
    /// The first difference, with both sides.
    pub fn check(&self, other: &Self) -> Result<(), BlobError> {
        let sides = [
            ("number of layers", other.layers.len().to_string(), self.layers.len().to_string()),
            ("cells", format!("{:?}", other.cells), format!("{:?}", self.cells)),
            ("whether values are transposed", other.transposed.to_string(), self.transposed.to_string()),
        ];
        if let Some((what, one, other)) = sides.into_iter().find(|(_, one, other)| one != other) {
            return Err(BlobError::Parts { what, one, other });
        }
        let pairs = self.layers.iter().zip(&other.layers);
        pairs.enumerate().try_for_each(|(layer, (own, got))| own.check(got, layer))
    }
}

impl fmt::Display for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {}", self.keys, self.values)
    }
}

impl fmt::Display for ValueLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::Rows { element, row_bytes } => write!(f, "rows of {row_bytes} bytes of type {element}"),
            Self::Transposed { element, element_bytes, elements } => {
                write!(f, "{elements} transposed rows of {element_bytes} bytes a number of type {element}")
            }
        }
    }
}
