//! `shoal stage-worker`: one stage, in a process of its own, because native code may abort it.

use anyhow::{Context, Result};
use node::agent::WorkerCommand;

use crate::cli::Globals;
use crate::programs::this_program;

/// Runs until the agent that started it goes.
pub(crate) fn run() -> Result<()> {
    stage::run_worker().context("running the stage")
}

/// This program again, as a worker.
pub(crate) fn command(globals: &Globals) -> Result<WorkerCommand> {
    this_program(globals, "stage-worker")
}
