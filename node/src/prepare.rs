//! From a model and a wish to what the stages of a replica load: which layers, whether they fit, and their files.
//!
//! Planning reads headers and computes; only cutting writes. So a wish that cannot be met is refused at once.

use std::path::PathBuf;

use cluster::{
    Bytes, LayerRange, LayerRangeError, Load, MemoryCosts, ModelHash, ModelShape, StageLoad, StageMemory,
};
use gguf::architectures::{self, EmbeddingScale, HiddenInput, Support};
use gguf::cut::{CutOptions, plan_embedding, plan_slice};
use protocol::slices::SliceForm;
use thiserror::Error;

use crate::folders::Folders;
use crate::host::available_memory;
use crate::memory::{Footprint, MemoryCheck, MemoryError};
use crate::model_file::ModelFile;
use crate::model_hash::{HashError, model_hash};
use crate::progress::Observer;
use crate::slices::{CutRequest, Pin, SliceError, SliceStore, form_of};

/// Context per slot unless another is asked for: enough for a long chat, and its cache small beside the weights.
pub const DEFAULT_CONTEXT: u32 = 4096;

/// How the layers are shared out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// Over so many stages, evenly by bytes.
    Stages(u32),
    /// At these layers.
    Cuts(Vec<u32>),
}

/// The replica that is wanted.
#[derive(Debug, Clone)]
pub struct ReplicaRequest {
    /// Its stages.
    pub layout: Layout,
    /// Blocks on a GPU, per stage; stages not listed have none.
    pub gpu_layers: Vec<u32>,
    /// Sequences.
    pub slots: u32,
    /// Tokens per sequence; [`DEFAULT_CONTEXT`], or what the model was trained for if that is less.
    pub n_ctx: Option<u32>,
    /// Prompt tokens per prefill frame.
    pub prefill_chunk: u32,
    /// Which architectures may be cut.
    pub options: CutOptions,
    /// Replicas alike that this host is to run, this one among them.
    pub replicas_here: u32,
    /// What to do if they do not fit.
    pub memory_check: MemoryCheck,
    /// What a profile of this host and model says that stages take besides weights and cache, if there is one.
    pub memory_costs: Option<MemoryCosts>,
}

