//! What replicas say to each other when a slot's keys and values change hands, checked; and the header that goes ahead of
//! them, in which both sides must agree. Knows nothing of the bytes that follow it.

use std::time::Duration;

use cluster::{Epoch, LayerRange, LayerRangeError, ModelHash, SlotId};
use thiserror::Error;

use crate::v1;

/// Version of the header and of the form of what follows. Raise it with every change to either.
pub const VERSION: u32 = 1;

/// Bytes of a piece, at most.
pub const PIECE: usize = 1 << 20;

/// Stages that a replica may have at most, far above what is useful.
const MAX_STAGES: usize = 1024;

/// A stage of a replica, as other hosts reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainStage {
    /// `host:port`.
    pub address: String,
    /// Its blocks.
    pub layers: LayerRange,
}

/// A slot of a replica that keeps a sequence for others to pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldSlot {
    /// Of the replica.
    pub epoch: Epoch,
    /// The slot.
    pub slot: SlotId,
    /// Tells this hold from later ones of the slot.
    pub hold: u64,
    /// Tokens of the sequence, at least 1.
    pub tokens: u32,
    /// The replica's stages, in order: all of its blocks, without a gap.
    pub chain: Vec<ChainStage>,
}

/// What a request has to do with another replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HandOff {
    /// Nothing.
    #[default]
    None,
    /// Prefill only: after its first token it keeps its slot for so long, for another to pull.
    Hold(Duration),
    /// The beginning of its prompt is in a slot there.
    From(HeldSlot),
}

/// What goes ahead of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvHeader {
    /// The model's hash.
    pub model: ModelHash,
    /// llama.cpp, as it names itself.
    pub llama_cpp: String,
    /// Blocks that follow.
    pub layers: LayerRange,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Bytes that follow.
    pub bytes: u64,
    /// How they lie.
    pub layout: KvLayout,
    /// Blocks that are in a second cache.
    pub windowed: Vec<u32>,
}

/// How keys and values lie, as far as it is the same for all blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Cells say more than a position.
    pub extended_cells: bool,
    /// Values are cached beside the keys.
    pub values: bool,
    /// Values are transposed.
    pub transposed_values: bool,
    /// ggml's number of the keys' type.
    pub key_type: i32,
    /// ggml's number of the values' type; −1 without values.
    pub value_type: i32,
}

/// Why a message about a hand-off is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum HandOffError {
    #[error("no held slot is named")]
    NoSlot,
    #[error("the held slot has no tokens")]
    NoTokens,
    #[error("the chain has {got} stages, more than {MAX_STAGES}")]
    TooManyStages { got: usize },
    #[error("the chain's blocks go from {end} on to {start}")]
    Gap { end: u32, start: u32 },
    #[error(transparent)]
    Layers(#[from] LayerRangeError),
    #[error("the model's hash has {got} bytes, not 32")]
    HashLength { got: usize },
    #[error("{what} of the prefill side is {theirs}, of this side {own}")]
    Mismatch { what: &'static str, theirs: String, own: String },
    #[error("{bytes} bytes are announced, but {tokens} tokens of blocks {layers} take at most {most}")]
    TooLarge { bytes: u64, tokens: u32, layers: LayerRange, most: u64 },
}

/// Checks a chain: blocks from 0 on, without a gap. An empty one is none.
///
/// # Errors
/// Says where it breaks.
pub fn check_chain(wire: Vec<v1::ChainStage>) -> Result<Vec<ChainStage>, HandOffError> {
    if wire.len() > MAX_STAGES {
        return Err(HandOffError::TooManyStages { got: wire.len() });
    }
    let mut end = 0;
    wire.into_iter()
        .map(|v1::ChainStage { address, first_block, end_block }| {
            let layers = LayerRange::new(first_block, end_block)?;
            if layers.start() != end {
                return Err(HandOffError::Gap { end, start: layers.start() });
            }
            end = layers.end();
            Ok(ChainStage { address, layers })
        })
        .collect()
}

impl HeldSlot {
    /// Checks every field.
    ///
    /// # Errors
    /// When a field makes no sense by itself.
    pub fn check(wire: v1::HeldSlot) -> Result<Self, HandOffError> {
        if wire.tokens == 0 {
            return Err(HandOffError::NoTokens);
        }
        Ok(Self {
            epoch: Epoch(wire.epoch),
            slot: SlotId(wire.slot),
            hold: wire.hold,
            tokens: wire.tokens,
            chain: check_chain(wire.chain)?,
        })
    }

    /// As [`check`](Self::check), of one that must be there.
    ///
    /// # Errors
    /// When it is not, too.
    pub fn required(wire: Option<v1::HeldSlot>) -> Result<Self, HandOffError> {
        Self::check(wire.ok_or(HandOffError::NoSlot)?)
    }
}

impl KvHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// When it is of another version, or makes no sense.
    pub fn check(wire: v1::KvHeader) -> Result<Self, HandOffError> {
        if wire.version != VERSION {
            return Err(mismatch("version", wire.version, VERSION));
        }
        let model = <[u8; 32]>::try_from(&wire.model_hash[..]);
        Ok(Self {
            model: ModelHash(model.map_err(|_| HandOffError::HashLength { got: wire.model_hash.len() })?),
            llama_cpp: wire.llama_cpp,
            layers: LayerRange::new(wire.first_block, wire.end_block)?,
            tokens: wire.tokens,
            bytes: wire.bytes,
            layout: KvLayout {
                extended_cells: wire.extended_cells,
                values: wire.values,
                transposed_values: wire.transposed_values,
                key_type: wire.key_type,
                value_type: wire.value_type,
            },
            windowed: wire.windowed_blocks,
        })
    }

    /// Whether the other side's keys and values are what this side would have computed, as far as can be told.
    /// `self` is the other's; `own` is what this side would send, with the most bytes it could be.
    ///
    /// # Errors
    /// The first difference, with both sides.
    pub fn agrees_with(&self, own: &Self) -> Result<(), HandOffError> {
        let sides = [
            ("the model's hash", self.model.to_string(), own.model.to_string()),
            ("llama.cpp", self.llama_cpp.clone(), own.llama_cpp.clone()),
            ("the range of blocks", self.layers.to_string(), own.layers.to_string()),
            ("the number of tokens", self.tokens.to_string(), own.tokens.to_string()),
            ("the cache's layout", format!("{:?}", self.layout), format!("{:?}", own.layout)),
        ];
        if let Some((what, theirs, own)) = sides.into_iter().find(|(_, theirs, own)| theirs != own) {
            return Err(HandOffError::Mismatch { what, theirs, own });
        }
        if self.bytes > own.bytes {
            let Self { bytes, tokens, layers, .. } = *self;
            return Err(HandOffError::TooLarge { bytes, tokens, layers, most: own.bytes });
        }
        Ok(())
    }
}

