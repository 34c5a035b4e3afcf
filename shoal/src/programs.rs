//! How this program starts itself, for what must not run in its own process.

use anyhow::{Context, Result};
use node::agent::WorkerCommand;

use crate::cli::{Globals, PEER_TIMEOUT_VARIABLE};
use crate::logging;

/// By which glibc's allocator is told what to do.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Large blocks are asked of the kernel in huge pages: weights and KV caches are read from end to end at every step (ADR 0016).
/// From 1 MiB on, which is where a batch's rows are, a block goes back to the kernel when it is freed: by itself glibc comes to
/// keep ever larger ones, and workers pieces of them.
const WORKERS_MEMORY: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1048576";

/// This program again, with another command, the same folders and patience, and the log of this one.
pub(crate) fn this_program(globals: &Globals, command: &str) -> Result<WorkerCommand> {
    let program = std::env::current_exe().context("finding this program, to start it again")?;
    let mut env = vec![(logging::FILTER_VARIABLE.into(), logging::filter(globals.verbose).into())];
    let folders = [("SHOAL_CACHE", &globals.cache_dir), ("SHOAL_MODELS", &globals.models_dir)];
    let given = folders.into_iter().filter_map(|(name, folder)| Some((name.into(), folder.clone()?.into())));
    env.extend(given);
    if let Some(seconds) = globals.peer_timeout {
        env.push((PEER_TIMEOUT_VARIABLE.into(), seconds.to_string().into()));
    }
    // What somebody has tuned stays as it is.
    if cfg!(target_os = "linux") && std::env::var_os(TUNABLES).is_none() {
        env.push((TUNABLES.into(), WORKERS_MEMORY.into()));
    }
    Ok(WorkerCommand { program, args: vec![command.into()], env })
}
