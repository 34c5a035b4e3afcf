//! `shoal node leave`: on the node's own host, whether the node runs or not.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use node::membership::{Left, Membership, MembershipError, NodeState, leave};

use crate::cli::Globals;
use crate::commands::state;
use crate::output;

/// Until a node that runs here has noticed that it is no member: it is told within seconds, and stops its workers.
const NOTICED: Duration = Duration::from_secs(30);

/// Between two looks whether it has.
const LOOK: Duration = Duration::from_millis(200);

/// Arguments of `shoal node leave`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal node leave                      what the node runs ends within seconds, and so does the node
  shoal node leave --forget             also if the orchestrator is gone for good

To join again takes a token, or somebody's approval. Slices stay in the cache. On the orchestrator's host,
`shoal node remove` does the same.")]
pub(super) struct LeaveArgs {
    /// Forget the membership even if the orchestrator cannot be told; it then lists this node as away.
    #[arg(long)]
    forget: bool,
}

/// Leaves.
pub(super) fn run(args: &LeaveArgs, globals: &Globals) -> Result<()> {
    let folder = state::folder(globals)?.node();
    let member = NodeState::read_member(&folder).context("reading this host's membership")?;
    let member = member
        .ok_or_else(|| anyhow!("this host is no member of a cluster: {} has none", folder.display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let told = runtime.context("starting the async runtime")?.block_on(leave(&member));
    match told {
        Ok(Left::Now) => {}
        Ok(Left::Before) => output::note("the cluster had no place for this host any more")?,
        Err(error) if args.forget => output::note(&format!("the cluster is not told: {error}"))?,
        Err(error) => {
            let hint = "shoal node leave --forget leaves without it";
            return Err(anyhow!(error)).context(format!("leaving the cluster ({hint})"));
        }
    }
    forget(&folder, &member)?;
    output::note(&format!("{} left the cluster {}", member.identity.name, member.cluster()?))?;
    Ok(())
}

/// Forgets the membership, when the node that may run here has ended.
fn forget(folder: &Path, member: &Membership) -> Result<()> {
    let begun = Instant::now();
    loop {
        match NodeState::open(folder) {
            // Somebody may have joined anew meanwhile.
            Ok(state) if state.member()?.is_some_and(|now| now.id != member.id) => return Ok(()),
            Ok(state) => return state.forget().context("forgetting this host's membership"),
            Err(MembershipError::InUse(_)) if begun.elapsed() < NOTICED => std::thread::sleep(LOOK),
            Err(error @ MembershipError::InUse(_)) => {
                return Err(error).context("the node that runs here has not ended: stop it, and leave again");
            }
            Err(error) => return Err(error).context("forgetting this host's membership"),
        }
    }
}
