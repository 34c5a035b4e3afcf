//! A slice that comes from another host, in the making. What has come stays under a name of its own until all of it is there and
//! right, also when the process ends: the next one goes on from there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use cluster::Bytes;
use sha2::{Digest, Sha256};

use super::error::SliceError;
use super::record::{Record, hex, hex_of};
use super::write::sync_folder;

/// How the name of what is not whole yet ends.
const RECEIVING: &str = ".receiving";

/// Bytes read at once to hash what came before.
const BLOCK: usize = 1 << 20;

/// A file that is being received.
#[derive(Debug)]
pub(crate) struct Receiving {
    path: PathBuf,
    /// Under which name it will be seen.
    whole: PathBuf,
    file: File,
    hasher: Sha256,
    received: u64,
    bytes: u64,
    sha256: [u8; 32],
}

/// What all bytes of a file turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// What they must be; the file is there.
    Right,
    /// Something else, whose hash this is; nothing is left of it.
    Wrong(String),
}

/// Whether this is the name of a file in the making.
pub(super) fn is_partial(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(RECEIVING))
}

/// Bytes that have come of the file that will be at `whole`, whatever they are.
pub(super) fn received_before(whole: &Path) -> Bytes {
    partials(whole).iter().filter_map(|path| path.metadata().ok()).map(|metadata| Bytes(metadata.len())).sum()
}

/// What has come of a file; of other contents under the same name too.
pub(super) fn partials(whole: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (whole.parent(), whole.file_name()) else { return Vec::new() };
    let prefix = format!(".{}.", name.to_string_lossy());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let ours = |path: &PathBuf| {
        is_partial(path) && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    };
    entries.filter(ours).collect()
}

impl Receiving {
    /// Goes on with what has come of the file with this checksum, or begins. The folder is locked for us.
    pub(crate) fn open(whole: &Path, bytes: Bytes, sha256: [u8; 32]) -> Result<Self, SliceError> {
        let name = whole.file_name().unwrap_or_default().to_string_lossy();
        let path = whole.with_file_name(format!(".{name}.{}{RECEIVING}", hex_of(sha256)));
        for other in partials(whole).into_iter().filter(|other| *other != path) {
            fs::remove_file(&other).map_err(SliceError::io("removing", &other))?;
        }
        let failed = |doing| SliceError::io(doing, &path);
        let file = File::options().read(true).append(true).create(true).open(&path);
        let mut file = file.map_err(failed("opening"))?;
        let mut hasher = Sha256::new();
        let mut received = hash_all(&mut file, &mut hasher).map_err(failed("reading"))?;
        if received > bytes.0 {
            file.set_len(0).map_err(failed("emptying"))?;
            (hasher, received) = (Sha256::new(), 0);
        }
        let whole = whole.to_owned();
        Ok(Self { path, whole, file, hasher, received, bytes: bytes.0, sha256 })
    }

    /// So many bytes are here; the next one wanted.
    pub(crate) const fn received(&self) -> u64 {
        self.received
    }

    /// Whether all are.
    pub(crate) const fn is_whole(&self) -> bool {
        self.received == self.bytes
    }

    /// Takes the next bytes; whether there was room for them.
    pub(crate) fn append(&mut self, data: &[u8]) -> Result<bool, SliceError> {
        if data.len() as u64 > self.bytes - self.received {
            return Ok(false);
        }
        self.file.write_all(data).map_err(SliceError::io("writing", &self.path))?;
        self.hasher.update(data);
        self.received += data.len() as u64;
        Ok(true)
    }

    /// Lets the file be seen if its bytes are right, and removes it if they are not.
    pub(crate) fn finish(self, record: &Record) -> Result<Verdict, SliceError> {
        let Self { path, whole, file, hasher, sha256, .. } = self;
        let got = hex(hasher);
        if got != hex_of(sha256) {
            drop(file);
            fs::remove_file(&path).map_err(SliceError::io("removing", &path))?;
            return Ok(Verdict::Wrong(got));
        }
        file.sync_all().map_err(SliceError::io("writing", &path))?;
        drop(file);
        fs::rename(&path, &whole).map_err(SliceError::io("naming", &whole))?;
        record.store(&whole, &got).map_err(SliceError::io("writing the record of", &whole))?;
        sync_folder(whole.parent().unwrap_or(Path::new(".")))
            .map_err(SliceError::io("writing the folder of", &whole))?;
        Ok(Verdict::Right)
    }
}

fn hash_all(file: &mut File, hasher: &mut Sha256) -> io::Result<u64> {
    let (mut block, mut all) = (vec![0; BLOCK], 0);
    loop {
        match file.read(&mut block)? {
            0 => return Ok(all),
            n => {
                hasher.update(&block[..n]);
                all += n as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::ModelHash;
    use proptest::prelude::*;
    use protocol::slices::SliceForm;

    use super::*;

    fn record(bytes: &[u8]) -> Record {
        let all = Bytes(bytes.len() as u64);
        Record::new(ModelHash([1; 32]), &SliceForm { bytes: all, tensor_bytes: all, header_sha256: [0; 32] })
    }

    fn open(whole: &Path, bytes: &[u8]) -> Receiving {
        Receiving::open(whole, Bytes(bytes.len() as u64), Sha256::digest(bytes).into()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        // Field case 15.
        #[test]
        fn case_15_broken_off_at_any_offsets_it_is_in_the_end_the_same_bytes(
            bytes in proptest::collection::vec(any::<u8>(), 1..4000),
            breaks in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let whole = folder.path().join("0-2.gguf");
            let mut ends: Vec<usize> = breaks.iter().map(|at| at.index(bytes.len())).chain([bytes.len()]).collect();
            ends.sort_unstable();
            for end in ends {
                // Opened anew each time, as by another process.
                let mut file = open(&whole, &bytes);
                prop_assert!(!whole.exists());
                let from = file.received() as usize;
                prop_assert!(file.append(&bytes[from..end]).unwrap());
            }
            let file = open(&whole, &bytes);
            prop_assert!(file.is_whole());
            prop_assert_eq!(file.finish(&record(&bytes)).unwrap(), Verdict::Right);
            prop_assert!(fs::read(&whole).unwrap() == bytes);
            prop_assert_eq!(received_before(&whole), Bytes::ZERO);
        }

        #[test]
        fn case_15_a_flipped_bit_anywhere_is_found_and_nothing_of_it_stays(
            bytes in proptest::collection::vec(any::<u8>(), 1..2000),
            at in any::<prop::sample::Index>(),
            bit in 0..8_u32,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let whole = folder.path().join("0-2.gguf");
            let mut bad = bytes.clone();
            bad[at.index(bytes.len())] ^= 1 << bit;
            let mut file = open(&whole, &bytes);
            file.append(&bad).unwrap();
            prop_assert!(matches!(file.finish(&record(&bytes)).unwrap(), Verdict::Wrong(_)));
            prop_assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn more_than_the_whole_is_refused_and_another_files_beginning_is_not_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let whole = folder.path().join("0-2.gguf");
        let mut file = open(&whole, b"abcd");
        assert!(file.append(b"abc").unwrap() && !file.append(b"de").unwrap() && !file.is_whole());
        drop(file);
        assert_eq!(received_before(&whole), Bytes(3));
        let other = open(&whole, b"wxyz");
        assert_eq!((other.received(), partials(&whole).len()), (0, 1));
    }
}
