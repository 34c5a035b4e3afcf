//! How this program starts itself, for what must not run in its own process.

use anyhow::{Context, Result};
use node::agent::WorkerCommand;

use crate::cli::Globals;
use crate::logging;

/// This program again, with another command, the same folders, and the log of this one.
pub(crate) fn this_program(globals: &Globals, command: &str) -> Result<WorkerCommand> {
    let program = std::env::current_exe().context("finding this program, to start it again")?;
    let mut env = vec![(logging::FILTER_VARIABLE.into(), logging::filter(globals.verbose).into())];
    let folders = [("SHOAL_CACHE", &globals.cache_dir), ("SHOAL_MODELS", &globals.models_dir)];
    let given = folders.into_iter().filter_map(|(name, folder)| Some((name.into(), folder.clone()?.into())));
    env.extend(given);
    Ok(WorkerCommand { program, args: vec![command.into()], env })
}
