//! The slices of one model in one folder: what is missing is made, by cutting the model or by fetching from other hosts, and takes
//! its place beside what is there.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cluster::{Bytes, LayerRange, ModelHash};
use gguf::cut::{OutputPlan, plan_embedding, plan_slice};
use protocol::slices::{SliceFile, SliceForm};

use super::error::SliceError;
use super::pin::Pin;
use super::record::{self, Record};
use super::room::{Cache, check_space};
use super::write::{self, PARTIAL};
use super::{CutRequest, LOCK, Origin, StoredFile, StoredSlices, file_name, form_of, receive};
use crate::progress::{Observer, Progress, Work};

/// How often a folder that another process has locked is looked at.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// What to do with a file that has a slice's name and is something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Replace it: the folder is a cache.
    Replace,
    /// Leave it and fail: the folder is the user's.
    Refuse,
}

/// The slices of one model in one folder.
#[derive(Debug, Clone)]
pub struct SliceFolder {
    path: PathBuf,
    existing: Existing,
    /// What it is a part of, if unused slices may be removed there.
    cache: Option<Cache>,
}

/// What to fetch.
pub(crate) struct FetchRequest<'a> {
    /// Of which model.
    pub(crate) model: ModelHash,
    /// Which files.
    pub(crate) files: &'a [(SliceFile, SliceForm)],
    /// From where.
    pub(crate) deliver: &'a mut dyn Deliver,
}

/// A file that has to arrive.
pub(crate) struct Arrival<'a> {
    pub(crate) file: SliceFile,
    pub(crate) form: &'a SliceForm,
    /// Where it will be seen.
    pub(crate) path: &'a Path,
    /// What is kept of it then.
    pub(crate) record: &'a Record,
}

/// Brings files from elsewhere.
pub(crate) trait Deliver {
    /// Returns when the file is there whole. The folder is locked for it.
    fn deliver(
        &mut self,
        arrival: &Arrival<'_>,
        observer: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<(), SliceError>;
}

/// How missing files are made.
type Make<'a> = dyn FnMut(&[&Wanted], &mut Observer<'_>) -> Result<(), SliceError> + 'a;

/// A file that must be in the folder.
struct Wanted {
    file: SliceFile,
    form: SliceForm,
    path: PathBuf,
    record: Record,
    /// How it is cut; else it is fetched.
    plan: Option<OutputPlan>,
}

impl Wanted {
    fn is_present(&self) -> bool {
        record::intact(&self.path, &self.record).is_some()
    }

    /// What its missing part takes on the disk.
    fn missing_bytes(&self) -> Bytes {
        match self.plan {
            Some(_) => self.form.bytes,
            None => self.form.bytes.saturating_sub(receive::received_before(&self.path)),
        }
    }

    /// The file as it is there; from now on it is in use.
    fn take(&self, origin: Origin) -> Result<StoredFile, SliceError> {
        let pin = Pin::hold(&self.path).map_err(SliceError::io("opening", &self.path))?;
        // When it was last used is all that is lost.
        if let Err(error) = record::touch(&self.path) {
            tracing::debug!(file = %self.path.display(), %error, "a slice's use could not be noted");
        }
        Ok(StoredFile { path: self.path.clone(), bytes: self.form.bytes, origin, pin })
    }
}

impl SliceFolder {
    /// The folder at `path`, which is made when first needed.
    pub fn new(path: PathBuf, existing: Existing) -> Self {
        Self { path, existing, cache: None }
    }

    /// One of a cache's folders.
    pub(super) fn cached(path: PathBuf, cache: Cache) -> Self {
        Self { path, existing: Existing::Replace, cache: Some(cache) }
    }

