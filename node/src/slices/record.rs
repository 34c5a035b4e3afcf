//! The record beside each slice: what it was cut from and what its bytes must be.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use cluster::ModelHash;
use gguf::cut::OutputPlan;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::write::partial_file;
use crate::model_hash::modified_ns;

/// Raised whenever the cutter writes other tensor data for the same model and layers, so that slices of an earlier
/// version are cut again. Another header needs no new number: it is compared.
const CUTTER: u32 = 1;

/// What a slice must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    cutter: u32,
    model: String,
    bytes: u64,
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
    pub(super) fn new(model: ModelHash, bytes: u64) -> Self {
        Self { cutter: CUTTER, model: model.to_string(), bytes }
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

/// Whether the file at `slice` is complete, undamaged, and what `plan` would write.
pub(super) fn is_intact(slice: &Path, plan: &OutputPlan, wanted: &Record) -> bool {
    let (Ok(text), Ok(metadata)) = (std::fs::read(path_for(slice)), slice.metadata()) else {
        return false;
    };
    let Ok(stored) = serde_json::from_slice::<Stored>(&text) else { return false };
    if stored.record != *wanted || metadata.len() != wanted.bytes || !has_header_of(slice, plan) {
        return false;
    }
    // Someone touched the file, if only to copy it: look at all of it, and spare the next start the work.
    let untouched = stored.modified_ns == modified_ns(&metadata);
    untouched
        || (checksum(slice).is_ok_and(|sum| sum == stored.sha256)
            && wanted.store(slice, &stored.sha256).is_ok())
}

/// Whether the file begins as the cutter would write it now: another version of Shoal may have cut it otherwise.
fn has_header_of(slice: &Path, plan: &OutputPlan) -> bool {
    let Ok(file) = File::open(slice) else { return false };
    // All that is not tensor data; of the padding, which lies among the tensors, somewhat more than the header.
    let left = plan.len().saturating_sub(plan.tensor_bytes());
    let mut comparison = Comparison { file: BufReader::new(file), left };
    // It ends with an error in any case: at a difference, or at the end of the header.
    let _ = plan.write_to(&mut comparison, &mut |_| {});
    comparison.left == 0
}

/// Compares what is written with a file, as far as that is asked for.
struct Comparison {
    file: BufReader<File>,
    left: u64,
}

impl Write for Comparison {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let mut there = vec![0; n];
        self.file.read_exact(&mut there)?;
        if n == 0 || there != bytes[..n] {
            return Err(io::Error::other("the comparison has ended"));
        }
        self.left -= n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
    ModelHash(hasher.finalize().into()).to_string()
}
