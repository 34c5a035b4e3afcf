//! Reads, validates, describes and cuts GGUF files.
//!
//! Pure: works on bytes it is handed ([`ReadAt`]), opens no file, reads no clock and no environment, and needs no C
//! compiler. What it knows of llama.cpp, it knows from its sources, and says where.
//!
//! - [`Gguf::read`] reads a file, or all parts of a split one, and trusts nothing in it.
//! - [`model_shape`] describes the model: blocks and their kinds, bytes, heads, KV cache.
//! - [`cut`] plans slices (blocks `[a, b)` as a model of their own) and the embedding file, and streams them out.
//! - [`architectures`] is the one table of what can be cut and how.
//! - [`write`](mod@write) writes GGUF files.
#![forbid(unsafe_code)]

pub mod architectures;
pub mod cut;
mod error;
mod model;
mod read;
mod source;
pub mod split;
mod tensor;
mod value;
pub mod write;

pub use error::{Error, Fault, ModelFault, Place, SplitError};
pub use model::model_shape;
pub use read::Gguf;
pub use source::{Part, ReadAt};
pub use tensor::{TensorInfo, TensorType};
pub use value::{Array, Value, ValueType};
