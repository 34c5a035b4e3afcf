//! What a stage knows of its own keys and values: of which blocks they are and how they lie. Found out from a sequence of one
//! token when the stage has loaded, so that whatever comes from elsewhere can be compared with it.

use cluster::{LayerRange, ModelHash, SlotId};
use llama::kv_blob::{Blob, CacheKind, CellForm, Form, Layout, Place, Prepared, ValueForm, ValueLayout};
use protocol::hand_off::{KvHeader, KvLayout};

/// Bytes of a blob that are neither cells nor keys and values: some fields in front, and some for each block.
const FIELDS: u64 = 1024;
const FIELDS_PER_BLOCK: u64 = 64;

/// A stage's keys and values.
#[derive(Debug, Clone)]
pub(crate) struct KvFacts {
    pub(crate) layers: LayerRange,
    pub(crate) model: ModelHash,
    pub(crate) n_ctx: u32,
    /// Of all blocks.
    pub(crate) layout: Layout,
    /// The form of each slice's blobs, and how many caches it has.
    pub(crate) slices: Vec<SliceForm>,
}

/// A slice's blobs.
#[derive(Debug, Clone)]
pub(crate) struct SliceForm {
    pub(crate) form: Form,
    pub(crate) streams: u32,
}

impl KvFacts {
    /// The header of a blob of `layers`, as this stage would send it, with the most bytes it can have.
    pub(crate) fn header(&self, layers: LayerRange, tokens: u32) -> KvHeader {
        let layout = self.layout.part(self.indices(layers));
        let fields = FIELDS + FIELDS_PER_BLOCK * u64::from(layers.len());
        KvHeader {
            model: self.model,
            llama_cpp: llama::version().to_owned(),
            layers,
            tokens,
            bytes: layout.bytes(tokens).saturating_add(fields),
            layout: layout_of(&layout),
            windowed: Vec::new(),
        }
    }

    /// The header of this very blob of `layers`.
    pub(crate) fn header_of(&self, blob: &Blob, layers: LayerRange, bytes: u64) -> KvHeader {
        let kinds = blob.form().layers;
        let windowed = (layers.start()..).zip(kinds).filter(|(_, kind)| *kind == CacheKind::Window);
        KvHeader {
            bytes,
            windowed: windowed.map(|(layer, _)| layer).collect(),
            ..self.header(layers, blob.tokens())
        }
    }

    /// Which of its blobs' layers blocks are; none for blocks of other stages.
    pub(crate) fn indices(&self, layers: LayerRange) -> std::ops::Range<usize> {
        let at = |layer: u32| layer.saturating_sub(self.layers.start()) as usize;
        at(layers.start())..at(layers.end())
    }

    /// Writes a blob of all blocks for the slices' slot.
    pub(crate) fn prepare(
        &self,
        blob: &Blob,
        slot: SlotId,
    ) -> Result<Vec<Prepared>, llama::kv_blob::BlobError> {
        self.layout.check(&blob.layout())?;
        let mut start = 0;
        let slices = self.slices.iter().map(|SliceForm { form, streams }| {
            let end = start + form.layers.len();
            let part = blob.part(start..end)?;
            start = end;
            part.prepare(form, Place { slot: slot.0, streams: *streams })
        });
        slices.collect()
    }
}

/// The form in which a blob with this header travels.
pub(crate) fn form_of(header: &KvHeader) -> Form {
    use llama::kv_blob::CacheCount;
    let kind = |layer| match header.windowed.contains(&layer) {
        true => CacheKind::Window,
        false => CacheKind::Full,
    };
    let layers: Vec<CacheKind> = (header.layers.start()..header.layers.end()).map(kind).collect();
    Form {
        caches: if layers.contains(&CacheKind::Window) { CacheCount::Two } else { CacheCount::One },
        layers,
        cells: if header.layout.extended_cells { CellForm::Extended } else { CellForm::Plain },
        values: if header.layout.values { ValueForm::Present } else { ValueForm::Absent },
    }
}

fn layout_of(layout: &Layout) -> KvLayout {
    let first = layout.layers.first();
    let value_type = first.and_then(|layer| match layer.values {
        ValueLayout::Absent => None,
        ValueLayout::Rows { element, .. } | ValueLayout::Transposed { element, .. } => Some(element),
    });
    KvLayout {
        extended_cells: layout.cells == CellForm::Extended,
        values: value_type.is_some(),
        transposed_values: layout.transposed,
        key_type: first.map_or(-1, |layer| layer.key_element),
        value_type: value_type.unwrap_or(-1),
    }
}
