//! `shoal stage-worker`: one stage, in a process of its own, because native code may abort it.

use anyhow::{Context, Result};
use node::agent::WorkerCommand;

use crate::cli::Globals;
use crate::logging;

/// Runs until the agent that started it goes.
pub(crate) fn run() -> Result<()> {
    stage::run_worker().context("running the stage")
}

/// This program again, as a worker.
pub(crate) fn command(globals: &Globals) -> Result<WorkerCommand> {
    let program = std::env::current_exe().context("finding this program, to start workers from it")?;
    let filter = logging::filter(globals.verbose);
    Ok(WorkerCommand {
        program,
        args: vec!["stage-worker".into()],
        env: vec![(logging::FILTER_VARIABLE.into(), filter.into())],
    })
}