/// Why a replica cannot be prepared.
#[derive(Debug, Error)]
pub enum PrepareError {
    /// The cuts are none of this model.
    #[error(transparent)]
    Layers(#[from] LayerRangeError),
    /// More blocks on a GPU than the stage has, or more numbers than stages.
    #[error("--gpu-layers asks for {asked} layers on the GPU for stage {stage}, which has {has}")]
    GpuLayers {
        /// The stage.
        stage: usize,
        /// Blocks asked for.
        asked: u32,
        /// Blocks it has.
        has: u32,
    },
    /// It does not fit.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The model cannot be read.
    #[error(transparent)]
    Hash(#[from] HashError),
    /// The model cannot be cut, or its slices not be stored.
    #[error(transparent)]
    Slices(#[from] SliceError),
}

/// A replica that can be had: what each stage will hold.
pub struct ReplicaPlan {
    model: ModelFile,
    options: CutOptions,
    stages: Vec<StageLoad>,
    files: StageFiles,
    predicted: Vec<StageMemory>,
    load: Load,
    prefill_chunk: u32,
}

/// What the files of a replica's stages are, wherever they come to lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageFiles {
    /// One for each stage.
    pub(crate) slices: Vec<SliceForm>,
    /// The first stage's second one.
    pub(crate) embedding: SliceForm,
}

/// A stage whose file is there.
#[derive(Debug, Clone)]
pub struct PreparedStage {
    /// Its blocks.
    pub layers: LayerRange,
    /// How many of them lie on a GPU.
    pub gpu_layers: u32,
    /// The file that holds them.
    pub path: PathBuf,
    /// The memory it will need.
    pub predicted: StageMemory,
}

/// A replica whose files are there.
#[derive(Debug, Clone)]
pub struct PreparedReplica {
    /// The model's name.
    pub model: String,
    /// The model's hash.
    pub model_hash: ModelHash,
    /// The model.
    pub shape: ModelShape,
    /// Its stages, in order.
    pub stages: Vec<PreparedStage>,
    /// The token embedding.
    pub embedding: PathBuf,
    /// What each stage is asked to hold.
    pub load: Load,
    /// Prompt tokens per prefill frame.
    pub prefill_chunk: u32,
    /// Which architectures may be cut.
    pub options: CutOptions,
    /// Keep its files where they are.
    pub pins: Vec<Pin>,
}

impl ReplicaPlan {
    /// Shares out the layers of `model` and checks that they fit.
    pub fn new(model: ModelFile, request: &ReplicaRequest) -> Result<Self, PrepareError> {
        let shape = model.shape();
        let ranges = ranges(shape, &request.layout)?;
        let (stages, files) = stage_loads(&model, &ranges, request)?;
        let load = load(shape, request);
        let costs = request.memory_costs.unwrap_or_else(|| MemoryCosts::assumed(shape));
        let footprint = Footprint { shape, costs: &costs };
        let predicted = match footprint.check(&stages, load, request.replicas_here, available_memory()) {
            Ok(predicted) => predicted,
            Err(error) => {
                match request.memory_check {
                    MemoryCheck::Enforce => return Err(error.into()),
                    MemoryCheck::Warn => tracing::warn!("{error}"),
                    MemoryCheck::Elsewhere => {}
                }
                footprint.estimate(&stages, load)
            }
        };
        let ReplicaRequest { options, prefill_chunk, .. } = *request;
        Ok(Self { options, stages, files, predicted, load, prefill_chunk, model })
    }

    /// The model.
    pub fn model(&self) -> &ModelFile {
        &self.model
    }

    /// What each stage is asked to hold.
    pub fn load(&self) -> Load {
        self.load
    }

    /// What each stage will hold.
    pub fn stages(&self) -> &[StageLoad] {
        &self.stages
    }

    /// The files of the stages.
    pub(crate) fn files(&self) -> &StageFiles {
        &self.files
    }

    /// The memory each stage will need.
    pub fn predicted(&self) -> &[StageMemory] {
        &self.predicted
    }

    /// Prompt tokens per prefill frame.
    pub fn prefill_chunk(&self) -> u32 {
        self.prefill_chunk
    }

    /// Which architectures may be cut.
    pub fn options(&self) -> CutOptions {
        self.options
    }

    /// The model's hash: how nodes know their copy of it.
    pub fn hash(&self, folders: &Folders, observer: &mut Observer<'_>) -> Result<ModelHash, HashError> {
        model_hash(self.model.parts(), &folders.model_hashes(), observer)
    }

    /// Cuts what is not there yet.
    pub fn prepare(
        self,
        folders: &Folders,
        observer: &mut Observer<'_>,
    ) -> Result<PreparedReplica, PrepareError> {
        let hash = self.hash(folders, observer)?;
        let in_place = runs_in_place(&self.model, self.stages.len());
        let ranges: Vec<LayerRange> =
            if in_place { Vec::new() } else { self.stages.iter().map(|stage| stage.layers).collect() };
        let files = self.cut(hash, &ranges, folders, observer)?;
        let path =
            |i: usize| files.slices.get(i).map_or(self.model.path(), |file| file.path.as_path()).to_owned();
        let stages = self.stages.iter().zip(&self.predicted).enumerate().map(|(i, (stage, predicted))| {
            PreparedStage {
                layers: stage.layers,
                gpu_layers: stage.gpu_layers,
                path: path(i),
                predicted: *predicted,
            }
        });
        Ok(PreparedReplica {
            model: self.model.name(),
            model_hash: hash,
            options: self.options,
            stages: stages.collect(),
            shape: self.model.shape().clone(),
            pins: files.slices.iter().chain([&files.embedding]).map(|file| file.pin.clone()).collect(),
            embedding: files.embedding.path,
            load: self.load,
            prefill_chunk: self.prefill_chunk,
        })
    }

    fn cut(
        &self,
        hash: ModelHash,
        ranges: &[LayerRange],
        folders: &Folders,
        observer: &mut Observer<'_>,
    ) -> Result<crate::slices::StoredSlices, SliceError> {
        let request = CutRequest { model: &self.model, hash, ranges, options: self.options };
        SliceStore::new(folders.slices()).ensure(&request, observer)
    }
}

/// Whether the only stage can load the model's own file, which saves a copy of it on the disk.
///
/// It can where the graph takes hidden rows as they are. An architecture that scales them, or wants them in some other
/// way, is cut, because a slice says so. What else a slice states is about its place in the model.
pub(crate) fn runs_in_place(model: &ModelFile, stages: usize) -> bool {
    let architecture = architectures::find(&model.shape().architecture);
    stages == 1
        && architecture.is_some_and(|known| {
            known.support == Support::Certified
                && known.hidden_input == HiddenInput::Batch
                && !matches!(known.embedding_scale, EmbeddingScale::Key { .. })
        })
}

fn ranges(shape: &ModelShape, layout: &Layout) -> Result<Vec<LayerRange>, LayerRangeError> {
    match layout {
        Layout::Cuts(cuts) => LayerRange::from_cuts(cuts, shape.n_layer()),
        Layout::Stages(stages) => shape.split(*stages),
    }
}

fn stage_loads(
    model: &ModelFile,
    ranges: &[LayerRange],
    request: &ReplicaRequest,
) -> Result<(Vec<StageLoad>, StageFiles), PrepareError> {
    if let Some(&asked) = request.gpu_layers.get(ranges.len()) {
        return Err(PrepareError::GpuLayers { stage: ranges.len(), asked, has: 0 });
    }
    let in_place = runs_in_place(model, ranges.len());
    let loads = ranges.iter().enumerate().map(|(stage, &layers)| {
        let plan = plan_slice(model.gguf(), layers, &request.options).map_err(SliceError::from)?;
        let gpu_layers = request.gpu_layers.get(stage).copied().unwrap_or(0);
        if gpu_layers > layers.len() {
            return Err(PrepareError::GpuLayers { stage, asked: gpu_layers, has: layers.len() });
        }
        let weights = if in_place { all_tensors(model) } else { Bytes(plan.tensor_bytes()) };
        Ok((StageLoad { layers, weights, gpu_layers }, form_of(&plan)))
    });
    let (loads, slices) = loads.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let embedding = plan_embedding(model.gguf(), &request.options).map_err(SliceError::from)?;
    Ok((loads, StageFiles { slices, embedding: form_of(&embedding) }))
}

/// More than the slice of all layers has: an embedding matrix that is not tied is loaded with the rest.
pub(crate) fn all_tensors(model: &ModelFile) -> Bytes {
    model.gguf().tensors().iter().map(|tensor| Bytes(tensor.bytes)).sum()
}

fn load(shape: &ModelShape, request: &ReplicaRequest) -> Load {
    let default =
        if shape.n_ctx_train == 0 { DEFAULT_CONTEXT } else { DEFAULT_CONTEXT.min(shape.n_ctx_train) };
    let n_ctx = request.n_ctx.unwrap_or(default);
    if shape.n_ctx_train > 0 && n_ctx > shape.n_ctx_train {
        tracing::warn!(
            n_ctx,
            trained = shape.n_ctx_train,
            "the context is longer than the model was trained for"
        );
    }
    // A frame is a prefill chunk or decode rows, at most one per slot.
    Load { slots: request.slots, n_ctx, n_ubatch: request.prefill_chunk.max(request.slots) }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::test_model;

    fn request(layout: Layout) -> ReplicaRequest {
        ReplicaRequest {
            layout,
            gpu_layers: Vec::new(),
            slots: 2,
            n_ctx: None,
            prefill_chunk: 16,
            options: CutOptions::default(),
            replicas_here: 1,
            memory_check: MemoryCheck::Enforce,
            memory_costs: None,
        }
    }

    fn plan(folder: &std::path::Path, request: &ReplicaRequest) -> Result<ReplicaPlan, PrepareError> {
        ReplicaPlan::new(ModelFile::open(&test_model::write(folder)).unwrap(), request)
    }

    #[test]
    fn stages_and_cuts_become_files() {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::new(Some(folder.path().join("cache")), None).unwrap();
        for layout in [Layout::Stages(2), Layout::Cuts(vec![2])] {
            let plan = plan(folder.path(), &request(layout)).unwrap();
            assert_eq!(plan.load().n_ctx, 64, "no more than the model was trained for");
            let prepared = plan.prepare(&folders, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(prepared.stages.len(), 2);
            assert!(prepared.stages.iter().all(|stage| stage.path.is_file()));
            assert!(prepared.embedding.is_file());
        }
    }

    #[test]
    fn the_only_stage_loads_the_models_own_file() {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::new(Some(folder.path().join("cache")), None).unwrap();
        let plan = plan(folder.path(), &request(Layout::Stages(1))).unwrap();
        let prepared = plan.prepare(&folders, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(prepared.stages[0].path, folder.path().join("tiny.gguf"));
    }

    #[test]
    fn what_the_model_does_not_have_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for layout in [Layout::Stages(5), Layout::Stages(0), Layout::Cuts(vec![3, 2]), Layout::Cuts(vec![4])]
        {
            let refused = plan(folder.path(), &request(layout)).err().unwrap();
            assert!(matches!(refused, PrepareError::Layers(_)), "{refused}");
        }
        for gpu_layers in [vec![5], vec![0, 0, 1]] {
            let wish = ReplicaRequest { gpu_layers, ..request(Layout::Stages(2)) };
            let refused = plan(folder.path(), &wish).err().unwrap();
            assert!(matches!(refused, PrepareError::GpuLayers { .. }), "{refused}");
        }
    }

    // Field case 13.
    #[test]
    fn what_does_not_fit_is_refused_unless_told_to_try() {
        let folder = tempfile::tempdir().unwrap();
        let huge = ReplicaRequest { slots: 256, n_ctx: Some(1 << 30), ..request(Layout::Stages(2)) };
        assert!(matches!(plan(folder.path(), &huge), Err(PrepareError::Memory(_))));
        let trying = ReplicaRequest { memory_check: MemoryCheck::Warn, ..huge };
        assert!(plan(folder.path(), &trying).is_ok());
    }
}
