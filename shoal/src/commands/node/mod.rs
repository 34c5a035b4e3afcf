//! `shoal node`: this host as a part of a cluster, and on the orchestrator's host, which nodes are.

mod devices;
mod leave;
mod manage;
mod membership;
mod run;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cli::Globals;
pub(crate) use devices::{ask_for_devices, list_devices};

/// Arguments of `shoal node`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = run::EXAMPLES)]
pub(crate) struct NodeArgs {
    #[command(subcommand)]
    command: Option<NodeCommand>,
    #[command(flatten)]
    run: run::RunArgs,
}

/// What can be done with nodes.
#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Make this host a part of a cluster, as `shoal node` alone does.
    Run(Box<run::RunArgs>),
    /// On the orchestrator's host: list the nodes that are or were members, and the hosts that ask to be.
    List(manage::ListArgs),
    /// On the orchestrator's host: let in a host that asks.
    Approve(manage::ApproveArgs),
    /// Let this host be a part of its cluster no more.
    Leave(leave::LeaveArgs),
    /// On the orchestrator's host: let a node be a member no more, or turn away a host that asks.
    Remove(manage::RemoveArgs),
}

/// Runs a command.
pub(crate) fn run(args: NodeArgs, globals: &Globals) -> Result<()> {
    match args.command {
        None => run::run(args.run, globals),
        Some(NodeCommand::Run(args)) => run::run(*args, globals),
        Some(NodeCommand::List(args)) => manage::list(&args, globals),
        Some(NodeCommand::Approve(args)) => manage::approve(&args, globals),
        Some(NodeCommand::Leave(args)) => leave::run(&args, globals),
        Some(NodeCommand::Remove(args)) => manage::remove(&args, globals),
    }
}
