//! Writing a slice whole or not at all.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use cluster::Bytes;
use gguf::cut::OutputPlan;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::error::SliceError;
use super::record::{Record, hex};

/// How the name of an unfinished file ends.
pub(super) const PARTIAL: &str = ".partial";

/// Bytes handed to the operating system at once.
const BLOCK: usize = 1 << 20;

/// Writes `plan` to a file beside `path`, and gives it its name when all of it is on the disk. A file that is not
/// finished, for whatever reason, is removed, here or by the next cut.
pub(super) fn write(
    plan: &OutputPlan,
    path: &Path,
    record: &Record,
    observer: &mut dyn FnMut(Bytes) -> ControlFlow<()>,
) -> Result<(), SliceError> {
    let failed = |doing| SliceError::io(doing, path);
    let folder = path.parent().unwrap_or(Path::new("."));
    let file = partial_file(folder).map_err(failed("making a file for"))?;
    let output =
        Output { file: file.as_file(), hasher: Sha256::new(), written: Bytes::ZERO, observer, stopped: None };
    let sha256 = stream(plan, output, path)?;
    file.as_file().sync_all().map_err(failed("writing"))?;
    file.persist(path).map_err(|e| failed("naming")(e.error))?;
    record.store(path, &sha256).map_err(failed("writing the record of"))?;
    sync_folder(folder).map_err(failed("writing the folder of"))
}

/// A file that is removed unless it is given a name.
pub(super) fn partial_file(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(PARTIAL);
    // As any program's files: the user's umask decides who may read them.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Writes all bytes and gives their checksum.
fn stream(plan: &OutputPlan, output: Output<'_>, path: &Path) -> Result<String, SliceError> {
    let mut buffered = BufWriter::with_capacity(BLOCK, output);
    let written = plan.write_to(&mut buffered, &mut |_| {});
    if buffered.get_ref().stopped.is_some() {
        return Err(SliceError::Stopped);
    }
    written.map_err(|source| SliceError::Write { path: path.to_owned(), source: Box::new(source) })?;
    buffered.flush().map_err(SliceError::io("writing", path))?;
    Ok(hex(buffered.into_parts().0.hasher))
}

struct Stopped;

/// A file that is hashed while it is written, and whose writing can be stopped.
struct Output<'a> {
    file: &'a std::fs::File,
    hasher: Sha256,
    written: Bytes,
    observer: &'a mut dyn FnMut(Bytes) -> ControlFlow<()>,
    stopped: Option<Stopped>,
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.written += Bytes(n as u64);
        if (self.observer)(self.written).is_break() {
            self.stopped = Some(Stopped);
            return Err(io::Error::other("stopped"));
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Makes new names in `folder` survive a loss of power.
#[cfg(unix)]
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    std::fs::File::open(folder)?.sync_all()
}

/// Elsewhere a folder cannot be synced; the file system does as it does.
#[cfg(not(unix))]
pub(super) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}
