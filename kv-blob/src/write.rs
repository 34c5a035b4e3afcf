//! Writes a blob as llama.cpp reads it: small pieces of its own between references to the data.

use bytes::{BufMut, Bytes, BytesMut};

use crate::layer::Layer;
use crate::read::MAX_STREAMS;
use crate::{Blob, BlobError, CacheKind, CellForm, Form, Rotation, ValueLayout};

/// llama-context.cpp, `io_magic`.
pub(crate) const MAGIC: u32 = 0xaf14_3cd8;

/// The sequence a blob is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The sequence.
    pub slot: u32,
    /// Caches of the context, one for each sequence; 1 where they share one.
    pub streams: u32,
}

/// A blob written for one slot of a context, in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    bytes: Vec<u8>,
    place: Place,
    tokens: u32,
}

impl Prepared {
    /// As `llama_state_seq_set_data` reads it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What it was written for.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Tokens of the sequence.
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }
}

impl Blob {
    /// Written for a slot of a context of this form, in one piece: llama.cpp takes no other.
    ///
    /// # Errors
    /// When there is no such slot, when its layers do not go into the form's caches, and for a blob without its first positions,
    /// which no sequence can start without.
    pub fn prepare(&self, form: &Form, place: Place) -> Result<Prepared, BlobError> {
        if self.first > 0 {
            return Err(BlobError::NotAdjacent { end: 0, begin: self.first });
        }
        let pieces = self.write(form, place)?;
        let mut bytes = Vec::with_capacity(pieces.iter().map(Bytes::len).sum());
        pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
        Ok(Prepared { bytes, place, tokens: self.end })
    }

    /// As it travels, in its own [form](Self::form): pieces of any size that follow each other. The data is not copied.
    ///
    /// # Errors
    /// When layers that lack early positions do not lack the same ones.
    pub fn pieces(&self) -> Result<Vec<Bytes>, BlobError> {
        self.write(&self.form(), Place { slot: 0, streams: 1 })
    }

    fn write(&self, form: &Form, place: Place) -> Result<Vec<Bytes>, BlobError> {
        let Place { slot, streams } = place;
        if streams == 0 || streams > MAX_STREAMS || (streams > 1 && slot >= streams) {
            return Err(BlobError::NoSuchSlot { slot, slots: streams });
        }
        self.check_form(form)?;
        let mut writer = Writer::default();
        writer.own.put_u32_le(MAGIC);
        writer.own.put_u32_le(slot);
        for kind in form.kinds() {
            writer.own.put_u32_le(streams);
            for stream in 0..streams {
                if streams > 1 && stream != slot {
                    writer.own.put_u32_le(0);
                } else {
                    self.write_cache(&mut writer, (form, *kind), slot)?;
                }
            }
        }
        Ok(writer.finish())
    }

    fn check_form(&self, form: &Form) -> Result<(), BlobError> {
        let own = (self.layers.len(), self.cells, self.values);
        let other = (form.layers.len(), form.cells, form.values);
        if own == other {
            return Ok(());
        }
        let name = |(layers, cells, values)| format!("{layers} layers, {cells:?}, {values:?}");
        Err(BlobError::Parts { what: "form", one: name(own), other: name(other) })
    }

    fn write_cache(
        &self,
        writer: &mut Writer,
        (form, kind): (&Form, CacheKind),
        slot: u32,
    ) -> Result<(), BlobError> {
        let layers: Vec<(usize, &Layer)> =
            form.layers_of(kind).filter_map(|index| Some((index, self.layers.get(index)?))).collect();
        let first = match kind {
            CacheKind::Full => self.first,
            CacheKind::Window => layers.first().map_or(self.first, |(_, layer)| layer.first),
        };
        if let Some((layer, Layer { first: has, .. })) = layers.iter().find(|(_, layer)| layer.first != first)
        {
            return Err(BlobError::Begin { layer: *layer, has: *has, wanted: first });
        }
        writer.own.put_u32_le(self.end - first);
        for position in first..self.end {
            writer.own.put_u32_le(position);
            writer.own.put_u32_le(1);
            if self.cells == CellForm::Extended {
                writer.own.put_slice(self.extensions.of(position));
            }
            writer.own.put_u32_le(slot);
        }
        writer.own.put_u32_le(u32::from(self.transposed));
        write_layers(writer, &layers)
    }
}

fn write_layers(writer: &mut Writer, layers: &[(usize, &Layer)]) -> Result<(), BlobError> {
    writer.own.put_u32_le(layers.len() as u32);
    // llama.cpp rotates nothing in a cache without layers.
    let rotation = layers.first().map_or_else(Rotation::default, |(_, layer)| layer.layout.rotation);
    if let Some((index, layer)) = layers.iter().find(|(_, layer)| layer.layout.rotation != rotation) {
        let (got, own) = (layer.layout.rotation.to_string(), rotation.to_string());
        return Err(BlobError::Layout { what: "rotation of keys and values", layer: *index, got, own });
    }
    writer.own.put_u32_le(rotation.keys);
    writer.own.put_u32_le(rotation.values);
    for (_, layer) in layers {
        writer.own.put_i32_le(layer.layout.key_element);
        writer.own.put_u64_le(layer.layout.key_bytes);
        writer.put(&layer.keys);
    }
    for (_, layer) in layers {
        match layer.layout.values {
            ValueLayout::Absent => continue,
            ValueLayout::Rows { element, row_bytes } => {
                writer.own.put_i32_le(element);
                writer.own.put_u64_le(row_bytes);
            }
            ValueLayout::Transposed { element, element_bytes, elements } => {
                writer.own.put_i32_le(element);
                writer.own.put_u32_le(element_bytes);
                writer.own.put_u32_le(elements);
            }
        }
        writer.put(&layer.values);
    }
    Ok(())
}

#[derive(Default)]
struct Writer {
    pieces: Vec<Bytes>,
    /// What is written between two references.
    own: BytesMut,
}

impl Writer {
    fn put(&mut self, data: &Bytes) {
        self.pieces.push(self.own.split().freeze());
        self.pieces.push(data.clone());
    }

    fn finish(mut self) -> Vec<Bytes> {
        self.pieces.push(self.own.freeze());
        self.pieces
    }
}
