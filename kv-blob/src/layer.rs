//! One layer's keys and values of some positions, and picking positions out of them. Their numbers are not looked into.

use bytes::{Bytes, BytesMut};

use crate::{LayerLayout, ValueLayout};

/// A layer's share of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) layout: LayerLayout,
    /// Its first position; the others follow it, up to the blob's end.
    pub(crate) first: u32,
    /// `[cells, key_bytes]`
    pub(crate) keys: Bytes,
    /// `[cells, row_bytes]`, or transposed `[elements, cells, element_bytes]`; empty where there are none.
    pub(crate) values: Bytes,
}

/// Bytes as a table of equal groups, each with an item per cell.
#[derive(Clone, Copy)]
struct Table {
    groups: usize,
    item: usize,
}

impl Layer {
    fn tables(&self) -> [Table; 2] {
        let keys = Table { groups: 1, item: self.layout.key_bytes as usize };
        let values = match self.layout.values {
            ValueLayout::Absent => Table { groups: 0, item: 0 },
            ValueLayout::Rows { row_bytes, .. } => Table { groups: 1, item: row_bytes as usize },
            ValueLayout::Transposed { element_bytes, elements, .. } => {
                Table { groups: elements as usize, item: element_bytes as usize }
            }
        };
        [keys, values]
    }

    /// Its positions `[from, to)`, out of those up to `end`.
    pub(crate) fn positions(&self, from: u32, to: u32, end: u32) -> Self {
        let at = |position: u32| (position - self.first) as usize;
        let [keys, values] = self.tables();
        Self {
            layout: self.layout,
            first: from,
            keys: keys.range(&self.keys, at(from)..at(to), at(end)),
            values: values.range(&self.values, at(from)..at(to), at(end)),
        }
    }

    /// The cells in another order; `order` has each once.
    pub(crate) fn reordered(&self, order: &[u32]) -> Self {
        let [keys, values] = self.tables();
        Self {
            keys: keys.reordered(&self.keys, order),
            values: values.reordered(&self.values, order),
            ..*self
        }
    }

    /// Its cells, and those of `next` after them. Both are of one layout.
    pub(crate) fn followed_by(&self, next: &Self) -> Self {
        let [keys, values] = self.tables();
        Self {
            keys: keys.joined(&self.keys, &next.keys),
            values: values.joined(&self.values, &next.values),
            ..*self
        }
    }
}

impl Table {
    fn range(self, data: &Bytes, range: std::ops::Range<usize>, cells: usize) -> Bytes {
        let Self { groups, item } = self;
        if groups <= 1 {
            return data.slice(range.start * item * groups..range.end * item * groups);
        }
        let mut picked = BytesMut::with_capacity(groups * range.len() * item);
        for group in 0..groups {
            let start = group * cells * item;
            picked.extend_from_slice(&data[start + range.start * item..start + range.end * item]);
        }
        picked.freeze()
    }

    fn reordered(self, data: &Bytes, order: &[u32]) -> Bytes {
        let Self { groups, item } = self;
        let mut sorted = BytesMut::with_capacity(data.len());
        for group in 0..groups {
            let start = group * order.len() * item;
            for cell in order {
                let at = start + *cell as usize * item;
                sorted.extend_from_slice(&data[at..at + item]);
            }
        }
        sorted.freeze()
    }

    fn joined(self, one: &Bytes, other: &Bytes) -> Bytes {
        let mut joined = BytesMut::with_capacity(one.len() + other.len());
        for group in 0..self.groups {
            for part in [one, other] {
                let size = part.len() / self.groups;
                joined.extend_from_slice(&part[group * size..(group + 1) * size]);
            }
        }
        joined.freeze()
    }
}
