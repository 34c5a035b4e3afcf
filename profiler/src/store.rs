//! Profiles kept in the cache folder: finished ones, and the samples of those that were interrupted.
//!
//! A file's name is a digest of all that a profile depends on, so a profile of another model, device, runtime or number of threads
//! is never taken for this one. What cannot be read is measured again.

use std::io;
use std::path::{Path, PathBuf};

use protocol::plan_files::{PlannerFile, ProfilesFile};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::sampling::Point;

/// Raised when samples mean something else; older ones are then measured again.
const VERSION: u32 = 1;

/// What a profile depends on.
#[derive(Debug, Clone, Serialize)]
pub struct Key {
    /// The host and its processors.
    pub host: String,
    /// ggml's and the product's names.
    pub processors: Vec<(String, String)>,
    /// The model's hash.
    pub model: String,
    /// llama.cpp's version.
    pub runtime: String,
    /// What it was built with.
    pub features: Vec<String>,
    /// CPU threads.
    pub threads: u32,
    /// Tokens per slot.
    pub n_ctx: u32,
}

/// Where one profile is kept.
#[derive(Debug, Clone)]
pub struct ProfileStore {
    finished: PathBuf,
    partial: PathBuf,
}

/// Samples of one point on one processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) processor: String,
    pub(crate) point: Point,
    pub(crate) samples_ms: Vec<f64>,
}

#[derive(Serialize, Deserialize)]
struct Partial {
    version: u32,
    saved: Vec<Saved>,
}

impl ProfileStore {
    /// The place of the profile with this key in `folder`.
    pub fn new(folder: &Path, key: &Key) -> Self {
        // A key of strings and numbers always has a JSON form.
        let text = serde_json::to_string(key).unwrap_or_default();
        let digest = Sha256::digest(text.as_bytes());
        let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self {
            finished: folder.join(format!("{name}.json")),
            partial: folder.join(format!("{name}.partial.json")),
        }
    }

    /// Where the finished profile is, or would be.
    pub fn path(&self) -> &Path {
        &self.finished
    }

    /// Where an interrupted one's samples are.
    pub fn partial_path(&self) -> &Path {
        &self.partial
    }

    /// The finished profile.
    pub fn finished(&self) -> Option<ProfilesFile> {
        let text = std::fs::read_to_string(&self.finished).ok()?;
        let file = ProfilesFile::from_json(&text).and_then(|file| file.profiles().map(|_| file));
        file.inspect_err(|error| tracing::warn!(file = %self.finished.display(), %error, "a kept profile is measured again")).ok()
    }

    /// Keeps a finished profile; what was partial is no longer needed.
    pub(crate) fn finish(&self, file: &ProfilesFile) -> io::Result<()> {
        write(&self.finished, file)?;
        self.forget_partial();
        Ok(())
    }

    pub(crate) fn partial(&self) -> Vec<Saved> {
        let text = std::fs::read_to_string(&self.partial).unwrap_or_default();
        match serde_json::from_str::<Partial>(&text) {
            Ok(Partial { version: VERSION, saved }) => saved,
            _ => Vec::new(),
        }
    }

    pub(crate) fn save_partial(&self, saved: &[Saved]) -> io::Result<()> {
        write(&self.partial, &Partial { version: VERSION, saved: saved.to_vec() })
    }

    /// Forgets the profile and its samples.
    pub fn forget(&self) {
        // It may not be there.
        let _ = std::fs::remove_file(&self.finished);
        self.forget_partial();
    }

    fn forget_partial(&self) {
        // It may not be there.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// Written beside and renamed, so that a reader never sees half a file.
fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer_pretty(&file, value)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use protocol::plan_files::MeasuredPartEntry;

    use super::*;

    fn key(model: &str) -> Key {
        Key {
            host: "desk".to_owned(),
            processors: Vec::new(),
            model: model.to_owned(),
            runtime: "b1".to_owned(),
            features: Vec::new(),
            threads: 2,
            n_ctx: 512,
        }
    }

    #[test]
    fn a_profile_of_another_model_has_another_place() {
        let folder = Path::new("/p");
        assert_eq!(ProfileStore::new(folder, &key("a")).path(), ProfileStore::new(folder, &key("a")).path());
        assert_ne!(ProfileStore::new(folder, &key("a")).path(), ProfileStore::new(folder, &key("b")).path());
    }

    #[test]
    fn samples_are_kept_until_the_profile_is_finished_and_damaged_files_count_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let store = ProfileStore::new(&folder.path().join("profiles"), &key("a"));
        let point = Point { part: MeasuredPartEntry::Hop, layers: None, rows: 8, depth: 0 };
        let saved = vec![Saved { processor: "CPU".to_owned(), point, samples_ms: vec![0.5, 0.25] }];
        store.save_partial(&saved).unwrap();
        assert_eq!(store.partial(), saved);
        std::fs::write(store.partial_path(), "{\"version\": 9, \"saved\": []}").unwrap();
        assert_eq!(store.partial(), []);
        std::fs::write(store.path(), "{\"version\": 9}").unwrap();
        assert!(store.finished().is_none());
        store.finish(&ProfilesFile::new(&[])).unwrap();
        assert!(store.finished().is_some() && !store.partial_path().exists());
    }
}
