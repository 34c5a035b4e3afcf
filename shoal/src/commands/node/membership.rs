//! How `shoal node` comes to be a member: it was one before, it has a token, or it asks and waits.

use anyhow::{Context, Result, bail};
use cluster::NodeId;
use node::membership::{Applicant, JoinNews, Membership, NodeState, join, wait_for_admission};
use protocol::node::check_name;
use protocol::token::JoinToken;
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::nodes::build;
use crate::commands::state;
use crate::output;

/// What the command line asks for.
pub(super) struct Wanted<'a> {
    pub(super) token: Option<&'a JoinToken>,
    pub(super) name: Option<NodeId>,
    pub(super) json: bool,
}

/// What programs are told.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    NoOrchestrator,
    Asking { cluster: String, addresses: Vec<String> },
    Pending { code: &'a str, id: String },
    Lost { reason: &'a str },
    Joined { name: &'a str, id: String, cluster: String },
}

/// The host's membership, and the folder in which it is kept.
pub(super) async fn become_member(wanted: Wanted<'_>, globals: &Globals) -> Result<(NodeState, Membership)> {
    let folder = state::folder(globals)?.node();
    let kept = NodeState::open(&folder).context("reading this host's membership")?;
    if let Some(member) = kept.member().context("reading this host's membership")? {
        let cluster = member.cluster()?;
        if let Some(token) = wanted.token.filter(|token| token.ca != cluster) {
            bail!(
                "this host is a member of the cluster {cluster}, and the token is for {}: to change, remove {} first, \
                 or give this node another folder with --state",
                token.ca,
                folder.display()
            );
        }
        if wanted.name.is_some_and(|name| name != member.identity.name) {
            output::note(&format!("this node joined as {}, and keeps that name", member.identity.name))?;
        }
        return Ok((kept, member));
    }
    let (id, key) = kept.applicant().context("making this host's key")?;
    let name = wanted.name.unwrap_or_else(host_name);
    let applicant = Applicant { id, key, name, build: build() };
    let member = match wanted.token {
        Some(token) => join(&applicant, token).await.context("joining the cluster")?,
        None => {
            let mut tell = |news: JoinNews| tell(&news, &applicant, wanted.json);
            wait_for_admission(&applicant, &mut tell).await.context("asking to join a cluster")?
        }
    };
    kept.keep(&member).context("keeping this host's membership")?;
    joined(&member, wanted.json)?;
    Ok((kept, member))
}

fn joined(member: &Membership, json: bool) -> Result<()> {
    let (name, cluster) = (&member.identity.name.0, member.cluster()?.to_string());
    if json {
        output::print_json_line(&Event::Joined { name, id: member.id.to_string(), cluster })?;
    } else {
        output::note(&format!("this host joined the cluster {cluster} as {name}"))?;
    }
    Ok(())
}

fn tell(news: &JoinNews, applicant: &Applicant, json: bool) {
    let (event, words) = match news {
        JoinNews::NobodyThere => {
            let words = "no orchestrator announces itself on this network yet; if there is one, join it with a token \
                         from `shoal token create`"
                .to_owned();
            (Event::NoOrchestrator, words)
        }
        JoinNews::Found(found) => {
            let addresses: Vec<String> = found.addresses.iter().map(ToString::to_string).collect();
            let words = format!("asking to join the cluster {} at {}", found.ca, addresses.join(", "));
            (Event::Asking { cluster: found.ca.to_string(), addresses }, words)
        }
        JoinNews::Pending { code } => {
            let words = format!(
                "waiting to be let in. On the orchestrator's host, compare this code and approve:\n  {code}\n  shoal \
                 node approve {}",
                applicant.id
            );
            (Event::Pending { code, id: applicant.id.to_string() }, words)
        }
        JoinNews::Lost(reason) => (Event::Lost { reason }, format!("the orchestrator is away: {reason}")),
    };
    // News that cannot be written is not worth a failure.
    let _ = if json { output::print_json_line(&event) } else { output::note(&words) };
}

/// The host's name as far as a node may have it.
fn host_name() -> NodeId {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name = node::host_name().unwrap_or_default();
    let first = name.split('.').next().unwrap_or_default();
    let name: String = first.chars().map(|c| if plain(c) { c } else { '-' }).take(60).collect();
    check_name(name.trim_start_matches(['-', '_'])).unwrap_or_else(|_| NodeId("node".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_a_name_that_a_node_may_have() {
        assert!(check_name(&host_name().0).is_ok());
    }
}
