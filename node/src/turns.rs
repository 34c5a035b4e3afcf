//! The file under whose lock stages of one host compute in turn (`stage::turns` has the reason). Each process that starts
//! workers has its own for all replicas that it runs, so that workers which somebody else has frozen hold up nobody here.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tempfile::NamedTempFile;
use thiserror::Error;

/// An empty file for as long as its workers may be started.
#[derive(Debug, Clone)]
pub struct TurnsFile(Arc<NamedTempFile>);

/// There can be no such file.
#[derive(Debug, Error)]
#[error("making the file by which stages take turns, in {}", std::env::temp_dir().display())]
pub struct TurnsError(#[source] io::Error);

impl TurnsFile {
    /// A file in the folder for temporary ones.
    pub fn new() -> Result<Self, TurnsError> {
        let file = tempfile::Builder::new().prefix("shoal-turns-").tempfile().map_err(TurnsError)?;
        Ok(Self(Arc::new(file)))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}
