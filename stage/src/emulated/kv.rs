//! Keys and values of an emulated stage: zeros, as many as a real one would have, so that hand-offs take their time on the links.

use cluster::{Attention, BlockShape, LayerRange, ModelHash, ModelShape};
use llama::kv_blob::{
    Blob, CacheCount, CacheKind, CellForm, Form, LayerLayout, Layout, Rotation, ValueForm, ValueLayout,
};
use protocol::worker::WorkerConfig;

use crate::hand_off::{KvFacts, SliceForm};

/// ggml's number of 16-bit floats, of which caches are made.
const F16: i32 = 1;
const F16_BYTES: u64 = 2;

/// Blobs of an emulated stage.
pub(super) struct Kv {
    layout: Layout,
    /// Of each block.
    windows: Vec<Option<u32>>,
}

impl Kv {
    /// None for blocks with a recurrent state.
    pub(super) fn new(layers: LayerRange, model: &ModelShape) -> Option<Self> {
        let blocks = || model.blocks.iter().take(layers.end() as usize).skip(layers.start() as usize);
        let layers: Option<Vec<LayerLayout>> = blocks().map(layout_of).collect();
        let window = |block: &BlockShape| match block.kind.attention {
            Attention::SlidingWindow { window } => Some(window),
            Attention::Full | Attention::Recurrent => None,
        };
        let layout = Layout { cells: CellForm::Plain, transposed: false, layers: layers? };
        Some(Self { layout, windows: blocks().map(window).collect() })
    }

    /// A sequence of so many tokens.
    pub(super) fn blob(&self, tokens: u32) -> Blob {
        let first = |layer: usize| {
            self.windows.get(layer).copied().flatten().map_or(0, |window| tokens.saturating_sub(window))
        };
        Blob::blank(&self.layout, first, tokens)
    }

    pub(super) fn facts(&self, config: &WorkerConfig, layers: LayerRange) -> KvFacts {
        let slices = config.slices.iter().map(|slice| {
            let start = slice.layers.start().saturating_sub(layers.start()) as usize;
            let windows = self.windows.iter().skip(start).take(slice.layers.len() as usize);
            let kinds: Vec<CacheKind> =
                windows.map(|window| window.map_or(CacheKind::Full, |_| CacheKind::Window)).collect();
            let has_windows = kinds.contains(&CacheKind::Window);
            let caches = if has_windows { CacheCount::Two } else { CacheCount::One };
            let form = Form { layers: kinds, caches, cells: CellForm::Plain, values: ValueForm::Present };
            SliceForm { form, streams: config.slots }
        });
        KvFacts {
            layers,
            model: ModelHash(config.model_hash),
            n_ctx: config.n_ctx,
            layout: self.layout.clone(),
            slices: slices.collect(),
        }
    }
}

/// Half of a block's elements are keys.
fn layout_of(block: &BlockShape) -> Option<LayerLayout> {
    let elements = block.kv_elements_per_token;
    let (keys, values) = (elements - elements / 2, elements / 2);
    let values = ValueLayout::Rows { element: F16, row_bytes: values * F16_BYTES };
    (elements > 1).then(|| LayerLayout {
        rotation: Rotation::default(),
        key_element: F16,
        key_bytes: keys * F16_BYTES,
        values,
    })
}
