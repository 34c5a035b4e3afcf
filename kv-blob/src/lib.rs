//! What `llama_state_seq_get_data` gives of one sequence: read, cut by layer, put together for another cut, and written for
//! `llama_state_seq_set_data`. The form is llama.cpp's own and is pinned with it (llama-kv-cache.cpp, `state_write`).
//!
//! Nothing that is read is trusted: every count and length is checked against what there is, and nothing is allocated beyond
//! the input's size. Keys and values themselves are never looked into, and hardly ever copied: cutting and merging pass
//! references to the input around. A blob that has been read, or made of such blobs, is whole: each layer has what its
//! [`Form`] says, and positions follow each other.
//!
//! Pure Rust without llama.cpp, so that it can be fuzzed alone. It knows neither slots, nor stages, nor how blobs travel.
//!
//! | form | is |
//! | --- | --- |
//! | V as rows or transposed (without flash attention) | read, cut, merged and written as it is |
//! | a cache per sequence, or one for all | only a count in front; a blob is written for either |
//! | sliding windows | a second cache with the positions not masked; whether a slice has it depends on its cut |
//! | M-RoPE | cells carry two more positions and a token |
//! | multi-head latent attention | no values |
//! | recurrent states | not read: they belong to a whole sequence, not to positions |
#![forbid(unsafe_code)]

mod blob;
mod cursor;
mod error;
mod form;
mod layer;
mod layout;
mod read;
mod write;

pub use blob::Blob;
pub use error::BlobError;
pub use form::{CacheCount, CacheKind, CellForm, Form, ValueForm};
pub use layout::{LayerLayout, Layout, Rotation, ValueLayout};
pub use write::{Place, Prepared};
