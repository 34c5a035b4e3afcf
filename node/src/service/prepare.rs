//! From an order to what its stage loads: the stage's slice of this node's copy of the model, or of another host's, and whether
//! there is room.

use std::path::PathBuf;

use cluster::{Bytes, Load, MemoryCosts, ModelHash, ModelShape, StageLoad, StageMemory};
use gguf::cut::{CutOptions, Uncertified, plan_slice};
use protocol::certify::LiveIdentity;
use protocol::emulation::Emulation;
use protocol::node::{StageOrder, Supply};
use protocol::plan_files::PlanFileError;
use protocol::slices::SliceFile;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::delivery::{Fetcher, Pace};
use crate::folders::Folders;
use crate::host::available_memory;
use crate::memory::{Footprint, MemoryError};
use crate::model_file::{ModelFile, ModelFileError};
use crate::model_hash::{HashError, model_hash, remembered};
use crate::prepare::{all_tensors, runs_in_place};
use crate::progress::Observer;
use crate::resolve::{ResolveError, find_model};
use crate::slices::{CutRequest, FetchRequest, Pin, SliceError, SliceStore};

/// What a stage loads.
#[derive(Debug)]
pub(super) struct PreparedOrder {
    pub(super) shape: ModelShape,
    pub(super) slice: PathBuf,
    /// Of the first stage.
    pub(super) embedding: PathBuf,
    pub(super) predicted: StageMemory,
    /// Keep both where they are.
    pub(super) pins: Vec<Pin>,
}

/// Where a node keeps models and parts of them, and how it gets those.
pub(super) struct Pantry {
    pub(super) folders: Folders,
    pub(super) store: SliceStore,
    pub(super) identity: LiveIdentity,
    /// Of what it receives.
    pub(super) pace: Pace,
}

