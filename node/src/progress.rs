//! How long work says how far it is, and how it is told to stop.

use std::fmt;
use std::ops::ControlFlow;

use cluster::Bytes;
use protocol::slices::SliceFile;

/// A long piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reading a model to compute its hash.
    Hashing,
    /// Writing slices and the embedding.
    Cutting,
    /// Another process is writing to the same folder.
    Waiting,
    /// Getting a part of a model from another host.
    Receiving(SliceFile),
    /// The other host reads that part to tell its checksum.
    Asking(SliceFile),
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hashing => f.write_str("hashing the model"),
            Self::Cutting => f.write_str("cutting the model"),
            Self::Waiting => f.write_str("waiting for another process that prepares this model"),
            Self::Receiving(file) => write!(f, "receiving {file}"),
            Self::Asking(file) => write!(f, "waiting for the checksum of {file}"),
        }
    }
}

/// How far a piece of work is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The work.
    pub work: Work,
    /// Done so far.
    pub done: Bytes,
    /// All there is to do.
    pub total: Bytes,
}

/// Called often during long work; `Break` stops it, and what was begun is removed.
pub type Observer<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;
