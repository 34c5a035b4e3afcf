//! Where Shoal keeps its files on a host.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// The user has no home folder, so there is no default place for a cache.
#[derive(Debug, Error)]
#[error(
    "the user has no home folder: set SHOAL_CACHE to a folder for slices and other files that can be made again"
)]
pub struct NoHomeFolder;

/// The folders of one user on one host.
#[derive(Debug, Clone)]
pub struct Folders {
    cache: PathBuf,
    models: PathBuf,
}

impl Folders {
    /// The given folders, or, for those not given, `$XDG_CACHE_HOME/shoal` (else `~/.cache/shoal`) and `models` in it.
    pub fn new(cache: Option<PathBuf>, models: Option<PathBuf>) -> Result<Self, NoHomeFolder> {
        let cache = match cache {
            Some(cache) => cache,
            None => user_cache().ok_or(NoHomeFolder)?.join("shoal"),
        };
        let models = models.unwrap_or_else(|| cache.join("models"));
        Ok(Self { cache, models })
    }

    /// Where models are looked for by name.
    pub fn models(&self) -> &Path {
        &self.models
    }

    /// Where slices are kept.
    pub fn slices(&self) -> PathBuf {
        self.cache.join("slices")
    }

    /// Where profiles are kept.
    pub fn profiles(&self) -> PathBuf {
        self.cache.join("profiles")
    }

    /// Where the hashes of models are remembered.
    pub fn model_hashes(&self) -> PathBuf {
        self.cache.join("model-hashes.json")
    }
}

fn user_cache() -> Option<PathBuf> {
    // The XDG specification tells to ignore a relative path.
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_lie_in_the_cache_unless_a_folder_is_given() {
        let cache = PathBuf::from("/c");
        let folders = Folders::new(Some(cache.clone()), None).unwrap();
        assert_eq!(folders.models(), Path::new("/c/models"));
        assert_eq!(folders.slices(), Path::new("/c/slices"));
        let folders = Folders::new(Some(cache), Some("/m".into())).unwrap();
        assert_eq!(folders.models(), Path::new("/m"));
    }
}
