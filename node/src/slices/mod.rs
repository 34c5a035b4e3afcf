//! Slices on disk: cut once, written whole or not at all, and used again.
//!
//! A folder holds the slices of one model, its embedding, and beside each file a record of what it must be. Files
//! appear under their names only when complete; what an interrupted cut left behind is removed by the next one. A
//! lock keeps two processes from cutting into one folder at once.

mod record;
mod write;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cluster::{Bytes, LayerRange, ModelHash};
use gguf::cut::{CutError, CutOptions, OutputPlan, plan_embedding, plan_slice};
use thiserror::Error;

use crate::model_file::ModelFile;
use crate::progress::{Observer, Progress, Work};
use record::Record;
use write::PARTIAL;

/// Left free on the disk: other programs need some, and so do logs.
const SPARE: Bytes = Bytes::from_mib(64);

/// How often a folder that another process has locked is looked at.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// Why slices could not be had.
#[derive(Debug, Error)]
pub enum SliceError {
    /// The model cannot be cut so.
    #[error(transparent)]
    Cut(Box<CutError>),
    /// The disk has no room.
    #[error(
        "cutting the model needs {needed} in {} and {available} are free there: free some space, or set \
         SHOAL_CACHE to a folder on another disk", folder.display()
    )]
    NoSpace {
        /// Where the slices were to be written.
        folder: PathBuf,
        /// What they need.
        needed: Bytes,
        /// What there is.
        available: Bytes,
    },
    /// A file of that name is already there and is something else.
    #[error("{} exists and is not this slice: remove it or choose another folder", .0.display())]
    Exists(PathBuf),
    /// The folder or a file in it cannot be used.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The model could not be read while it was cut.
    #[error("writing {}: {source}", path.display())]
    Write {
        /// The slice.
        path: PathBuf,
        /// What went wrong.
        source: Box<gguf::Error>,
    },
    /// The observer asked to stop.
    #[error("cutting the model was stopped")]
    Stopped,
}

impl From<CutError> for SliceError {
    fn from(error: CutError) -> Self {
        Self::Cut(Box::new(error))
    }
}

impl SliceError {
    fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_owned(), source }
    }
}

/// Whether a file was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// An earlier cut.
    Reused,
    /// Cut now.
    Written,
}

/// What to do with a file that has a slice's name and is something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Replace it: the folder is a cache.
    Replace,
    /// Leave it and fail: the folder is the user's.
    Refuse,
}

/// A slice or embedding on disk.
#[derive(Debug, Clone)]
pub struct StoredFile {
    /// Where.
    pub path: PathBuf,
    /// How large.
    pub bytes: Bytes,
    /// Since when.
    pub origin: Origin,
}

/// All that the stages of a replica load.
#[derive(Debug, Clone)]
pub struct StoredSlices {
    /// One per range, in the order asked for.
    pub slices: Vec<StoredFile>,
    /// Looked up by the first stage.
    pub embedding: StoredFile,
}

/// What to cut.
pub struct CutRequest<'a> {
    /// From what.
    pub model: &'a ModelFile,
    /// Its hash.
    pub hash: ModelHash,
    /// One slice for each.
    pub ranges: &'a [LayerRange],
    /// Which architectures may be cut.
    pub options: CutOptions,
}

/// The slices of all models on this host, a folder per model.
#[derive(Debug, Clone)]
pub struct SliceStore {
    root: PathBuf,
}

impl SliceStore {
    /// The store in `root`, which is made when first needed.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// The slices asked for: those that are missing or damaged are cut.
    pub fn ensure(
        &self,
        request: &CutRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<StoredSlices, SliceError> {
        let folder = SliceFolder::new(self.root.join(request.hash.to_string()), Existing::Replace);
        folder.ensure(request, observer)
    }
}

/// The slices of one model in one folder.
#[derive(Debug, Clone)]
pub struct SliceFolder {
    path: PathBuf,
    existing: Existing,
}

impl SliceFolder {
    /// The folder at `path`, which is made when first needed.
    pub fn new(path: PathBuf, existing: Existing) -> Self {
        Self { path, existing }
    }

