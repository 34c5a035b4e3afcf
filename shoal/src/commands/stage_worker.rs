//! `shoal stage-worker`: one stage, in a process of its own, because native code may abort it.

use anyhow::{Context, Result};

/// Runs until the agent that started it goes.
pub(crate) fn run() -> Result<()> {
    stage::run_worker().context("running the stage")
}
