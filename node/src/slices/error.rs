//! Why slices cannot be had.

use std::io;
use std::path::{Path, PathBuf};

use cluster::Bytes;
use gguf::cut::CutError;
use protocol::slices::SliceFile;
use thiserror::Error;

/// Why slices could not be had.
#[derive(Debug, Error)]
pub enum SliceError {
    /// The model cannot be cut so.
    #[error(transparent)]
    Cut(Box<CutError>),
    /// The disk has no room.
    #[error(
        "the parts of the model need {needed} in {} and {available} are free there: free some space, or set \
         SHOAL_CACHE to a folder on another disk", folder.display()
    )]
    NoSpace {
        /// Where the slices were to be written.
        folder: PathBuf,
        /// What they need.
        needed: Bytes,
        /// What there is.
        available: Bytes,
    },
    /// The limit on all slices leaves no room, though those that nobody uses were removed.
    #[error(
        "the parts of the model need {needed}, and --slice-cache allows {limit} for all slices on this host, of which \
         {in_use} are in use"
    )]
    OverLimit {
        /// What they need.
        needed: Bytes,
        /// What the user allows.
        limit: Bytes,
        /// Of slices that are loaded or being written.
        in_use: Bytes,
    },
    /// A file of that name is already there and is something else.
    #[error("{} exists and is not this slice: remove it or choose another folder", .0.display())]
    Exists(PathBuf),
    /// The folder or a file in it cannot be used.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The model could not be read while it was cut.
    #[error("writing {}: {source}", path.display())]
    Write {
        /// The slice.
        path: PathBuf,
        /// What went wrong.
        source: Box<gguf::Error>,
    },
    /// No other host has it, or none can be reached.
    #[error("{file} cannot be had from any other host: {}", reasons.join("; "))]
    NoSource {
        /// What was wanted.
        file: SliceFile,
        /// Why, of each host.
        reasons: Vec<String>,
    },
    /// It came twice, and twice its bytes were not the right ones.
    #[error("{file} came with wrong bytes twice: sha256 {got} instead of {wanted}")]
    WrongBytes {
        /// What was wanted.
        file: SliceFile,
        /// Of what came.
        got: String,
        /// Of what it must be.
        wanted: String,
    },
    /// The observer asked to stop.
    #[error("preparing the model was stopped")]
    Stopped,
}

impl From<CutError> for SliceError {
    fn from(error: CutError) -> Self {
        Self::Cut(Box::new(error))
    }
}

impl SliceError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_owned(), source }
    }
}
