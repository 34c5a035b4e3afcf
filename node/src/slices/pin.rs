//! Slices in use. Whoever uses one holds a shared lock on its file, whichever process it is; what is locked is not evicted. The
//! lock ends with its process, however that ends.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Keeps a slice on the disk for as long as it lives.
#[derive(Debug, Clone)]
pub struct Pin(#[allow(dead_code, reason = "it is held, not looked at")] Arc<File>);

impl Pin {
    /// Holds on to the file at `path`.
    pub(crate) fn hold(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        fs4::FileExt::lock_shared(&file)?;
        Ok(Self(Arc::new(file)))
    }
}

/// Whether nobody holds on to the file at `path`.
pub(super) fn is_free(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| fs4::FileExt::try_lock(&file).is_ok())
}
