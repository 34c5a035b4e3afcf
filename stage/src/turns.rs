//! Stages of one host take turns: each computes with all cores, one at a time.
//!
//! llama.cpp's threads spin at a barrier after every operation of the graph. Two stages that compute at once on the same
//! cores therefore do not share them but stall each other, and cores that are divided up instead stand idle whenever a
//! stage has nothing to do: with one request, always all but one stage's. So stages that share a host share a file, and
//! whoever computes holds its lock. A process that dies lets go of it; one that freezes is killed by its agent.

use std::fs::File;
use std::io;
use std::path::Path;

use fs4::FileExt;

/// The file, if turns are taken at all.
#[derive(Debug)]
pub(crate) struct Turns(Option<File>);

/// The right to compute; ends on drop.
#[derive(Debug)]
pub(crate) struct Turn<'a>(Option<&'a File>);

impl Turns {
    /// Opens the file; without one, it is always this stage's turn.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
        path.map(File::open).transpose().map(Self)
    }

    /// Waits for a turn.
    pub(crate) fn take(&self) -> io::Result<Turn<'_>> {
        self.0.as_ref().map_or(Ok(()), FileExt::lock)?;
        Ok(Turn(self.0.as_ref()))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // It fails for a file that is not open only.
        let _ = self.0.map(FileExt::unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_computes_at_a_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || Turns::open(Some(file.path())).unwrap();
        let (first, second) = (open(), open());
        let turn = first.take().unwrap();
        assert!(FileExt::try_lock(second.0.as_ref().unwrap()).is_err(), "the first computes");
        drop(turn);
        let _turn = second.take().unwrap();
        assert!(FileExt::try_lock(first.0.as_ref().unwrap()).is_err(), "the second computes");
    }

    #[test]
    fn a_stage_without_a_file_never_waits() {
        let turns = Turns::open(None).unwrap();
        let (_one, _two) = (turns.take().unwrap(), turns.take().unwrap());
    }
}
