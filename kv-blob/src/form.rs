//! What must be known of a context before a blob of it can be read or written, since the bytes alone do not tell.

/// Which of a context's caches a layer's keys and values are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// The one that keeps every position.
    Full,
    /// The one that keeps the positions of a sliding window. Which slice a layer is in can decide this: a window wider
    /// than any context keeps every position too.
    Window,
}

/// How many caches a context has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheCount {
    /// One for all layers.
    One,
    /// One for full attention and one for sliding windows, in this order, though the first may be without layers
    /// (llama-kv-cache-iswa.cpp).
    Two,
}

/// What a cell says of its token besides the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellForm {
    /// Nothing.
    Plain,
    /// Two more positions and the token's id (llama-kv-cells.h, `llama_kv_cell_ext`): models with M-RoPE.
    Extended,
}

/// Whether layers keep values beside their keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueForm {
    /// They do.
    Present,
    /// Values are computed from the keys: multi-head latent attention.
    Absent,
}

/// The form of a context's blobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// The cache of each layer, in order.
    pub layers: Vec<CacheKind>,
    /// Its caches.
    pub caches: CacheCount,
    /// Its cells.
    pub cells: CellForm,
    /// Its values.
    pub values: ValueForm,
}

impl Form {
    /// The caches in the order in which they are written.
    pub(crate) const fn kinds(&self) -> &'static [CacheKind] {
        match self.caches {
            CacheCount::One => &[CacheKind::Full],
            CacheCount::Two => &[CacheKind::Full, CacheKind::Window],
        }
    }

    /// The layers that are in a cache, by their index. With one cache for all, it has them all.
    pub(crate) fn layers_of(&self, kind: CacheKind) -> impl Iterator<Item = usize> {
        let is_in = move |layer: &CacheKind| self.caches == CacheCount::One || *layer == kind;
        self.layers.iter().enumerate().filter(move |(_, layer)| is_in(layer)).map(|(index, _)| index)
    }
}

impl CellForm {
    /// Bytes of a cell of one sequence: position, number of sequences, the sequence, and what it says besides.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Plain => 12,
            Self::Extended => 12 + EXTENSION,
        }
    }

    pub(crate) const fn extension_bytes(self) -> u64 {
        match self {
            Self::Plain => 0,
            Self::Extended => EXTENSION as u64,
        }
    }
}

/// Bytes of `llama_kv_cell_ext`: two positions and a token.
pub(crate) const EXTENSION: usize = 12;
