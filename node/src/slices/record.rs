//! The record beside each slice: what it was cut from and what its bytes must be.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cluster::ModelHash;
use protocol::slices::SliceForm;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::write::partial_file;
use crate::model_hash::modified_ns;

/// Raised whenever the cutter writes other tensor data for the same model and layers, so that slices of an earlier
/// version are cut again. Another header needs no new number: its checksum is compared.
pub(crate) const CUTTER: u32 = 1;

/// What a slice must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    cutter: u32,
    model: String,
    bytes: u64,
    header_sha256: String,
}

/// A record as it is stored: with what was learnt by writing the file.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    record: Record,
    sha256: String,
    /// While the file's own is the same, its checksum need not be computed again.
    modified_ns: u64,
}

impl Record {
    pub(crate) fn new(model: ModelHash, form: &SliceForm) -> Self {
        let header_sha256 = hex_of(form.header_sha256);
        Self { cutter: CUTTER, model: model.to_string(), bytes: form.bytes.0, header_sha256 }
    }

    /// Stores the record of the complete file at `slice`, whose bytes have the given checksum.
    pub(super) fn store(&self, slice: &Path, sha256: &str) -> io::Result<()> {
        let modified_ns = modified_ns(&slice.metadata()?);
        let stored = Stored { record: self.clone(), sha256: sha256.to_owned(), modified_ns };
        let folder = slice.parent().unwrap_or(Path::new("."));
        let file = partial_file(folder)?;
        serde_json::to_writer_pretty(&file, &stored)?;
        file.as_file().sync_all()?;
        file.persist(path_for(slice))?;
        Ok(())
    }
}

/// Where the record of a slice lies.
pub(super) fn path_for(slice: &Path) -> PathBuf {
    slice.with_extension("json")
}

/// The checksum of the file at `slice`, if it is complete, undamaged, and what it must be.
pub(super) fn intact(slice: &Path, wanted: &Record) -> Option<String> {
    let (text, metadata) = (std::fs::read(path_for(slice)).ok()?, slice.metadata().ok()?);
    let stored: Stored = serde_json::from_slice(&text).ok()?;
    if stored.record != *wanted || metadata.len() != wanted.bytes {
        return None;
    }
    // Someone touched the file, if only to copy it: look at all of it, and spare the next start the work.
    let untouched = stored.modified_ns == modified_ns(&metadata);
    let is_right = untouched
        || (checksum(slice).is_ok_and(|sum| sum == stored.sha256)
            && wanted.store(slice, &stored.sha256).is_ok());
    is_right.then_some(stored.sha256)
}

/// Notes that the slice is used now.
pub(super) fn touch(slice: &Path) -> io::Result<()> {
    File::options().append(true).open(path_for(slice))?.set_modified(SystemTime::now())
}

fn checksum(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut block = vec![0_u8; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex(hasher)),
            n => hasher.update(&block[..n]),
        }
    }
}

/// The checksum as text.
pub(super) fn hex(hasher: Sha256) -> String {
    hex_of(hasher.finalize().into())
}

/// The same of one that is there.
pub(super) fn hex_of(sha256: [u8; 32]) -> String {
    ModelHash(sha256).to_string()
}
