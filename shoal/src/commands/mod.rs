//! The commands, one file each.

pub(crate) mod admin;
pub(crate) mod bench;
pub(crate) mod doctor;
pub(crate) mod identity;
pub(crate) mod links;
mod model;
pub(crate) mod node;
mod nodes;
pub(crate) mod plan;
mod planning;
pub(crate) mod profile;
mod profile_worker;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod slice;
mod stage_worker;
mod state;
pub(crate) mod status;
pub(crate) mod token;

use anyhow::Result;

use crate::cli::{Command, Globals};

/// Runs a command.
pub(crate) fn run(command: Command, globals: &Globals) -> Result<()> {
    match command {
        Command::Serve(args) => serve::run(*args, globals),
        Command::Slice(command) => slice::run(command, globals),
        Command::Plan(args) => plan::run(&args, globals),
        Command::Simulate(args) => simulate::run(&args, globals),
        Command::Bench(command) => bench::run(command, globals),
        Command::Profile(args) => profile::run(&args, globals),
        Command::StageWorker => stage_worker::run(),
        Command::ProfileWorker => profile_worker::run(),
        Command::Node(args) => node::run(*args, globals),
        Command::Doctor(args) => doctor::run(&args, globals),
        Command::Status(args) => status::run(&args, globals),
        Command::Token(command) => token::run(command, globals),
        Command::Links(args) => links::run(args),
        Command::Identity(command) => identity::run(command),
        Command::DeviceList => node::list_devices(),
    }
}
