//! The `shoal` binary: command line, logging and wiring. What it wires lives in the other crates.
#![forbid(unsafe_code)]

mod chain;
mod cli;
mod commands;
mod cuts;
mod exit;
mod interrupt;
mod logging;
mod output;
mod programs;
mod progress;
mod sizes;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use protocol::patience::set_peer_timeout;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let Cli { command, globals } = Cli::parse();
    if let Some(seconds) = globals.peer_timeout {
        set_peer_timeout(Duration::from_secs(seconds));
    }
    let logging = match &command {
        Command::StageWorker | Command::ProfileWorker => logging::init_worker(),
        _ => logging::init(globals.verbose),
    };
    let outcome = logging.and_then(|()| commands::run(command, &globals));
    outcome.map_or_else(|error| exit::report(&error), |()| ExitCode::SUCCESS)
}
