//! How long work says how far it is, and how it is told to stop.

use std::fmt;
use std::ops::ControlFlow;

use cluster::Bytes;

/// A long piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reading a model to compute its hash.
    Hashing,
    /// Writing slices and the embedding.
    Cutting,
    /// Another process is writing to the same folder.
    Waiting,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hashing => "hashing the model",
            Self::Cutting => "cutting the model",
            Self::Waiting => "waiting for another process that is cutting this model",
        })
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