    /// The slices asked for: those that are missing or damaged are cut.
    pub fn ensure(
        &self,
        request: &CutRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<StoredSlices, SliceError> {
        let embedding = self.embedding(request)?;
        let ranges = request.ranges.iter();
        let slices = ranges.map(|&layers| self.slice(request, layers)).collect::<Result<Vec<_>, _>>()?;
        std::fs::create_dir_all(&self.path).map_err(SliceError::io("making the folder", &self.path))?;
        let _lock = self.lock(observer)?;
        self.remove_leftovers()?;
        let all = || std::iter::once(&embedding).chain(&slices);
        let missing: Vec<&Wanted> = all().filter(|file| !file.is_present()).collect();
        self.check_room(&missing)?;
        write_all(&missing, observer)?;
        let stored = |file: &Wanted| {
            let written = missing.iter().any(|written| written.path == file.path);
            file.stored(if written { Origin::Written } else { Origin::Reused })
        };
        Ok(StoredSlices { slices: slices.iter().map(stored).collect(), embedding: stored(&embedding) })
    }

    /// The name of the slice of `layers`.
    pub fn slice_name(layers: LayerRange) -> String {
        format!("{}-{}.gguf", layers.start(), layers.end())
    }

    fn embedding(&self, request: &CutRequest<'_>) -> Result<Wanted, SliceError> {
        let plan = plan_embedding(request.model.gguf(), &request.options)?;
        Ok(self.wanted("embedding.gguf", request.hash, plan))
    }

    fn slice(&self, request: &CutRequest<'_>, layers: LayerRange) -> Result<Wanted, SliceError> {
        let plan = plan_slice(request.model.gguf(), layers, &request.options)?;
        Ok(self.wanted(&Self::slice_name(layers), request.hash, plan))
    }

    fn wanted(&self, name: &str, model: ModelHash, plan: OutputPlan) -> Wanted {
        let record = Record::new(model, plan.len());
        Wanted { path: self.path.join(name), plan, record }
    }

    /// Waits for the folder's lock, which ends with the returned file.
    fn lock(&self, observer: &mut Observer<'_>) -> Result<File, SliceError> {
        let path = self.path.join(".lock");
        let file = File::create(&path).map_err(SliceError::io("opening", &path))?;
        loop {
            match fs4::FileExt::try_lock(&file) {
                Ok(()) => return Ok(file),
                Err(fs4::TryLockError::WouldBlock) => {}
                Err(fs4::TryLockError::Error(source)) => {
                    return Err(SliceError::io("locking", &path)(source));
                }
            }
            let waiting = Progress { work: Work::Waiting, done: Bytes::ZERO, total: Bytes::ZERO };
            if observer(waiting).is_break() {
                return Err(SliceError::Stopped);
            }
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// Removes what interrupted cuts left: while we hold the lock, nobody is writing.
    fn remove_leftovers(&self) -> Result<(), SliceError> {
        let entries = std::fs::read_dir(&self.path).map_err(SliceError::io("listing", &self.path))?;
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(PARTIAL)) {
                std::fs::remove_file(&path).map_err(SliceError::io("removing", &path))?;
                tracing::info!(file = %path.display(), "removed what an interrupted cut left");
            }
        }
        Ok(())
    }

    fn check_room(&self, missing: &[&Wanted]) -> Result<(), SliceError> {
        let in_the_way = missing.iter().find(|file| self.existing == Existing::Refuse && file.path.exists());
        if let Some(file) = in_the_way {
            return Err(SliceError::Exists(file.path.clone()));
        }
        let needed = total_bytes(missing);
        let available = fs4::available_space(&self.path).map(Bytes);
        let available = available.map_err(SliceError::io("asking for the free space of", &self.path))?;
        if needed > Bytes::ZERO && needed + SPARE > available {
            return Err(SliceError::NoSpace { folder: self.path.clone(), needed: needed + SPARE, available });
        }
        Ok(())
    }
}

impl StoredFile {
    /// Removes the file and its record.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(record::path_for(&self.path))?;
        std::fs::remove_file(&self.path)
    }
}

fn write_all(files: &[&Wanted], observer: &mut Observer<'_>) -> Result<(), SliceError> {
    let total = total_bytes(files);
    let mut before = Bytes::ZERO;
    for file in files {
        write::write(&file.plan, &file.path, &file.record, &mut |done| {
            observer(Progress { work: Work::Cutting, done: before + done, total })
        })?;
        before += Bytes(file.plan.len());
    }
    Ok(())
}

fn total_bytes(files: &[&Wanted]) -> Bytes {
    files.iter().map(|file| Bytes(file.plan.len())).sum()
}

struct Wanted {
    path: PathBuf,
    plan: OutputPlan,
    record: Record,
}

impl Wanted {
    fn is_present(&self) -> bool {
        record::is_intact(&self.path, &self.plan, &self.record)
    }

