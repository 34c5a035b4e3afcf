//! The few blocks that stand for a model, cut and ready for the benches that measure them as `shoal profile` does.

use std::time::Duration;

use anyhow::Result;
use cluster::Bytes;
use node::ModelFile;
use node::agent::WorkerCommand;
use profiler::{ACCURACY_BUDGET, BenchRequest, Files, Reduction, Settings};

use crate::cli::Globals;
use crate::commands::model::{self, BorrowedSlices};
use crate::commands::profile::{Ground, features, files, slices_budget};
use crate::interrupt::Interrupt;
use crate::programs::this_program;

/// A model and its parts.
pub(super) struct Parts {
    pub(super) file: ModelFile,
    reduction: Reduction,
    files: Files,
    command: WorkerCommand,
    settings: Settings,
    /// They are in use as long as this is.
    _slices: BorrowedSlices,
}

/// How they are run.
pub(super) struct Terms {
    pub(super) threads: u32,
    /// Tokens per slot.
    pub(super) n_ctx: u32,
    /// Time for all measurements, if the user says it.
    pub(super) budget: Option<Duration>,
}

impl Parts {
    /// Cuts them.
    pub(super) fn cut(
        model: &model::ModelArg,
        terms: &Terms,
        globals: &Globals,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let folders = model::folders(globals)?;
        let file = model.open(&folders)?;
        let reduction = Reduction::of(file.shape(), slices_budget(&file))?;
        let ground = Ground { file: &file, folders: &folders, interrupt, reduction: &reduction };
        let slices = ground.cut()?;
        let settings = Settings {
            threads: terms.threads,
            n_ctx: terms.n_ctx,
            reserve: Bytes::ZERO,
            budget: terms.budget.unwrap_or(ACCURACY_BUDGET),
            features: features(),
        };
        Ok(Self {
            files: files(&reduction, &slices),
            command: this_program(globals, "profile-worker")?,
            file,
            reduction,
            settings,
            _slices: slices,
        })
    }

    pub(super) fn request(&self) -> BenchRequest<'_> {
        let Self { file, reduction, files, command, settings, .. } = self;
        BenchRequest { model: file, reduction, files, command, settings }
    }
}
