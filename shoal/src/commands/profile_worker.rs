//! `shoal profile-worker`: measures on one processor, in a process of its own, because native code may abort it.

use anyhow::{Context, Result};

/// Runs until the profiler that started it goes.
pub(crate) fn run() -> Result<()> {
    profiler::run_worker().context("measuring")
}
