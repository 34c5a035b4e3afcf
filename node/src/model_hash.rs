//! The hash that names a model: SHA-256 over all parts in order.
//!
//! Reading a large model takes a minute, so hashes are remembered in a small JSON file, keyed by path and valid
//! as long as every part's size and modification time are the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use cluster::{Bytes, ModelHash};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::progress::{Observer, Progress, Work};

/// Raised when the file's contents mean something else; an older file is then made anew.
const VERSION: u32 = 1;

/// Bytes read at once: large enough that a disk's own speed is the limit.
const BLOCK: usize = 1 << 20;

/// Why a model has no hash.
#[derive(Debug, Error)]
pub enum HashError {
    /// A part cannot be read.
    #[error("reading {} to hash it: {source}", path.display())]
    Read {
        /// The part.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The observer asked to stop.
    #[error("hashing the model was stopped")]
    Stopped,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Remembered {
    version: u32,
    models: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    parts: Vec<PartStamp>,
    sha256: String,
}

/// What must not have changed for a remembered hash to be right.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct PartStamp {
    path: PathBuf,
    bytes: u64,
    modified_ns: u64,
}

/// The hash of the model in `parts`, remembered in the file `memory`.
///
/// A memory that cannot be read or written costs time, not correctness, so that is only logged.
pub fn model_hash(
    parts: &[PathBuf],
    memory: &Path,
    observer: &mut Observer<'_>,
) -> Result<ModelHash, HashError> {
    let stamps = parts.iter().map(|part| stamp(part)).collect::<Result<Vec<_>, _>>()?;
    let key = stamps.first().map(|first| first.path.display().to_string()).unwrap_or_default();
    let mut remembered = recall(memory);
    if let Some(hash) =
        remembered.models.get(&key).filter(|e| e.parts == stamps).and_then(|e| from_hex(&e.sha256))
    {
        return Ok(hash);
    }
    let hash = read_and_hash(&stamps, observer)?;
    remembered.version = VERSION;
    remembered.models.insert(key, Entry { parts: stamps, sha256: hash.to_string() });
    if let Err(e) = remember(memory, &remembered) {
        tracing::warn!(file = %memory.display(), error = %e, "the model's hash could not be remembered");
    }
    Ok(hash)
}

/// A model on this host whose remembered hash is this one, if its files are still what they were then.
pub(crate) fn remembered(hash: ModelHash, memory: &Path) -> Option<PathBuf> {
    let wanted = hash.to_string();
    let mut with_hash = recall(memory).models.into_values().filter(|entry| entry.sha256 == wanted);
    let same = |part: &PartStamp| stamp(&part.path).is_ok_and(|now| now == *part);
    let unchanged = with_hash.find(|entry| !entry.parts.is_empty() && entry.parts.iter().all(same));
    unchanged.and_then(|entry| entry.parts.into_iter().next()).map(|first| first.path)
}

fn stamp(part: &Path) -> Result<PartStamp, HashError> {
    let failed = |source| HashError::Read { path: part.to_owned(), source };
    let path = part.canonicalize().map_err(failed)?;
    let metadata = path.metadata().map_err(failed)?;
    Ok(PartStamp { path, bytes: metadata.len(), modified_ns: modified_ns(&metadata) })
}

/// Modification time in nanoseconds since 1970; 0 where the file system keeps none.
pub(crate) fn modified_ns(metadata: &std::fs::Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

fn read_and_hash(stamps: &[PartStamp], observer: &mut Observer<'_>) -> Result<ModelHash, HashError> {
    let total = stamps.iter().map(|part| Bytes(part.bytes)).sum();
    let mut done = Bytes::ZERO;
    let mut hasher = Sha256::new();
    let mut block = vec![0_u8; BLOCK];
    for part in stamps {
        let failed = |source| HashError::Read { path: part.path.clone(), source };
        let mut file = File::open(&part.path).map_err(failed)?;
        loop {
            let n = file.read(&mut block).map_err(failed)?;
            if n == 0 {
                break;
            }
            hasher.update(&block[..n]);
            done += Bytes(n as u64);
            if observer(Progress { work: Work::Hashing, done, total }).is_break() {
                return Err(HashError::Stopped);
            }
        }
    }
    Ok(ModelHash(hasher.finalize().into()))
}

fn recall(memory: &Path) -> Remembered {
    let text = std::fs::read_to_string(memory).unwrap_or_default();
    let remembered: Remembered = serde_json::from_str(&text).unwrap_or_default();
    if remembered.version == VERSION { remembered } else { Remembered::default() }
}

fn remember(memory: &Path, remembered: &Remembered) -> io::Result<()> {
    let folder = memory.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // Written beside and renamed, so that a reader never sees half a file. Of two writers the last wins; what the
    // other had learnt is learnt again.
    let file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer_pretty(&file, remembered)?;
    file.persist(memory)?;
    Ok(())
}

/// Parses what `ModelHash` displays.
pub(crate) fn from_hex(text: &str) -> Option<ModelHash> {
    let mut bytes = [0_u8; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(ModelHash(bytes))
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::slice::from_ref;

    use super::*;

    /// Hashes and counts how often the file was read.
    fn hash(parts: &[PathBuf], memory: &Path) -> (ModelHash, usize) {
        let mut reads = 0;
        let hash = model_hash(parts, memory, &mut |_| {
            reads += 1;
            ControlFlow::Continue(())
        });
        (hash.unwrap(), reads)
    }

    #[test]
    fn a_second_look_reads_nothing_and_a_changed_file_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("cache/hashes.json");
        let model = folder.path().join("m.gguf");
        std::fs::write(&model, b"abc").unwrap();
        let (first, reads) = hash(from_ref(&model), &memory);
        assert_eq!(first.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(reads, 1);
        assert_eq!(hash(from_ref(&model), &memory), (first, 0));
        std::fs::write(&model, b"abcd").unwrap();
        let (second, reads) = hash(&[model], &memory);
        assert_ne!(first, second);
        assert_eq!(reads, 1);
        assert_eq!(remembered(second, &memory).unwrap().file_name(), Some("m.gguf".as_ref()));
        assert_eq!(remembered(first, &memory), None, "the file is another one now");
    }

    #[test]
    fn parts_are_hashed_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&a, b"a").unwrap();
        std::fs::write(&b, b"bc").unwrap();
        let (hash, _) = hash(&[a, b], &folder.path().join("hashes"));
        assert!(hash.to_string().starts_with("ba7816bf"));
    }

    #[test]
    fn a_damaged_memory_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (model, memory) = (folder.path().join("m"), folder.path().join("hashes"));
        std::fs::write(&model, b"abc").unwrap();
        std::fs::write(&memory, b"{\"version\":").unwrap();
        let (first, _) = hash(from_ref(&model), &memory);
        assert_eq!(hash(&[model], &memory), (first, 0));
    }

    #[test]
    fn hashing_stops_when_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m");
        std::fs::write(&model, b"abc").unwrap();
        let stopped = model_hash(&[model], &folder.path().join("h"), &mut |_| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(HashError::Stopped)));
    }
}
