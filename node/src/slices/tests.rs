//! The store with files of a small model.

use std::ops::ControlFlow;

use std::fs::File;
use std::time::{Duration, SystemTime};

use gguf::cut::plan_slice;

use super::record::Record;
use super::*;
use crate::progress::{Progress, Work};
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
        let request =
            CutRequest { model: &self.model, hash: HASH, ranges: &ranges, options: CutOptions::default() };
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
    let all = Bytes(bytes.len() as u64);
    let form = SliceForm { bytes: all, tensor_bytes: all, header_sha256: [9; 32] };
    Record::new(HASH, &form).store(path, &record::hex_of(Sha256::digest(&bytes).into())).unwrap();
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

/// The store of a fixture with a limit.
fn limited(fixture: &Fixture, limit: u64) -> SliceStore {
    SliceStore::new(fixture.folder.path().join("slices")).limited(Some(Bytes(limit)))
}

fn cut_into(store: &SliceStore, fixture: &Fixture, layers: (u32, u32)) -> Result<StoredSlices, SliceError> {
    let ranges = [LayerRange::new(layers.0, layers.1).unwrap()];
    let request =
        CutRequest { model: &fixture.model, hash: HASH, ranges: &ranges, options: CutOptions::default() };
    store.ensure(&request, &mut |_| ControlFlow::Continue(()))
}

/// Lets a stored file look as if it had been used so long ago.
fn used_before(file: &StoredFile, hours: u64) {
    let record = File::options().append(true).open(record::path_for(&file.path)).unwrap();
    record.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
}

#[test]
fn the_slice_that_was_not_used_longest_makes_room_and_one_in_use_never_does() {
    let fixture = Fixture::new();
    let free = SliceStore::new(fixture.folder.path().join("slices"));
    let old = cut_into(&free, &fixture, (0, 1)).unwrap();
    let older = cut_into(&free, &fixture, (1, 2)).unwrap();
    let (one, embedding) = (old.slices[0].bytes.0, old.embedding.bytes.0);
    used_before(&old.slices[0], 1);
    used_before(&older.slices[0], 2);
    let names = |fixture: &Fixture| {
        let all = fixture.names();
        all.into_iter().filter(|name| name.ends_with("gguf")).collect::<Vec<_>>()
    };
    // Room for two slices and the embedding: the older one goes, although the other has the lower name.
    let two = limited(&fixture, 2 * one + embedding + 100);
    drop((old, older));
    let held = cut_into(&two, &fixture, (2, 3)).unwrap();
    assert_eq!(names(&fixture), ["0-1.gguf", "2-3.gguf", "embedding.gguf"]);
    assert_eq!(fixture.names().len(), 7, "records go with their slices: {:?}", fixture.names());
    // Using one again makes it the newest; what is held stays whatever its age.
    drop(cut_into(&two, &fixture, (0, 1)).unwrap());
    used_before(&held.slices[0], 9);
    drop(cut_into(&two, &fixture, (1, 2)).unwrap());
    assert_eq!(names(&fixture), ["1-2.gguf", "2-3.gguf", "embedding.gguf"]);
    // Where all is in use there is no room, and the numbers say why.
    let all = cut_into(&two, &fixture, (1, 2)).unwrap();
    let error = cut_into(&two, &fixture, (0, 1)).unwrap_err();
    let in_use = Bytes(one * 2 + embedding);
    let numbers = format!("{} are in use", in_use);
    assert!(matches!(error, SliceError::OverLimit { .. }) && error.to_string().contains(&numbers), "{error}");
    assert!(held.slices[0].path.is_file() && all.slices[0].path.is_file());
}

#[test]
fn slices_of_other_models_and_what_never_came_whole_make_room_too() {
    let fixture = Fixture::new();
    let root = fixture.folder.path().join("slices");
    let other = root.join(ModelHash([8; 32]).to_string());
    std::fs::create_dir_all(&other).unwrap();
    std::fs::write(other.join(".0-9.gguf.ab.receiving"), vec![0; 5000]).unwrap();
    let theirs = root.join(ModelHash([9; 32]).to_string());
    std::fs::create_dir_all(&theirs).unwrap();
    std::fs::write(theirs.join("0-9.gguf"), vec![0; 5000]).unwrap();
    // Somebody prepares that model.
    let lock = File::create(theirs.join(LOCK)).unwrap();
    fs4::FileExt::lock(&lock).unwrap();
    let error = cut_into(&limited(&fixture, 6000), &fixture, (0, 1)).unwrap_err();
    assert!(matches!(error, SliceError::OverLimit { .. }), "{error}");
    assert!(!other.join(".0-9.gguf.ab.receiving").exists() && theirs.join("0-9.gguf").exists());
    drop(lock);
    cut_into(&limited(&fixture, 6000), &fixture, (0, 1)).unwrap();
    assert!(!theirs.join("0-9.gguf").exists());
}