    /// The slices asked for: those that are missing or damaged are cut.
    pub fn ensure(
        &self,
        request: &CutRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<StoredSlices, SliceError> {
        let embedding = plan_embedding(request.model.gguf(), &request.options)?;
        let mut wanted = vec![self.planned(request.hash, SliceFile::Embedding, embedding)];
        for &layers in request.ranges {
            let plan = plan_slice(request.model.gguf(), layers, &request.options)?;
            wanted.push(self.planned(request.hash, SliceFile::Blocks(layers), plan));
        }
        let mut stored = self.complete(&wanted, &mut cut_all, observer)?;
        let embedding = stored.remove(0);
        Ok(StoredSlices { slices: stored, embedding })
    }

    /// The files asked for, in that order: those that are missing or damaged are fetched.
    pub(super) fn fetch(
        &self,
        request: FetchRequest<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<Vec<StoredFile>, SliceError> {
        let FetchRequest { model, files, deliver } = request;
        let wanted: Vec<Wanted> =
            files.iter().map(|&(file, form)| self.wanted(model, (file, form), None)).collect();
        let mut fetch = |missing: &[&Wanted], observer: &mut Observer<'_>| {
            missing.iter().try_for_each(|Wanted { file, form, path, record, .. }| {
                deliver.deliver(&Arrival { file: *file, form, path, record }, observer)
            })
        };
        self.complete(&wanted, &mut fetch, observer)
    }

    /// The name of the slice of `layers`.
    pub fn slice_name(layers: LayerRange) -> String {
        format!("{}-{}.gguf", layers.start(), layers.end())
    }

    fn planned(&self, model: ModelHash, file: SliceFile, plan: OutputPlan) -> Wanted {
        let form = form_of(&plan);
        self.wanted(model, (file, form), Some(plan))
    }

    fn wanted(&self, model: ModelHash, file: (SliceFile, SliceForm), plan: Option<OutputPlan>) -> Wanted {
        let (file, form) = file;
        Wanted { file, form, path: self.path.join(file_name(file)), record: Record::new(model, &form), plan }
    }

    /// Makes what is missing, and holds on to all.
    fn complete(
        &self,
        wanted: &[Wanted],
        make: &mut Make<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<Vec<StoredFile>, SliceError> {
        std::fs::create_dir_all(&self.path).map_err(SliceError::io("making the folder", &self.path))?;
        let _lock = self.lock(observer)?;
        self.remove_leftovers()?;
        // Those that are there are held on to before room is made for the others.
        let there = |file: &Wanted| file.is_present().then(|| file.take(Origin::Reused)).transpose();
        let mut stored = wanted.iter().map(there).collect::<Result<Vec<_>, _>>()?;
        let missing: Vec<&Wanted> =
            wanted.iter().zip(&stored).filter(|(_, stored)| stored.is_none()).map(|(file, _)| file).collect();
        self.make_room(&missing)?;
        make(&missing, observer)?;
        for (file, stored) in wanted.iter().zip(&mut stored).filter(|(_, stored)| stored.is_none()) {
            *stored = Some(file.take(Origin::Written)?);
        }
        Ok(stored.into_iter().flatten().collect())
    }

    /// Waits for the folder's lock, which ends with the returned file.
    fn lock(&self, observer: &mut Observer<'_>) -> Result<File, SliceError> {
        let path = self.path.join(LOCK);
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

    fn make_room(&self, missing: &[&Wanted]) -> Result<(), SliceError> {
        let in_the_way = missing.iter().find(|file| self.existing == Existing::Refuse && file.path.exists());
        if let Some(file) = in_the_way {
            return Err(SliceError::Exists(file.path.clone()));
        }
        // What has come of them must not go to make room for the rest.
        let begun = missing.iter().flat_map(|file| receive::partials(&file.path));
        let _begun: Vec<Pin> = begun.filter_map(|path| Pin::hold(&path).ok()).collect();
        let needed = missing.iter().map(|file| file.missing_bytes()).sum();
        match &self.cache {
            Some(cache) => cache.make_room(&self.path, needed),
            None => check_space(&self.path, needed),
        }
    }
}

/// Cuts files that have a plan.
fn cut_all(files: &[&Wanted], observer: &mut Observer<'_>) -> Result<(), SliceError> {
    let total = files.iter().map(|file| file.form.bytes).sum();
    let mut before = Bytes::ZERO;
    for file in files {
        let Some(plan) = &file.plan else { continue };
        write::write(plan, &file.path, &file.record, &mut |done| {
            observer(Progress { work: Work::Cutting, done: before + done, total })
        })?;
        before += file.form.bytes;
    }
    Ok(())
}