fn mismatch(what: &'static str, theirs: impl ToString, own: impl ToString) -> HandOffError {
    HandOffError::Mismatch { what, theirs: theirs.to_string(), own: own.to_string() }
}

impl From<ChainStage> for v1::ChainStage {
    fn from(ChainStage { address, layers }: ChainStage) -> Self {
        Self { address, first_block: layers.start(), end_block: layers.end() }
    }
}

impl From<HeldSlot> for v1::HeldSlot {
    fn from(HeldSlot { epoch, slot, hold, tokens, chain }: HeldSlot) -> Self {
        Self {
            epoch: epoch.0,
            slot: slot.0,
            hold,
            tokens,
            chain: chain.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<KvHeader> for v1::KvHeader {
    fn from(header: KvHeader) -> Self {
        let KvLayout { extended_cells, values, transposed_values, key_type, value_type } = header.layout;
        Self {
            version: VERSION,
            model_hash: header.model.0.to_vec().into(),
            llama_cpp: header.llama_cpp,
            first_block: header.layers.start(),
            end_block: header.layers.end(),
            tokens: header.tokens,
            bytes: header.bytes,
            extended_cells,
            values,
            transposed_values,
            windowed_blocks: header.windowed,
            key_type,
            value_type,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> KvHeader {
        KvHeader {
            model: ModelHash([7; 32]),
            llama_cpp: "b1".to_owned(),
            layers: LayerRange::new(3, 9).unwrap(),
            tokens: 40,
            bytes: 1000,
            layout: KvLayout {
                extended_cells: false,
                values: true,
                transposed_values: false,
                key_type: 1,
                value_type: 1,
            },
            windowed: vec![4],
        }
    }

    #[test]
    fn a_header_comes_back_whole_and_agrees_with_itself() {
        let back = KvHeader::check(header().into()).unwrap();
        assert_eq!(back, header());
        back.agrees_with(&header()).unwrap();
    }

    #[test]
    fn what_differs_is_named_with_both_sides() {
        let refusal = |change: fn(&mut KvHeader)| {
            let mut theirs = header();
            change(&mut theirs);
            theirs.agrees_with(&header()).unwrap_err().to_string()
        };
        let hashes = refusal(|theirs| theirs.model = ModelHash([8; 32]));
        assert!(hashes.contains("0808") && hashes.contains("0707"), "{hashes}");
        assert_eq!(
            refusal(|theirs| theirs.llama_cpp = "b2".to_owned()),
            "llama.cpp of the prefill side is b2, of this side b1"
        );
        assert!(refusal(|theirs| theirs.layers = LayerRange::new(3, 8).unwrap()).contains("3..8"));
        assert!(refusal(|theirs| theirs.tokens = 41).contains("41"));
        assert!(refusal(|theirs| theirs.layout.transposed_values = true).contains("transposed_values: true"));
        assert!(refusal(|theirs| theirs.bytes = 1001).contains("1001 bytes are announced"));
        let wire = v1::KvHeader { version: 2, ..header().into() };
        let version = KvHeader::check(wire).unwrap_err().to_string();
        assert_eq!(version, "version of the prefill side is 2, of this side 1");
        let wire = v1::KvHeader { model_hash: vec![1; 31].into(), ..header().into() };
        assert_eq!(KvHeader::check(wire), Err(HandOffError::HashLength { got: 31 }));
    }

    #[test]
    fn a_chain_has_every_block_once() {
        let stage =
            |first_block, end_block| v1::ChainStage { address: "h:1".to_owned(), first_block, end_block };
        assert_eq!(check_chain(vec![stage(0, 4), stage(4, 6)]).unwrap().len(), 2);
        assert_eq!(check_chain(vec![stage(0, 4), stage(5, 6)]), Err(HandOffError::Gap { end: 4, start: 5 }));
        assert!(check_chain(vec![stage(1, 4)]).is_err());
        assert!(check_chain(vec![stage(0, 0)]).is_err());
        let many = vec![stage(0, 1); MAX_STAGES + 1];
        assert!(matches!(check_chain(many), Err(HandOffError::TooManyStages { .. })));
        let slot = HeldSlot {
            epoch: Epoch(3),
            slot: SlotId(1),
            hold: 9,
            tokens: 12,
            chain: check_chain(vec![stage(0, 4)]).unwrap(),
        };
        assert_eq!(HeldSlot::required(Some(slot.clone().into())).unwrap(), slot);
        assert_eq!(HeldSlot::required(None), Err(HandOffError::NoSlot));
        let empty = v1::HeldSlot { tokens: 0, ..slot.into() };
        assert_eq!(HeldSlot::check(empty), Err(HandOffError::NoTokens));
    }
}
