//! The caches of an emulated stage: no contents, but which positions they would hold, so that what llama.cpp refuses is refused.

use cluster::{Attention, LayerRange, ModelShape, SlotId};
use protocol::frame::{KvOp, RowRun};
use protocol::worker::WorkerConfig;

use crate::chain::ChainError;

/// What each slot holds.
#[derive(Debug)]
pub(super) struct Cache {
    /// The next position of each slot.
    next: Vec<u32>,
    layers: LayerRange,
    /// Some block keeps one state for the whole sequence.
    is_recurrent: bool,
    /// Smallest window of any block, and the cells kept for it.
    window: Option<Window>,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    tokens: u32,
    cells: u32,
}

impl Cache {
    pub(super) fn new(config: &WorkerConfig, layers: LayerRange, model: &ModelShape) -> Self {
        let blocks = || model.blocks.iter().take(layers.end() as usize).skip(layers.start() as usize);
        let windows = blocks().filter_map(|block| match block.kind.attention {
            Attention::SlidingWindow { window } => Some(window),
            Attention::Full | Attention::Recurrent => None,
        });
        let cells = |tokens: u32| tokens.saturating_add(config.n_ubatch).div_ceil(256).saturating_mul(256);
        Self {
            next: vec![0; config.slots as usize],
            layers,
            is_recurrent: blocks().any(|block| block.kind.attention == Attention::Recurrent),
            window: windows.min().map(|tokens| Window { tokens, cells: cells(tokens) }),
        }
    }

    pub(super) fn clear(&mut self) {
        self.next.fill(0);
    }

    /// Positions that a slot holds.
    pub(super) fn held(&self, slot: SlotId) -> u32 {
        self.next.get(slot.0 as usize).copied().unwrap_or(0)
    }

    /// A slot's sequence is replaced by one of so many tokens.
    pub(super) fn replace(&mut self, slot: SlotId, tokens: u32) {
        *self.next(slot) = tokens;
    }

    pub(super) fn apply(&mut self, op: KvOp) -> Result<(), ChainError> {
        match op {
            KvOp::RemoveFrom { slot, from } => {
                if !self.can_forget(slot, from) {
                    return Err(ChainError::CannotForget { layers: self.layers, slot, from });
                }
                let next = self.next(slot);
                *next = from.min(*next);
            }
            KvOp::Copy { from, to } => *self.next(to) = *self.next(from),
            KvOp::KeepOnly(slot) => {
                let kept = *self.next(slot);
                self.next.fill(0);
                *self.next(slot) = kept;
            }
        }
        Ok(())
    }

    /// Rows of a slot must follow those that it holds.
    pub(super) fn extend(&mut self, run: RowRun) -> Result<(), ChainError> {
        let RowRun { slot, position, n } = run;
        let next = self.next(slot);
        if *next != position {
            return Err(ChainError::NotNext { slot, position, next: *next });
        }
        *next = position.saturating_add(n);
        Ok(())
    }

    /// As `SliceContext::remove_from` decides it.
    fn can_forget(&self, slot: SlotId, from: u32) -> bool {
        let next = self.held(slot);
        if from == 0 || from >= next {
            return true;
        }
        let is_kept =
            |window: Window| next.saturating_sub(window.cells) <= from.saturating_sub(window.tokens);
        !self.is_recurrent && self.window.is_none_or(is_kept)
    }

    /// The next position of a slot. Frames with slots that the stage does not have are refused on receipt.
    fn next(&mut self, slot: SlotId) -> &mut u32 {
        let index = slot.0 as usize;
        if index >= self.next.len() {
            self.next.resize(index + 1, 0);
        }
        &mut self.next[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: SlotId = SlotId(0);

    fn cache(is_recurrent: bool, window: Option<Window>) -> Cache {
        Cache { next: vec![0; 3], layers: LayerRange::new(0, 4).unwrap(), is_recurrent, window }
    }

    fn extend(cache: &mut Cache, slot: SlotId, position: u32, n: u32) -> Result<(), ChainError> {
        cache.extend(RowRun { slot, position, n })
    }

    fn remove(cache: &mut Cache, from: u32) -> Result<(), ChainError> {
        cache.apply(KvOp::RemoveFrom { slot: SLOT, from })
    }

    #[test]
    fn rows_must_follow_what_the_slot_holds() {
        let mut cache = cache(false, None);
        extend(&mut cache, SLOT, 0, 5).unwrap();
        let hole = extend(&mut cache, SLOT, 6, 1).unwrap_err();
        assert_eq!(hole.to_string(), "slot 0 is given position 6, but its next is 5");
        assert!(extend(&mut cache, SLOT, 4, 1).is_err(), "a position twice");
        remove(&mut cache, 3).unwrap();
        extend(&mut cache, SLOT, 3, 1).unwrap();
        assert!(extend(&mut cache, SlotId(1), 4, 1).is_err(), "another slot is empty");
    }

    #[test]
    fn copies_and_removals_do_what_their_names_say() {
        let mut cache = cache(false, None);
        extend(&mut cache, SLOT, 0, 5).unwrap();
        cache.apply(KvOp::Copy { from: SLOT, to: SlotId(2) }).unwrap();
        extend(&mut cache, SlotId(2), 5, 1).unwrap();
        cache.apply(KvOp::KeepOnly(SlotId(2))).unwrap();
        assert_eq!(cache.next, [0, 0, 6]);
        cache.clear();
        assert_eq!(cache.next, [0; 3]);
    }

    #[test]
    fn what_is_not_kept_cannot_be_gone_back_to() {
        let mut recurrent = cache(true, None);
        extend(&mut recurrent, SLOT, 0, 5).unwrap();
        assert!(remove(&mut recurrent, 4).is_err());
        remove(&mut recurrent, 5).unwrap();
        remove(&mut recurrent, 0).unwrap();
        let mut sliding = cache(false, Some(Window { tokens: 10, cells: 256 }));
        extend(&mut sliding, SLOT, 0, 256).unwrap();
        remove(&mut sliding, 200).unwrap();
        extend(&mut sliding, SLOT, 200, 300).unwrap();
        assert!(remove(&mut sliding, 250).is_err());
        remove(&mut sliding, 400).unwrap();
    }
}
