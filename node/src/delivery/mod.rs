//! Parts of a model on their way to nodes that have no copy of it (docs/adr/0015-slices-to-nodes.md).
//!
//! `service` gives them out, from a copy of the model or from what is stored (`source`), no faster than it may (`pace`). `fetch`
//! gets them, from one host after the other, and goes on where the one before broke off; `client` is one call of it. What is stored
//! where is decided by `slices`.

mod client;
mod fetch;
mod pace;
mod port;
mod service;
mod source;
#[cfg(test)]
mod tests;

pub(crate) use fetch::Fetcher;
pub(crate) use pace::Pace;
pub use port::SlicePort;
pub(crate) use service::SlicesService;

use cluster::{Bytes, BytesPerSecond};

/// What a host allows for parts of models.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SliceLimits {
    /// On its disk; those in use and no others are kept beyond what fits.
    pub cache: Option<Bytes>,
    /// In each direction, of all transfers together.
    pub rate: Option<BytesPerSecond>,
}
