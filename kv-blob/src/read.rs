//! Reads a blob. Mirrors llama-kv-cache.cpp, `state_read`, and trusts as little.

use bytes::{Bytes, BytesMut};

use crate::blob::Extensions;
use crate::cursor::Cursor;
use crate::form::EXTENSION;
use crate::layer::Layer;
use crate::write::MAGIC;
use crate::{Blob, BlobError, CacheKind, CellForm, Form, LayerLayout, Rotation, ValueForm, ValueLayout};

/// llama.cpp's `LLAMA_MAX_SEQ` (llama-cparams.h).
pub(crate) const MAX_STREAMS: u32 = 256;

/// What a cache has of one sequence.
struct Cache {
    cells: Cells,
    transposed: bool,
    layers: std::vec::IntoIter<Layer>,
}

/// Cells in the order of their positions.
struct Cells {
    first: u32,
    n: u32,
    extensions: Bytes,
    /// Where each is to be found, unless they lie in this order.
    order: Option<Vec<u32>>,
}

impl Cells {
    const fn end(&self) -> u32 {
        self.first + self.n
    }
}

impl Blob {
    /// Reads what `llama_state_seq_get_data` wrote for a context of this form. Cells come out in the order of their positions,
    /// for which they are copied if they were in another, as in a window that has gone round.
    ///
    /// # Errors
    /// When anything about it is not as llama.cpp writes it, and when the sequence has no tokens.
    pub fn read(bytes: Bytes, form: &Form) -> Result<Self, BlobError> {
        let mut cursor = Cursor::new(bytes);
        let got = cursor.u32("the magic number")?;
        if got != MAGIC {
            return Err(BlobError::Magic { got, wanted: MAGIC });
        }
        cursor.u32("the sequence's number")?;
        let mut caches = Vec::with_capacity(2);
        for kind in form.kinds() {
            caches.push(read_cache(&mut cursor, form, *kind)?);
        }
        if cursor.left() > 0 {
            return Err(BlobError::Long { at: cursor.at(), extra: cursor.left() });
        }
        whole(caches, form)
    }
}

/// Puts the caches' layers in order again.
fn whole(mut caches: Vec<Option<Cache>>, form: &Form) -> Result<Blob, BlobError> {
    let ends: Vec<u32> =
        caches.iter().map(|cache| cache.as_ref().map_or(0, |cache| cache.cells.end())).collect();
    if ends.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(BlobError::UnevenCaches { ends });
    }
    let (Some(Some(full)), Some(end)) = (caches.first(), ends.first().copied()) else {
        return Err(BlobError::Empty);
    };
    let (first, transposed) = (full.cells.first, full.transposed);
    if caches.iter().flatten().any(|cache| cache.transposed != transposed) {
        let (what, one, other) = ("whether values are transposed", "true".to_owned(), "false".to_owned());
        return Err(BlobError::Parts { what, one, other });
    }
    let widest = caches.iter().flatten().min_by_key(|cache| cache.cells.first);
    let extensions = widest
        .map(|cache| Extensions::new(cache.cells.first, cache.cells.extensions.clone()))
        .unwrap_or_default();
    let next_of = |layer: &CacheKind| {
        let kinds = form.kinds();
        let index = kinds.iter().position(|kind| kind == layer).unwrap_or(0);
        caches.get_mut(index)?.as_mut()?.layers.next()
    };
    let layers = form.layers.iter().filter_map(next_of).collect();
    Ok(Blob { first, end, cells: form.cells, extensions, values: form.values, transposed, layers })
}

/// A cache's cells and layers, unless it has none.
fn read_cache(cursor: &mut Cursor, form: &Form, kind: CacheKind) -> Result<Option<Cache>, BlobError> {
    let got = cursor.u32("the number of sequences")?;
    if got == 0 || got > MAX_STREAMS {
        return Err(BlobError::Streams { got, most: MAX_STREAMS });
    }
    let mut found = None;
    for _ in 0..got {
        let n = cursor.u32("a number of cells")?;
        if n == 0 {
            continue;
        }
        if found.is_some() {
            return Err(BlobError::TwoSequences);
        }
        let cells = read_cells(cursor, form.cells, n)?;
        let transposed = read_flag(cursor, "whether values are transposed")?;
        let mut layers = read_layers(cursor, (form, kind), &cells, transposed)?;
        if let Some(order) = &cells.order {
            layers = layers.iter().map(|layer| layer.reordered(order)).collect();
        }
        found = Some(Cache { cells, transposed, layers: layers.into_iter() });
    }
    Ok(found)
}

