//! Slices on disk: cut or received once, whole or not at all, and used again.
//!
//! A folder holds the slices of one model, its embedding, and beside each file a record of what it must be. Files
//! appear under their names only when complete; what an interrupted cut left behind is removed by the next one, and what
//! has come from another host is gone on with. A lock keeps two processes from writing into one folder at once.

mod error;
mod folder;
mod pin;
mod receive;
mod record;
mod room;
#[cfg(test)]
mod tests;
mod write;

use std::io;
use std::path::PathBuf;

use cluster::{Bytes, LayerRange, ModelHash};
use gguf::cut::{CutOptions, OutputPlan};
use protocol::slices::{SliceFile, SliceForm, SliceId};
use sha2::{Digest, Sha256};

use crate::model_file::ModelFile;
use crate::progress::Observer;
pub use error::SliceError;
pub(crate) use folder::{Arrival, Deliver, FetchRequest};
pub use folder::{Existing, SliceFolder};
pub use pin::Pin;
pub(crate) use receive::{Receiving, Verdict};
pub(crate) use record::CUTTER;
use room::Cache;

/// A folder's lock.
const LOCK: &str = ".lock";

/// Whether a file was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// An earlier cut.
    Reused,
    /// Cut or received now.
    Written,
}

/// A slice or embedding on disk.
#[derive(Debug, Clone)]
pub struct StoredFile {
    /// Where.
    pub path: PathBuf,
    /// How large.
    pub bytes: Bytes,
    /// Since when.
    pub origin: Origin,
    /// Keeps it there.
    pub pin: Pin,
}

/// All that the stages of a replica load.
#[derive(Debug, Clone)]
pub struct StoredSlices {
    /// One per range, in the order asked for.
    pub slices: Vec<StoredFile>,
    /// Looked up by the first stage.
    pub embedding: StoredFile,
}

/// What to cut.
pub struct CutRequest<'a> {
    /// From what.
    pub model: &'a ModelFile,
    /// Its hash.
    pub hash: ModelHash,
    /// One slice for each.
    pub ranges: &'a [LayerRange],
    /// Which architectures may be cut.
    pub options: CutOptions,
}

/// The slices of all models on this host, a folder per model.
#[derive(Debug, Clone)]
pub struct SliceStore {
    root: PathBuf,
    limit: Option<Bytes>,
}

/// A stored slice that is about to be read by others.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) sha256: [u8; 32],
    pub(crate) pin: Pin,
}

impl SliceStore {
    /// The store in `root`, which is made when first needed.
    pub fn new(root: PathBuf) -> Self {
        Self { root, limit: None }
    }

    /// The same, with at most so many bytes in it, if that is limited.
    #[must_use]
    pub fn limited(self, limit: Option<Bytes>) -> Self {
        Self { limit, ..self }
    }

    /// The slices asked for: those that are missing or damaged are cut.
    pub fn ensure(
        &self,
        request: &CutRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<StoredSlices, SliceError> {
        self.folder(request.hash).ensure(request, observer)
    }

    /// The files asked for, in that order: those that are missing or damaged are fetched.
    pub(crate) fn fetch(
        &self,
        request: FetchRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<Vec<StoredFile>, SliceError> {
        self.folder(request.model).fetch(request, observer)
    }

    /// A file, if it is there whole.
    pub(crate) fn find(&self, id: &SliceId) -> Option<Found> {
        if id.cutter != CUTTER {
            return None;
        }
        let path = self.root.join(id.model.to_string()).join(file_name(id.file));
        let pin = Pin::hold(&path).ok()?;
        let sha256 = record::intact(&path, &record::Record::new(id.model, &id.form))?;
        let sha256 = crate::model_hash::from_hex(&sha256)?.0;
        Some(Found { path, sha256, pin })
    }

    fn folder(&self, model: ModelHash) -> SliceFolder {
        let cache = Cache { root: self.root.clone(), limit: self.limit };
        SliceFolder::cached(self.root.join(model.to_string()), cache)
    }
}

/// What a file of a folder is called.
pub(crate) fn file_name(file: SliceFile) -> String {
    match file {
        SliceFile::Blocks(layers) => SliceFolder::slice_name(layers),
        SliceFile::Embedding => "embedding.gguf".to_owned(),
    }
}

/// What a planned file is, as far as it is known without reading tensor data.
pub(crate) fn form_of(plan: &OutputPlan) -> SliceForm {
    let header_sha256 = Sha256::digest(plan.header()).into();
    SliceForm { bytes: Bytes(plan.len()), tensor_bytes: Bytes(plan.tensor_bytes()), header_sha256 }
}

impl StoredFile {
    /// Removes the file and its record.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(record::path_for(&self.path))?;
        std::fs::remove_file(&self.path)
    }
}
