//! `shoal slice`: describe, cut and verify models.

mod cut;
mod info;
mod verify;

use anyhow::Result;
use clap::Subcommand;

use crate::cli::Globals;

/// What can be done with slices.
#[derive(Debug, Subcommand)]
pub(crate) enum SliceCommand {
    /// Describe a model: its blocks, sizes, and whether it can be cut.
    Info(info::InfoArgs),
    /// Cut a model into slices: files that hold some of its blocks each.
    Cut(cut::CutArgs),
    /// Compare the whole model with the chain of its slices, token by token.
    Verify(verify::VerifyArgs),
}

/// Runs a command.
pub(crate) fn run(command: SliceCommand, globals: &Globals) -> Result<()> {
    match command {
        SliceCommand::Info(args) => info::run(&args, globals),
        SliceCommand::Cut(args) => cut::run(&args, globals),
        SliceCommand::Verify(args) => verify::run(&args, globals),
    }
}
