//! `shoal doctor`: why nothing is served, or not well. Every check is a line with numbers, and where it is not well what to do.
//!
//! It asks the API what is served, the admin API who is there, each node how its host is and whom it reaches, and looks at this
//! host. It changes nothing.

mod checks;
mod here;
mod nodes;
mod served;

use anyhow::{Context, Result};
use clap::Args;

use super::admin::AdminArgs;
use super::status;
use crate::cli::Globals;
use crate::exit::Unwell;
use crate::output;
use checks::Findings;

/// Arguments of `shoal doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal doctor                            on the orchestrator's host: what is served, every node, and every path between them
  shoal doctor -m SmolLM2 --stages 3      also whether the model can be read, and whether each node has room for a third of it
  shoal doctor --json                     for programs
  shoal doctor --server http://desk:8080 --admin-key admin-key      from elsewhere: without the nodes' own answers

Exits with 1 if something fails; warnings are no failure. It measures no bandwidth: `shoal links` does.")]
pub(crate) struct DoctorArgs {
    /// A .gguf file, or the start of the name of one in the models folder, that is to be served.
    #[arg(short, long, env = "SHOAL_MODEL", value_name = "MODEL")]
    model: Option<String>,
    /// Stages of a replica, as `shoal serve --stages` is asked for.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024),
          requires = "model")]
    stages: u32,
    #[command(flatten)]
    admin: AdminArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Looks at everything, and fails if something does.
pub(crate) fn run(args: &DoctorArgs, globals: &Globals) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let findings = runtime.context("starting the async runtime")?.block_on(examine(args, globals))?;
    if args.json {
        output::print_json(&findings)?;
    } else {
        output::print(&findings.to_string())?;
    }
    if findings.failed() > 0 { Err(Unwell.into()) } else { Ok(()) }
}

async fn examine(args: &DoctorArgs, globals: &Globals) -> Result<Findings> {
    let mut findings = Findings::default();
    let need = here::look(args, globals, &mut findings)?;
    let admin = args.admin.open(globals)?;
    match status::look(&admin).await {
        Ok(status) => {
            served::look(&status, &mut findings).await;
            if let Some(members) = status.nodes {
                nodes::look(&members, need, globals, &mut findings).await?;
            }
        }
        Err(error) => served::is_away(&admin.server, &error, &mut findings).await,
    }
    Ok(findings)
}
