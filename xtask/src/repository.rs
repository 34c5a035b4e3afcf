//! The checkout: where it is and what belongs to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A file of the repository.
pub struct RepositoryFile {
    /// Its path from the root, with `/` between the folders.
    pub path: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl RepositoryFile {
    /// Its text; nothing when it is not UTF-8.
    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.bytes).ok()
    }

    /// Whether its name ends with a dot and `extension`.
    pub fn has_extension(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|e| e == extension)
    }
}

/// The root of the checkout.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every file that git has or would take: tracked ones, and new ones that no ignore rule names.
pub fn files() -> Result<Vec<RepositoryFile>> {
    let listed = output_of(Command::new("git").args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut files = Vec::new();
    for path in listed.split('\0').filter(|path| !path.is_empty()) {
        let full = root().join(path);
        // A file that was deleted but not yet from the index is no longer part of the checkout.
        if full.is_file() {
            let bytes = std::fs::read(&full).with_context(|| format!("reading {}", full.display()))?;
            files.push(RepositoryFile { path: path.to_owned(), bytes });
        }
    }
    ensure!(!files.is_empty(), "git lists no files in {}", root().display());
    Ok(files)
}

/// Runs a command at the root and gives what it printed.
pub fn output_of(command: &mut Command) -> Result<String> {
    let output = command.current_dir(root()).output().with_context(|| format!("running {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {errors}", output.status);
    String::from_utf8(output.stdout).context("its output is not UTF-8")
}
