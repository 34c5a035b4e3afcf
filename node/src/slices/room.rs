//! Room for slices: what is not used is removed, the longest unused first, when the disk is full or the user's limit is met.
//!
//! When a slice was last used is the time of change of its record, which every use touches. A model's folder that somebody
//! else has locked is left alone, and so is what is in use.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cluster::Bytes;

use super::error::SliceError;
use super::receive::is_partial;
use super::{LOCK, pin, record};

/// Left free on the disk: other programs need some, and so do logs.
const SPARE: Bytes = Bytes::from_mib(64);

/// Where slices may be removed to make room.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    /// The folder with a folder for each model.
    pub(super) root: PathBuf,
    /// What all slices together may take.
    pub(super) limit: Option<Bytes>,
}

/// A file that could go.
struct Entry {
    path: PathBuf,
    bytes: Bytes,
    used: SystemTime,
}

/// Fails if `needed` bytes have no place in `folder`.
pub(super) fn check_space(folder: &Path, needed: Bytes) -> Result<(), SliceError> {
    let available = available(folder)?;
    if needed > Bytes::ZERO && needed + SPARE > available {
        return Err(SliceError::NoSpace { folder: folder.to_owned(), needed: needed + SPARE, available });
    }
    Ok(())
}

fn available(folder: &Path) -> Result<Bytes, SliceError> {
    let free = fs4::available_space(folder).map(Bytes);
    free.map_err(SliceError::io("asking for the free space of", folder))
}

impl Cache {
    /// Removes what is not used until `needed` further bytes have a place in `folder`, which the caller has locked.
    pub(super) fn make_room(&self, folder: &Path, needed: Bytes) -> Result<(), SliceError> {
        if needed == Bytes::ZERO {
            return Ok(());
        }
        let mut entries = self.entries();
        entries.sort_by_key(|entry| entry.used);
        let mut total: Bytes = entries.iter().map(|entry| entry.bytes).sum();
        let over = |total: Bytes| self.limit.is_some_and(|limit| total + needed > limit);
        for entry in entries {
            if !over(total) && needed + SPARE <= available(folder)? {
                break;
            }
            if remove_unused(&entry, folder) {
                total = total.saturating_sub(entry.bytes);
            }
        }
        match self.limit {
            Some(limit) if over(total) => Err(SliceError::OverLimit { needed, limit, in_use: total }),
            _ => check_space(folder, needed),
        }
    }

    fn entries(&self) -> Vec<Entry> {
        let folders = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten());
        files.filter_map(|file| Entry::of(file.path())).collect()
    }
}

impl Entry {
    fn of(path: PathBuf) -> Option<Self> {
        let metadata = path.metadata().ok()?;
        let is_slice = path.extension().is_some_and(|extension| extension == "gguf");
        if !is_slice && !is_partial(&path) {
            return None;
        }
        let record = record::path_for(&path).metadata().ok().filter(|_| is_slice);
        let used = record.as_ref().unwrap_or(&metadata).modified().unwrap_or(SystemTime::UNIX_EPOCH);
        Some(Self { bytes: Bytes(metadata.len()), used, path })
    }
}

/// Removes a file unless it is in use; whether it did. `own` is a folder that is locked for us.
fn remove_unused(entry: &Entry, own: &Path) -> bool {
    let Some(folder) = entry.path.parent() else { return false };
    let lock = (folder != own).then(|| File::create(folder.join(LOCK)));
    let locked = match &lock {
        None => true,
        Some(Ok(lock)) => fs4::FileExt::try_lock(lock).is_ok(),
        Some(Err(_)) => false,
    };
    if !locked || !pin::is_free(&entry.path) {
        return false;
    }
    let removed = fs::remove_file(&entry.path);
    match &removed {
        Ok(()) => {
            // Without its slice a record says nothing; it may never have been there.
            let _ = fs::remove_file(record::path_for(&entry.path));
            tracing::info!(file = %entry.path.display(), bytes = %entry.bytes, "removed an unused slice to make room");
        }
        Err(error) => {
            tracing::warn!(file = %entry.path.display(), %error, "an unused slice cannot be removed")
        }
    }
    removed.is_ok()
}
