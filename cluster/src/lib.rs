//! The nouns of a Shoal cluster, with their units.
//!
//! Every other crate speaks in these types. They carry no wire format (`protocol` has the twins), do no I/O,
//! read no clock and no environment, and know neither llama.cpp nor tokio.
#![forbid(unsafe_code)]

mod ids;
mod layers;
mod model;
mod replica;
mod units;

pub use ids::{Epoch, ModelHash, RequestId, SlotId, StageIndex, StepId};
pub use layers::{LayerRange, LayerRangeError, split_by_bytes};
pub use model::{
    Attention, BlockKind, BlockShape, CacheRequest, Experts, FeedForward, ModelShape, RangeRefusal, RangeRule,
};
pub use replica::{ReplicaState, StageMemory, StageReport};
pub use units::{Bytes, Millis, TokensPerSecond};
