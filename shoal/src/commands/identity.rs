//! `shoal identity`: found a cluster, and issue its members' identities.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use protocol::trust;

use crate::output;

/// What can be done with identities.
#[derive(Debug, Subcommand)]
pub(crate) enum IdentityCommand {
    /// Found a cluster: make its certificate authority in a folder.
    Init(InitArgs),
    /// Make the identity of a member: the file that `shoal node` and other commands take as --identity.
    Issue(IssueArgs),
}

/// Arguments of `shoal identity init`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal identity init ~/shoal-ca        once, on a host that you trust

Whoever has the folder's ca-key.pem can make members. Keep it; it cannot be had back.")]
pub(crate) struct InitArgs {
    /// The folder; made if it is not there.
    folder: PathBuf,
}

/// Arguments of `shoal identity issue`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal identity issue ~/shoal-ca desk -o desk.json
  scp desk.json desk:.config/shoal/        and on desk: shoal node --identity ~/.config/shoal/desk.json

The file holds a private key: whoever has it is that member.")]
pub(crate) struct IssueArgs {
    /// The folder with the cluster's certificate authority.
    folder: PathBuf,
    /// The member's name, such as its host's.
    name: String,
    /// The file to write; one that exists is not replaced.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Runs a command.
pub(crate) fn run(command: IdentityCommand) -> Result<()> {
    match command {
        IdentityCommand::Init(InitArgs { folder }) => {
            trust::found_cluster(&folder)?;
            output::note(&format!("the cluster's certificate authority is in {}", folder.display()))?;
        }
        IdentityCommand::Issue(IssueArgs { folder, name, output }) => {
            trust::issue_identity(&trust::open_ca(&folder)?, &name, &output)?;
            output::note(&format!("the identity of {name} is in {}", output.display()))?;
        }
    }
    Ok(())
}