fn read_cells(cursor: &mut Cursor, form: CellForm, n: u32) -> Result<Cells, BlobError> {
    let (each, start) = (form.bytes(), cursor.at());
    let data = cursor.take(u64::from(n) * each as u64, "the cells")?;
    let mut positions = Vec::with_capacity(n as usize);
    for (index, cell) in (0..).zip(data.chunks_exact(each)) {
        let [position, sequences] =
            [0, 4].map(|at| i32::from_le_bytes([0, 1, 2, 3].map(|byte| cell[at + byte])));
        let position = u32::try_from(position).map_err(|_| BlobError::Position { position })?;
        if sequences != 1 {
            let (what, at) = ("a cell's number of sequences", start + index as usize * each + 4);
            let got = u64::from(sequences.cast_unsigned());
            return Err(BlobError::Field { what, at, got, wanted: "1".to_owned() });
        }
        positions.push((position, index));
    }
    let is_sorted = positions.is_sorted();
    if !is_sorted {
        positions.sort_unstable();
    }
    let first = check_positions(&positions)?;
    let mut extensions = BytesMut::new();
    if form == CellForm::Extended {
        extensions.reserve(positions.len() * EXTENSION);
        for (_, index) in &positions {
            // After position and number of sequences, before the sequence.
            let at = *index as usize * each + 8;
            extensions.extend_from_slice(&data[at..at + EXTENSION]);
        }
    }
    let order = (!is_sorted).then(|| positions.into_iter().map(|(_, index)| index).collect());
    Ok(Cells { first, n, extensions: extensions.freeze(), order })
}

/// The first position, if none is missing between it and the last, and none is there twice.
fn check_positions(positions: &[(u32, u32)]) -> Result<u32, BlobError> {
    let [(first, _), .., (last, _)] = positions else {
        return Ok(positions.first().map_or(0, |(first, _)| *first));
    };
    let follows = |pair: &[(u32, u32)]| pair[0].0 + 1 == pair[1].0;
    if positions.windows(2).all(follows) {
        return Ok(*first);
    }
    Err(BlobError::Gap { cells: positions.len(), first: *first, last: *last })
}

fn read_flag(cursor: &mut Cursor, what: &'static str) -> Result<bool, BlobError> {
    let at = cursor.at();
    match cursor.u32(what)? {
        0 => Ok(false),
        1 => Ok(true),
        got => Err(BlobError::Field { what, at, got: u64::from(got), wanted: "0 or 1".to_owned() }),
    }
}

fn read_layers(
    cursor: &mut Cursor,
    (form, kind): (&Form, CacheKind),
    cells: &Cells,
    transposed: bool,
) -> Result<Vec<Layer>, BlobError> {
    let n_layers = form.layers_of(kind).count();
    cursor.expect("the number of layers", u32::try_from(n_layers).unwrap_or(u32::MAX))?;
    let rotation =
        Rotation { keys: cursor.u32("the keys' rotation")?, values: cursor.u32("the values' rotation")? };
    let mut layers = Vec::with_capacity(n_layers);
    for _ in 0..n_layers {
        let key_element = cursor.i32("a key's type")?;
        let key_bytes = cursor.u64("the size of a row of keys")?;
        let keys = take_table(cursor, &[u64::from(cells.n), key_bytes], "keys")?;
        let layout = LayerLayout { rotation, key_element, key_bytes, values: ValueLayout::Absent };
        layers.push(Layer { layout, first: cells.first, keys, values: Bytes::new() });
    }
    if form.values == ValueForm::Present {
        for layer in &mut layers {
            let element = cursor.i32("a value's type")?;
            (layer.layout.values, layer.values) = match transposed {
                false => read_rows(cursor, element, cells.n)?,
                true => read_transposed(cursor, element, cells.n)?,
            };
        }
    }
    Ok(layers)
}

fn read_rows(cursor: &mut Cursor, element: i32, cells: u32) -> Result<(ValueLayout, Bytes), BlobError> {
    let row_bytes = cursor.u64("the size of a row of values")?;
    let values = take_table(cursor, &[u64::from(cells), row_bytes], "values")?;
    Ok((ValueLayout::Rows { element, row_bytes }, values))
}

fn read_transposed(cursor: &mut Cursor, element: i32, cells: u32) -> Result<(ValueLayout, Bytes), BlobError> {
    let element_bytes = cursor.u32("the size of a value")?;
    let elements = cursor.u32("the number of a position's values")?;
    let sizes = [u64::from(cells), u64::from(element_bytes), u64::from(elements)];
    let values = take_table(cursor, &sizes, "values")?;
    Ok((ValueLayout::Transposed { element, element_bytes, elements }, values))
}

/// As many bytes as the product of `sizes`, of which none may be 0: llama.cpp caches no empty rows.
fn take_table(cursor: &mut Cursor, sizes: &[u64], what: &'static str) -> Result<Bytes, BlobError> {
    if sizes.contains(&0) {
        let wanted = "at least 1".to_owned();
        return Err(BlobError::Field { what: "the size of a row", at: cursor.at(), got: 0, wanted });
    }
    let bytes = sizes.iter().try_fold(1_u64, |bytes, size| bytes.checked_mul(*size));
    cursor.take(bytes.unwrap_or(u64::MAX), what)
}