/// Why a node cannot run an ordered stage.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub(super) enum OrderError {
    #[error("it has no copy of the model: {0}")]
    NoModel(#[from] ResolveError),
    #[error(transparent)]
    Model(#[from] ModelFileError),
    #[error(transparent)]
    Hash(#[from] HashError),
    #[error(
        "its {} is another model than the replica's, though it has the same name: sha256 {got} instead of {wanted}",
        path.display()
    )]
    OtherModel { path: PathBuf, got: ModelHash, wanted: ModelHash },
    #[error("{0}; and {1}")]
    NotFetched(Box<OrderError>, SliceError),
    #[error(
        "the stage is to have blocks {first}..{end}, {gpu} of them on a GPU, and the model has {n_layer}"
    )]
    Blocks { first: u32, end: u32, gpu: u32, n_layer: u32 },
    #[error(transparent)]
    Slices(#[from] SliceError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("it emulates a device with model {emulated}, and the replica serves {wanted} ({hash})")]
    NotEmulated { emulated: String, wanted: String, hash: ModelHash },
    #[error("its emulated model cannot be used: {0}")]
    Emulation(#[from] PlanFileError),
}

impl OrderError {
    /// Most are reasons for which the same order would fail again.
    pub(super) fn status(&self) -> Status {
        match self {
            Self::NoModel(_) => Status::not_found(self.to_string()),
            Self::Blocks { .. } => Status::invalid_argument(self.to_string()),
            Self::Slices(SliceError::Stopped) | Self::Hash(HashError::Stopped) => {
                Status::cancelled(self.to_string())
            }
            // Other hosts may be there again later.
            Self::NotFetched(..) => Status::unavailable(self.to_string()),
            _ => Status::failed_precondition(self.to_string()),
        }
    }
}

/// Finds, checks and cuts, or fetches. On a thread that may wait.
pub(super) fn prepare(
    order: &StageOrder,
    pantry: &Pantry,
    stop: &CancellationToken,
    observer: &mut Observer<'_>,
) -> Result<PreparedOrder, OrderError> {
    match (find_copy(order, &pantry.folders, observer), &order.supply) {
        (Ok(model), _) => cut(order, &model, pantry, observer),
        (Err(without @ (OrderError::NoModel(_) | OrderError::OtherModel { .. })), Some(supply)) => {
            tracing::debug!(reason = %without, "the stage's part of the model is got from other hosts");
            fetch(order, supply, pantry, stop, observer).map_err(|error| match error {
                OrderError::Slices(error @ SliceError::NoSource { .. }) => {
                    OrderError::NotFetched(Box::new(without), error)
                }
                error => error,
            })
        }
        (Err(error), _) => Err(error),
    }
}

/// This node's copy of the model: under its name, or under another if its hash is remembered.
fn find_copy(
    order: &StageOrder,
    folders: &Folders,
    observer: &mut Observer<'_>,
) -> Result<ModelFile, OrderError> {
    let named = find_model(&order.model, folders.models()).map_err(OrderError::from);
    let named = named.and_then(|path| {
        let model = ModelFile::open(&path)?;
        let got = model_hash(model.parts(), &folders.model_hashes(), observer)?;
        let wanted = order.model_hash;
        if got == wanted { Ok(model) } else { Err(OrderError::OtherModel { path, got, wanted }) }
    });
    match (named, remembered(order.model_hash, &folders.model_hashes())) {
        (Err(OrderError::NoModel(_) | OrderError::OtherModel { .. }), Some(path)) => {
            Ok(ModelFile::open(&path)?)
        }
        (named, _) => named,
    }
}

fn cut(
    order: &StageOrder,
    model: &ModelFile,
    pantry: &Pantry,
    observer: &mut Observer<'_>,
) -> Result<PreparedOrder, OrderError> {
    check_blocks(order, model.shape())?;
    let uncertified = if order.allow_uncertified { Uncertified::Allow } else { Uncertified::Refuse };
    let options = CutOptions { uncertified };
    let in_place = runs_in_place(model, order.n_stages as usize);
    let plan = plan_slice(model.gguf(), order.layers, &options).map_err(SliceError::from)?;
    let weights = if in_place { all_tensors(model) } else { Bytes(plan.tensor_bytes()) };
    let predicted = check_memory(order, model.shape(), weights)?;
    let ranges = if in_place { &[][..] } else { std::slice::from_ref(&order.layers) };
    let request = CutRequest { model, hash: order.model_hash, ranges, options };
    let files = pantry.store.ensure(&request, observer)?;
    let slice = files.slices.first().map_or(model.path(), |file| file.path.as_path()).to_owned();
    let pins = files.slices.iter().chain([&files.embedding]).map(|file| file.pin.clone()).collect();
    let embedding = files.embedding.path;
    Ok(PreparedOrder { shape: model.shape().clone(), slice, embedding, predicted, pins })
}

fn fetch(
    order: &StageOrder,
    supply: &Supply,
    pantry: &Pantry,
    stop: &CancellationToken,
    observer: &mut Observer<'_>,
) -> Result<PreparedOrder, OrderError> {
    check_blocks(order, &supply.shape)?;
    let predicted = check_memory(order, &supply.shape, supply.slice.tensor_bytes)?;
    let mut files = vec![(SliceFile::Blocks(order.layers), supply.slice)];
    if order.stage == 0 {
        files.push((SliceFile::Embedding, supply.embedding));
    }
    let mut fetcher = Fetcher {
        handle: Handle::current(),
        identity: pantry.identity.now(),
        pace: &pantry.pace,
        model: order.model_hash,
        sources: &supply.sources,
        stop,
    };
    let request = FetchRequest { model: order.model_hash, files: &files, deliver: &mut fetcher };
    let mut stored = pantry.store.fetch(request, observer)?.into_iter();
    let mut pins = Vec::new();
    let mut next = || {
        let file = stored.next();
        pins.extend(file.as_ref().map(|file| file.pin.clone()));
        file.map_or_else(PathBuf::new, |file| file.path)
    };
    let (slice, embedding) = (next(), next());
    Ok(PreparedOrder { shape: supply.shape.clone(), slice, embedding, predicted, pins })
}

/// What an emulated stage loads: nothing. Its worker enforces the emulated device's memory.
pub(super) fn emulate(order: &StageOrder, emulation: &Emulation) -> Result<PreparedOrder, OrderError> {
    let known = [&emulation.profile.model, &emulation.model.model];
    let wanted = [&order.model, &order.model_hash.to_string()];
    if !known.iter().any(|known| wanted.contains(known)) {
        return Err(OrderError::NotEmulated {
            emulated: emulation.profile.model.clone(),
            wanted: order.model.clone(),
            hash: order.model_hash,
        });
    }
    let shape = emulation.model.shape()?;
    check_blocks(order, &shape)?;
    let none = PathBuf::new();
    let (predicted, pins) = (StageMemory::default(), Vec::new());
    Ok(PreparedOrder { shape, slice: none.clone(), embedding: none, predicted, pins })
}

fn check_blocks(order: &StageOrder, model: &ModelShape) -> Result<(), OrderError> {
    let (n_layer, layers, gpu) = (model.n_layer(), order.layers, order.gpu_layers);
    if layers.end() > n_layer || gpu > layers.len() {
        let (first, end) = (layers.start(), layers.end());
        return Err(OrderError::Blocks { first, end, gpu, n_layer });
    }
    Ok(())
}

fn check_memory(order: &StageOrder, shape: &ModelShape, weights: Bytes) -> Result<StageMemory, OrderError> {
    let costs = MemoryCosts::assumed(shape);
    let footprint = Footprint { shape, costs: &costs };
    let stages = [StageLoad { layers: order.layers, weights, gpu_layers: order.gpu_layers }];
    let load = Load { slots: order.slots, n_ctx: order.n_ctx, n_ubatch: order.n_batch };
    let predicted = match footprint.check(&stages, load, 1, available_memory()) {
        Ok(predicted) => predicted,
        Err(error) if order.ignore_memory => {
            tracing::warn!("{error}");
            footprint.estimate(&stages, load)
        }
        Err(error) => return Err(error.into()),
    };
    Ok(predicted.first().copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use cluster::LayerRange;
    use protocol::tls::ClusterCa;

    use super::*;
    use crate::test_model;

    fn pantry(folders: Folders) -> Pantry {
        let store = SliceStore::new(folders.slices());
        let identity = ClusterCa::new().unwrap().issue("node").unwrap().into();
        Pantry { folders, store, identity, pace: Pace::new(None) }
    }

    /// A folder of models with the test model in it, and an order of its second half.
    fn fixture() -> (tempfile::TempDir, Pantry, StageOrder) {
        let folder = tempfile::tempdir().unwrap();
        let path = test_model::write(folder.path());
        let cache = folder.path().join("cache");
        let folders = Folders::new(Some(cache), Some(folder.path().to_owned())).unwrap();
        let hash = model_hash(&[path], &folders.model_hashes(), &mut go_on).unwrap();
        let order = StageOrder {
            model: "tiny".into(),
            model_hash: hash,
            stage: 1,
            n_stages: 2,
            layers: LayerRange::new(2, test_model::N_LAYER).unwrap(),
            gpu_layers: 0,
            slots: 1,
            n_ctx: 64,
            n_batch: 16,
            threads: None,
            stages_here: 1,
            micro_batches: 2,
            queue_limit: 4,
            prefill_chunk: 16,
            step_deadline_secs: 120,
            allow_uncertified: false,
            ignore_memory: false,
            supply: None,
            keep_secs: 0,
        };
        (folder, pantry(folders), order)
    }

    fn go_on(_: crate::Progress) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn run(order: &StageOrder, pantry: &Pantry) -> Result<PreparedOrder, OrderError> {
        prepare(order, pantry, &CancellationToken::new(), &mut go_on)
    }

    fn refusal(order: &StageOrder, pantry: &Pantry) -> String {
        run(order, pantry).unwrap_err().to_string()
    }

    #[test]
    fn an_ordered_stage_is_cut_from_the_nodes_own_copy() {
        let (_folder, pantry, order) = fixture();
        let prepared = run(&order, &pantry).unwrap();
        assert!(prepared.slice.is_file() && prepared.embedding.is_file());
        assert!(prepared.slice.starts_with(pantry.folders.slices()));
        assert!(prepared.predicted.total() > Bytes::ZERO);
        let whole = LayerRange::new(0, test_model::N_LAYER).unwrap();
        let alone = StageOrder { stage: 0, n_stages: 1, layers: whole, ..order };
        assert_eq!(run(&alone, &pantry).unwrap().slice, pantry.folders.models().join("tiny.gguf"));
    }

    #[test]
    fn a_node_without_the_model_or_with_another_of_that_name_says_so() {
        let (_folder, pantry, order) = fixture();
        let unknown = StageOrder { model_hash: ModelHash([1; 32]), ..order.clone() };
        let other = refusal(&unknown, &pantry);
        assert!(other.contains("tiny.gguf is another model") && other.contains("0101"), "{other}");
        for name in ["large", "../tiny", "/etc/passwd", "cache/../tiny"] {
            let refused = refusal(&StageOrder { model: name.into(), ..unknown.clone() }, &pantry);
            assert!(refused.contains("no copy of the model"), "{refused}");
        }
        assert!(refusal(&StageOrder { model: "large".into(), ..unknown }, &pantry).contains("tiny.gguf"));
        // The same model under another name is a copy of it.
        let renamed = StageOrder { model: "large".into(), ..order };
        assert!(run(&renamed, &pantry).unwrap().slice.is_file());
    }

    #[test]
    fn blocks_and_memory_that_are_not_there_are_refused_with_numbers() {
        let (_folder, pantry, order) = fixture();
        let layers = LayerRange::new(2, 99).unwrap();
        let blocks = refusal(&StageOrder { layers, ..order.clone() }, &pantry);
        assert!(blocks.contains("2..99"), "{blocks}");
        let gpu = refusal(&StageOrder { gpu_layers: 9, ..order.clone() }, &pantry);
        assert!(gpu.contains("9 of them"), "{gpu}");
        let huge = StageOrder { slots: 256, n_ctx: 1 << 30, ..order };
        let memory = refusal(&huge, &pantry);
        assert!(memory.contains("does not fit"), "{memory}");
        assert!(run(&StageOrder { ignore_memory: true, ..huge }, &pantry).is_ok());
    }
}
