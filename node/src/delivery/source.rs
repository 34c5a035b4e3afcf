//! What this host can give of a model: from its copy of it, in whose place the part is computed while it is read, or from a part
//! that is stored.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::ReadAt;
use gguf::cut::{CutOptions, OutputPlan, Uncertified, plan_embedding, plan_slice};
use protocol::slices::{SliceFile, SliceId};

use crate::folders::Folders;
use crate::model_file::ModelFile;
use crate::model_hash;
use crate::slices::{CUTTER, Pin, SliceStore, form_of};

/// A part that can be read.
pub(crate) struct Opened {
    pub(crate) bytes: Arc<dyn ReadAt>,
    /// What all of it is, if that is known.
    pub(crate) sha256: Option<[u8; 32]>,
    /// Keeps it on the disk meanwhile.
    _pin: Option<Pin>,
}

/// Finds a part; none if this host has neither it nor the model. Only a copy of the model whose hash is remembered counts: to
/// hash one takes as long as to send it.
pub(crate) fn open(id: &SliceId, folders: &Folders) -> Option<Opened> {
    if let Some(plan) = planned(id, folders) {
        return Some(Opened { bytes: Arc::new(plan), sha256: None, _pin: None });
    }
    let found = SliceStore::new(folders.slices()).find(id)?;
    let file = File::open(&found.path).ok()?;
    Some(Opened { bytes: Arc::new(file), sha256: Some(found.sha256), _pin: Some(found.pin) })
}

/// The part of a copy of the model, if cutting it gives exactly what is asked for.
fn planned(id: &SliceId, folders: &Folders) -> Option<OutputPlan> {
    if id.cutter != CUTTER {
        return None;
    }
    let path = local_copy(id, folders)?;
    // Whether it may be cut was decided by whoever ordered the stage.
    let options = CutOptions { uncertified: Uncertified::Allow };
    let opened = ModelFile::open(&path).map_err(|error| error.to_string());
    let plan = opened.and_then(|model| {
        let plan = match id.file {
            SliceFile::Blocks(layers) => plan_slice(model.gguf(), layers, &options),
            SliceFile::Embedding => plan_embedding(model.gguf(), &options),
        };
        plan.map_err(|error| error.to_string())
    });
    match plan {
        Ok(plan) => (form_of(&plan) == id.form).then_some(plan),
        Err(error) => {
            tracing::warn!(model = %path.display(), %error, "a part of a model cannot be given out");
            None
        }
    }
}

fn local_copy(id: &SliceId, folders: &Folders) -> Option<PathBuf> {
    model_hash::remembered(id.model, &folders.model_hashes())
}