    fn stored(&self, origin: Origin) -> StoredFile {
        StoredFile { path: self.path.clone(), bytes: Bytes(self.plan.len()), origin }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::test_model;

    const HASH: ModelHash = ModelHash([7; 32]);

    struct Fixture {
        folder: tempfile::TempDir,
        model: ModelFile,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let model = ModelFile::open(&test_model::write(folder.path())).unwrap();
            Self { folder, model }
        }

        fn cut_at(&self, cut: u32, observer: &mut Observer<'_>) -> Result<StoredSlices, SliceError> {
            let ranges = LayerRange::from_cuts(&[cut], test_model::N_LAYER).unwrap();
            let request = CutRequest {
                model: &self.model,
                hash: HASH,
                ranges: &ranges,
                options: CutOptions::default(),
            };
            SliceStore::new(self.folder.path().join("slices")).ensure(&request, observer)
        }

        fn cut(&self) -> StoredSlices {
            self.cut_at(2, &mut |_| ControlFlow::Continue(())).unwrap()
        }

        fn names(&self) -> Vec<String> {
            let folder = self.folder.path().join("slices").join(HASH.to_string());
            let entries = std::fs::read_dir(folder).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    fn origins(stored: &StoredSlices) -> Vec<Origin> {
        stored.slices.iter().chain([&stored.embedding]).map(|file| file.origin).collect()
    }

    // Field case 15: what is there is not fetched, or cut, again.
    #[test]
    fn slices_are_cut_once() {
        let fixture = Fixture::new();
        assert_eq!(origins(&fixture.cut()), [Origin::Written; 3]);
        assert_eq!(origins(&fixture.cut()), [Origin::Reused; 3]);
        let other = fixture.cut_at(3, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(origins(&other), [Origin::Written, Origin::Written, Origin::Reused]);
    }

    #[test]
    fn a_stored_slice_is_what_the_cutter_writes() {
        let fixture = Fixture::new();
        let stored = fixture.cut();
        let range = LayerRange::new(0, 2).unwrap();
        let plan = plan_slice(fixture.model.gguf(), range, &CutOptions::default()).unwrap();
        assert_eq!(std::fs::read(&stored.slices[0].path).unwrap(), plan.to_bytes().unwrap());
    }

    // Field case 15: what is damaged is not used.
    #[test]
    fn a_damaged_slice_is_cut_again() {
        let fixture = Fixture::new();
        let stored = fixture.cut();
        let path = &stored.slices[1].path;
        let good = std::fs::read(path).unwrap();
        let mut bad = good.clone();
        *bad.last_mut().unwrap() ^= 1;
        for bytes in [&bad[..], &good[..good.len() - 1], &[]] {
            std::fs::write(path, bytes).unwrap();
            assert_eq!(origins(&fixture.cut()), [Origin::Reused, Origin::Written, Origin::Reused]);
            assert_eq!(std::fs::read(path).unwrap(), good);
        }
    }

    #[test]
    fn a_slice_with_another_header_is_cut_again() {
        let fixture = Fixture::new();
        let stored = fixture.cut();
        let path = &stored.slices[0].path;
        let mut bytes = std::fs::read(path).unwrap();
        let at = bytes.windows(5).position(|bytes| bytes == b"llama").unwrap();
        bytes[at] = b'L';
        std::fs::write(path, &bytes).unwrap();
        // As another version would have recorded it.
        let digest = record::hex(sha2::Digest::chain_update(sha2::Sha256::default(), &bytes));
        Record::new(HASH, bytes.len() as u64).store(path, &digest).unwrap();
        assert_eq!(origins(&fixture.cut()), [Origin::Written, Origin::Reused, Origin::Reused]);
    }

    #[test]
    fn a_slice_that_was_only_touched_is_kept() {
        let fixture = Fixture::new();
        let stored = fixture.cut();
        let bytes = std::fs::read(&stored.slices[0].path).unwrap();
        std::fs::write(&stored.slices[0].path, bytes).unwrap();
        assert_eq!(origins(&fixture.cut()), [Origin::Reused; 3]);
    }

    #[test]
    fn an_interrupted_cut_leaves_nothing_under_a_slices_name() {
        let fixture = Fixture::new();
        let stopped = fixture.cut_at(2, &mut |_| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(SliceError::Stopped)));
        assert_eq!(fixture.names(), [".lock"]);
        let killed = fixture.folder.path().join("slices").join(HASH.to_string()).join(".x.partial");
        std::fs::write(&killed, b"half a slice").unwrap();
        fixture.cut();
        assert!(!killed.exists());
    }

    #[test]
    fn progress_ends_at_the_whole() {
        let fixture = Fixture::new();
        let mut seen = Vec::new();
        let mut observer = |progress| {
            seen.push(progress);
            ControlFlow::Continue(())
        };
        fixture.cut_at(2, &mut observer).unwrap();
        assert!(seen.is_sorted_by_key(|progress: &Progress| progress.done));
        assert!(seen.last().is_some_and(|progress| progress.done == progress.total), "{seen:?}");
    }

    #[test]
    fn a_folder_of_the_users_is_not_overwritten() {
        let fixture = Fixture::new();
        let path = fixture.folder.path().join("mine");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("0-2.gguf"), b"precious").unwrap();
        let ranges = LayerRange::from_cuts(&[2], test_model::N_LAYER).unwrap();
        let request =
            CutRequest { model: &fixture.model, hash: HASH, ranges: &ranges, options: CutOptions::default() };
        let folder = SliceFolder::new(path.clone(), Existing::Refuse);
        let refused = folder.ensure(&request, &mut |_| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(SliceError::Exists(_))));
        assert_eq!(std::fs::read(path.join("0-2.gguf")).unwrap(), b"precious");
    }

    #[test]
    fn a_folder_in_use_is_waited_for() {
        let fixture = Fixture::new();
        fixture.cut();
        let lock = fixture.folder.path().join("slices").join(HASH.to_string()).join(".lock");
        let held = File::create(lock).unwrap();
        fs4::FileExt::lock(&held).unwrap();
        let mut waited = 0;
        let stopped = fixture.cut_at(2, &mut |progress| {
            assert_eq!(progress.work, Work::Waiting);
            waited += 1;
            if waited == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(stopped, Err(SliceError::Stopped)));
    }
}
