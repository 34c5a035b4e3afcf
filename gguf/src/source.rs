//! Where bytes come from: positional reads, so that one open file serves many readers and nothing is loaded whole.
//!
//! Knows nothing of the format, opens nothing itself.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Bytes that can be read at any offset, by several threads at once.
#[allow(clippy::len_without_is_empty, reason = "an empty file is only another malformed one")]
pub trait ReadAt: Send + Sync {
    /// Size in bytes; 0 where it cannot be told.
    fn len(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on, or fails.
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// One file of a model.
#[derive(Clone)]
pub struct Part {
    /// What messages call it: its path or file name.
    pub name: String,
    /// Its contents.
    pub bytes: Arc<dyn ReadAt>,
}

impl Part {
    /// A part that is called `name` in messages.
    pub fn new(name: impl Into<String>, bytes: impl ReadAt + 'static) -> Self {
        Self { name: name.into(), bytes: Arc::new(bytes) }
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part").field("name", &self.name).field("len", &self.bytes.len()).finish()
    }
}

impl ReadAt for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.get(at..));
        match from.and_then(|bytes| bytes.get(..buffer.len())) {
            Some(bytes) => {
                buffer.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        ReadAt::len(self.as_slice())
    }

    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_exact_at(offset, buffer)
    }
}

impl ReadAt for &'static [u8] {
    fn len(&self) -> u64 {
        ReadAt::len(*self)
    }

    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        (**self).read_exact_at(offset, buffer)
    }
}

impl ReadAt for File {
    fn len(&self) -> u64 {
        self.metadata().map_or(0, |metadata| metadata.len())
    }

    #[cfg(unix)]
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buffer, offset)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            let read = std::os::windows::fs::FileExt::seek_read(self, buffer, offset)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = &mut buffer[read..];
            offset += read as u64;
        }
        Ok(())
    }
}
