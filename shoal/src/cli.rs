//! The command line as a whole. Each command's own arguments lie with the command.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use protocol::patience::MIN_PEER_TIMEOUT;

use crate::commands::{
    bench, doctor, identity, links, node, plan, profile, serve, simulate, slice, status, token,
};

/// Serves one large language model from the machines you own.
#[derive(Debug, Parser)]
#[command(
    name = "shoal",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    max_term_width = 100,
    after_help = EXAMPLES
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) globals: Globals,
}

const EXAMPLES: &str = "\
Examples:
  shoal serve -m SmolLM2 --stages 3            three processes share the model; API on port 8080
  shoal slice info model.gguf                  what a model is made of
  shoal slice verify -m SmolLM2 --cuts 10,20   does the cut model compute what the whole does?

A model is a .gguf file, or the start of the name of one in the models folder.";

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a model as a pipeline of processes and serve it through an OpenAI-compatible API.
    Serve(Box<serve::ServeArgs>),
    /// Describe, cut and verify models.
    #[command(subcommand)]
    Slice(slice::SliceCommand),
    /// Measure what this host's processors can do for a model.
    Profile(profile::ProfileArgs),
    /// Decide which devices form which replica, from what was measured on them.
    Plan(Box<plan::PlanArgs>),
    /// Show what requests would go through under a plan.
    Simulate(Box<simulate::SimulateArgs>),
    /// Measure.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Make this host a part of a cluster.
    Node(Box<node::NodeArgs>),
    /// Show what is served, by which nodes, and what they run.
    Status(status::StatusArgs),
    /// Find out why nothing is served, or not well.
    Doctor(doctor::DoctorArgs),
    /// Invite hosts to the cluster.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Measure the links between nodes.
    Links(links::LinksArgs),
    /// Found a cluster by hand and issue its members' identities.
    #[command(subcommand)]
    Identity(identity::IdentityCommand),
    /// Run one stage; started by `shoal serve`, configured on stdin.
    #[command(hide = true)]
    StageWorker,
    /// Measure in a process of its own; started by `shoal profile`, told what on stdin.
    #[command(hide = true)]
    ProfileWorker,
    /// List what llama.cpp can compute on; started by `shoal node`.
    #[command(hide = true)]
    DeviceList,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "General options")]
pub(crate) struct Globals {
    /// Log more: -v progress of the parts, -vv details, -vvv everything. SHOAL_LOG takes finer filters.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Folder for what can be made again: slices and hashes [default: ~/.cache/shoal].
    #[arg(long, global = true, env = "SHOAL_CACHE", value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Folder in which models are found by name [default: models in the cache folder].
    #[arg(long, global = true, env = "SHOAL_MODELS", value_name = "DIR")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Folder for what cannot be made again: this host's membership, and the cluster's [default: ~/.local/share/shoal].
    #[arg(long, global = true, env = "SHOAL_STATE", value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Another process that gives no sign of life for so long is lost [default: 3]. More bears with hosts that stall, such as
    /// swapping ones; requests on a frozen host then pause for longer.
    #[arg(long, global = true, env = PEER_TIMEOUT_VARIABLE, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(MIN_PEER_TIMEOUT.as_secs()..=3600))]
    pub(crate) peer_timeout: Option<u64>,
}

/// By which workers are told.
pub(crate) const PEER_TIMEOUT_VARIABLE: &str = "SHOAL_PEER_TIMEOUT";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_that_a_user_sees_explains_itself_with_an_example() {
        fn check(command: &clap::Command, path: &str) {
            for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
            {
                let path = format!("{path} {}", sub.get_name());
                assert!(sub.get_about().is_some(), "{path} has no description");
                let examples = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(sub.has_subcommands() || examples.contains("shoal "), "{path} has no example");
                check(sub, &path);
            }
        }
        check(&Cli::command(), "shoal");
    }
}
