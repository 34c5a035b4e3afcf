//! The file under whose lock stages of one host compute in turn (`stage::turns` has the reason). Each process that starts
//! workers has its own, so that workers which somebody else has frozen hold up nobody here.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// An empty file for as long as its workers may be started.
#[derive(Debug)]
pub struct TurnsFile {
    path: PathBuf,
    _file: Kept,
}

/// On Linux the file has no name, and is reached through this process: so nothing is left of it, however the process ends.
#[cfg(target_os = "linux")]
type Kept = std::fs::File;

/// Elsewhere it is removed on drop.
#[cfg(not(target_os = "linux"))]
type Kept = tempfile::NamedTempFile;

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
        let (path, file) = make().map_err(TurnsError)?;
        Ok(Self { path, _file: file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(target_os = "linux")]
fn make() -> io::Result<(PathBuf, Kept)> {
    use std::os::fd::AsRawFd;

    let file = tempfile::tempfile()?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((path.into(), file))
}

#[cfg(not(target_os = "linux"))]
fn make() -> io::Result<(PathBuf, Kept)> {
    let file = tempfile::Builder::new().prefix("shoal-turns-").tempfile()?;
    Ok((file.path().to_owned(), file))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use fs4::FileExt;

    use super::*;

    #[test]
    fn whoever_opens_it_by_its_path_finds_the_same_lock() {
        let turns = TurnsFile::new().unwrap();
        let [first, second] = [0, 1].map(|_| File::open(turns.path()).unwrap());
        FileExt::lock(&first).unwrap();
        assert!(FileExt::try_lock(&second).is_err());
    }
}
