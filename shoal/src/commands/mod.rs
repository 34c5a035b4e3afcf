//! The commands, one file each.

pub(crate) mod bench;
mod model;
pub(crate) mod profile;
mod profile_worker;
pub(crate) mod serve;
pub(crate) mod slice;
mod stage_worker;

use anyhow::Result;

use crate::cli::{Command, Globals};

/// Runs a command.
pub(crate) fn run(command: Command, globals: &Globals) -> Result<()> {
    match command {
        Command::Serve(args) => serve::run(*args, globals),
        Command::Slice(command) => slice::run(command, globals),
        Command::Bench(command) => bench::run(command, globals),
        Command::Profile(args) => profile::run(&args, globals),
        Command::StageWorker => stage_worker::run(),
        Command::ProfileWorker => profile_worker::run(),
    }
}
