//! Where the test models are. `scripts/fetch-models.sh` puts them there.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// File name of the default test model.
pub const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The path of a fetched model.
pub fn model_path(file_name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SHOAL_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache/shoal/models")
        }
    };
    let path = folder.join(file_name);
    ensure!(path.is_file(), "{} is missing: run scripts/fetch-models.sh", path.display());
    Ok(path)
}
