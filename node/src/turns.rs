//! The file under whose lock stages of one host compute in turn (`stage::turns` has the reason). Each process that starts
//! workers has its own, so that workers which somebody else has frozen hold up nobody here.

use std::io;
use std::path::Path;

use tempfile::NamedTempFile;
use thiserror::Error;

/// An empty file for as long as its workers may be started.
#[derive(Debug)]
pub struct TurnsFile(NamedTempFile);

/// There can be no such file.
#[derive(Debug, Error)]
#[error("making the file by which stages take turns, in {}", std::env::temp_dir().display())]
pub struct TurnsError(#[source] io::Error);

impl TurnsFile {
    /// Makes one among the host's temporary files.
    ///
    /// # Errors
    /// When there can be none.
    pub fn new() -> Result<Self, TurnsError> {
        tempfile::Builder::new().prefix("shoal-turns-").tempfile().map(Self).map_err(TurnsError)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}
