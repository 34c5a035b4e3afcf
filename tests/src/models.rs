//! Where the test models are. `scripts/fetch-models.sh` puts them there.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// File name of the default test model.
pub const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The folder of what can be made or fetched again, as the scripts and `shoal` find it.
pub fn cache_folder() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("SHOAL_CACHE") {
        return Ok(PathBuf::from(folder));
    }
    let caches = match std::env::var_os("XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    Ok(caches.join("shoal"))
}

/// The path of a fetched model.
pub fn model_path(file_name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SHOAL_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => cache_folder()?.join("models"),
    };
    let path = folder.join(file_name);
    ensure!(path.is_file(), "{} is missing: run scripts/fetch-models.sh", path.display());
    Ok(path)
}
