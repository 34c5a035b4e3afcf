//! Safe, owning layer over llama.cpp: models, vocabularies, contexts that run slices, embedding tables, samplers,
//! grammars and chat templates.
//!
//! One file per concept of llama.cpp. Handles keep what they need alive (a context holds its model), so drop order is
//! structural. Arguments are checked before C would assert; what cannot be checked can still end the process, which is
//! why execution lives in a child process (docs/adr). This crate knows nothing of requests, frames, stages or HTTP.

mod backend;
mod batch;
pub mod chat;
mod context;
mod device;
mod embedding;
mod error;
pub mod grammar;
mod memory;
mod model;
mod nesting;
pub mod sampler;
mod shim;
mod threads;
mod vocab;

/// Slots' keys and values as bytes: how they are read, cut by layer and put together.
pub use kv_blob;

#[cfg(feature = "testing")]
pub mod testing;

pub use backend::{init_logging, version};
pub use batch::{RowInput, Rows};
pub use chat::*;
pub use context::{ContextParams, FlashAttention, KvLayout, KvType, Numerics, Output, SliceContext};
pub use device::{Device, DeviceKind, devices};
pub use embedding::{EMBEDDING_ARCHITECTURE, EMBEDDING_SCALE_KEY, EmbeddingTable};
pub use error::{Error, RowsError};
pub use grammar::*;
pub use memory::{MemoryBreakdown, MemoryPlace, MemoryUse, release_freed_memory};
pub use model::{Content, ExtraBuffers, Gpus, LoadProgress, MemoryMap, Model, ModelParams};
pub use sampler::*;
pub use vocab::{AddSpecial, Special, Token, Vocab, VocabularyFacts};
