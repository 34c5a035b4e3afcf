//! What commands about a model have in common: finding it, opening it, cutting it for their own use.

use std::ops::ControlFlow;

use anyhow::{Context, Result, bail};
use clap::Args;
use cluster::LayerRange;
use gguf::cut::{CutOptions, Uncertified};
use node::{CutRequest, Folders, ModelFile, Origin, SliceStore, StoredSlices, model_hash, resolve_model};

use crate::cli::Globals;
use crate::interrupt::Interrupt;
use crate::progress::ProgressView;

/// Which model a command is about.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// A .gguf file, or the start of the name of one in the models folder.
    #[arg(value_name = "MODEL", required_unless_present = "model")]
    positional: Option<String>,
    /// The same, as an option.
    #[arg(short, long, value_name = "MODEL", conflicts_with = "positional")]
    model: Option<String>,
}

impl ModelArg {
    /// As the user calls it.
    pub(crate) fn name(&self) -> &str {
        // clap has seen to it that one is given.
        self.model.as_ref().or(self.positional.as_ref()).map_or("", String::as_str)
    }

    /// Finds and opens it.
    pub(crate) fn open(&self, folders: &Folders) -> Result<ModelFile> {
        open(self.name(), folders)
    }
}

/// The folders that the command line asks for.
pub(crate) fn folders(globals: &Globals) -> Result<Folders> {
    Ok(Folders::new(globals.cache_dir.clone(), globals.models_dir.clone())?)
}

/// Finds and opens a model.
pub(crate) fn open(name: &str, folders: &Folders) -> Result<ModelFile> {
    let path = resolve_model(name, folders.models())?;
    ModelFile::open(&path).context("opening the model")
}

/// Slices in the host's store. Those that were not there before are removed again when dropped.
pub(crate) struct BorrowedSlices(StoredSlices);

impl BorrowedSlices {
    /// Cuts what is not there yet, and shows how far it is.
    pub(crate) fn cut(
        model: &ModelFile,
        ranges: &[LayerRange],
        folders: &Folders,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let mut view = ProgressView::new();
        let mut observer = |progress: node::Progress| {
            view.show(&progress);
            interrupt.check()
        };
        let hash = model_hash(model.parts(), &folders.model_hashes(), &mut observer)?;
        // What may be served is decided by `serve`; here the user wants to find out whether it could be.
        let request =
            CutRequest { model, hash, ranges, options: CutOptions { uncertified: Uncertified::Allow } };
        Ok(Self(SliceStore::new(folders.slices()).ensure(&request, &mut observer)?))
    }

    /// The files.
    pub(crate) fn files(&self) -> &StoredSlices {
        &self.0
    }
}

impl Drop for BorrowedSlices {
    fn drop(&mut self) {
        let StoredSlices { slices, embedding } = &self.0;
        for file in slices.iter().chain([embedding]).filter(|file| file.origin == Origin::Written) {
            if let Err(e) = file.remove() {
                tracing::warn!(file = %file.path.display(), error = %e, "a slice could not be removed");
            }
        }
    }
}

/// Fails if the user pressed Ctrl-C.
pub(crate) fn go_on(interrupt: &Interrupt) -> Result<()> {
    match interrupt.check() {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => bail!("interrupted"),
    }
}
