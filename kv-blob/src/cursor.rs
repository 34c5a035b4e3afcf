//! Walks through a blob's bytes. Gives no byte that is not there, and no count that the rest has no room for.

use bytes::Bytes;

use crate::BlobError;

pub(crate) struct Cursor {
    rest: Bytes,
    at: usize,
}

impl Cursor {
    pub(crate) const fn new(bytes: Bytes) -> Self {
        Self { rest: bytes, at: 0 }
    }

    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `n` bytes, without copying.
    pub(crate) fn take(&mut self, n: u64, what: &'static str) -> Result<Bytes, BlobError> {
        match usize::try_from(n).ok().filter(|n| *n <= self.rest.len()) {
            Some(n) => {
                self.at += n;
                Ok(self.rest.split_to(n))
            }
            None => Err(BlobError::Short { what, at: self.at, needed: n, left: self.rest.len() }),
        }
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, BlobError> {
        let bytes = self.take(4, what)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    pub(crate) fn i32(&mut self, what: &'static str) -> Result<i32, BlobError> {
        Ok(self.u32(what)?.cast_signed())
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, BlobError> {
        let bytes = self.take(8, what)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// A field that can only have one value.
    pub(crate) fn expect(&mut self, what: &'static str, wanted: u32) -> Result<(), BlobError> {
        let at = self.at;
        let got = self.u32(what)?;
        if got == wanted {
            return Ok(());
        }
        Err(BlobError::Field { what, at, got: u64::from(got), wanted: wanted.to_string() })
    }
}
