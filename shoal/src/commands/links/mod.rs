//! `shoal links`: what the network between nodes can do, measured by the nodes.

mod file;
mod report;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use futures::future::join_all;
use node::NodeClient;
use node::links::{LinkOutcome, Scope, SurveyProgress, survey};
use protocol::node::{Address, MAX_N_EMBD};

use super::nodes::{IdentityArg, connect, node_address};
use crate::interrupt::{self, stop_asked};
use crate::output;
use crate::progress::ProgressView;

/// Arguments of `shoal links`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal links --identity me.json --node desk --node mac --node nas
  shoal links --identity me.json --node desk --node mac -o cluster.json     for `shoal plan`
  shoal links --identity me.json --node 10.0.0.5:8470 --node [fd00::7] --json

Every ordered pair of nodes is measured at least twice, at different times, while no other measurement uses either
node: some three seconds for each pair.")]
pub(crate) struct LinksArgs {
    #[command(flatten)]
    identity: IdentityArg,
    /// Address of a node; repeat it for each.
    #[arg(long = "node", value_name = "ADDRESS", required = true, value_delimiter = ',', value_parser = node_address)]
    nodes: Vec<Address>,
    /// Elements of the hidden rows whose frames are timed: the model's embedding width.
    #[arg(long, value_name = "N", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_N_EMBD)))]
    n_embd: u32,
    /// Write nodes, devices and links to this file. If it exists, links are replaced, nodes and devices added.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A node that could not be connected to.
struct Missing {
    address: Address,
    reason: String,
}

/// All that was found.
struct Found {
    nodes: Vec<NodeClient>,
    missing: Vec<Missing>,
    links: Vec<LinkOutcome>,
    n_embd: u32,
}

/// Measures and reports.
pub(crate) fn run(args: LinksArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.context("starting the async runtime")?.block_on(async {
        tokio::select! {
            outcome = measure(&args) => outcome,
            // Dropped calls end the measurements; nothing has been written.
            () = stop_asked() => std::process::exit(interrupt::EXIT_CODE),
        }
    })
}

async fn measure(args: &LinksArgs) -> Result<()> {
    // Before the measurement: a file that cannot be updated should be told now.
    let known = args.output.as_deref().map(file::read).transpose()?;
    let (nodes, missing) = connect_all(args).await?;
    let mut view = ProgressView::new();
    let mut show = |progress: SurveyProgress| {
        let what = ["measuring the links", "measuring the links again", "measuring some links once more"];
        let what = what.get(progress.pass).copied().unwrap_or("measuring the links");
        view.show_share(what, progress.done as u64, progress.total as u64);
    };
    let links = survey(&nodes, Scope::All, args.n_embd, &mut show).await;
    view.finish();
    let found = Found { nodes, missing, links, n_embd: args.n_embd };
    if let (Some(path), Some(known)) = (&args.output, known) {
        file::write(path, known, &found)?;
        output::note(&format!("nodes, devices and links are in {}", path.display()))?;
    }
    if args.json {
        output::print_json(&report::json(&found))?;
    } else {
        output::print(&report::text(&found))?;
    }
    complain(&found)
}

/// Connects to all nodes. One that cannot be reached is missing; names and processes must be different.
async fn connect_all(args: &LinksArgs) -> Result<(Vec<NodeClient>, Vec<Missing>)> {
    let identity = args.identity.read()?;
    let connected = join_all(args.nodes.iter().map(|address| connect(address, &identity))).await;
    let (mut nodes, mut missing) = (Vec::<NodeClient>::new(), Vec::new());
    for (address, outcome) in args.nodes.iter().zip(connected) {
        match outcome {
            Ok(node) => {
                if let Some(same) = nodes.iter().find(|other| other.name() == node.name()) {
                    bail!(
                        "{} and {address} are both called {}: give each node once, under a name of its own",
                        same.address(),
                        node.name()
                    );
                }
                nodes.push(node);
            }
            Err(error) => missing.push(Missing { address: address.clone(), reason: format!("{error:#}") }),
        }
    }
    if nodes.len() < 2 {
        let reasons: Vec<String> =
            missing.iter().map(|Missing { address, reason }| format!("{address}: {reason}")).collect();
        bail!("a link takes two nodes, and {} could be connected to. {}", nodes.len(), reasons.join("; "));
    }
    Ok((nodes, missing))
}

/// What is missing is a failure, after all that was found has been told.
fn complain(found: &Found) -> Result<()> {
    let failed = found.links.iter().filter(|link| link.outcome.is_err()).count();
    match (failed, found.missing.len()) {
        (0, 0) => Ok(()),
        (links, nodes) => {
            bail!("{links} of {} links were not measured, and {nodes} nodes not reached", found.links.len())
        }
    }
}
