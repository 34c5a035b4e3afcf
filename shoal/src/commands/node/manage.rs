//! `shoal node list`, `approve`, `remove`: on the orchestrator's host, whether it runs or not.

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::{Table, presets};
use protocol::node::Address;
use registry::{NodeRecord, NodeView, Registry, Timestamp};

use crate::cli::Globals;
use crate::commands::state;
use crate::output;

/// Arguments of `shoal node list`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal node list               all nodes, with the codes of those that wait
  shoal node list --json

Whether a node is there now, and what it runs, is told by `shoal status`.")]
pub(super) struct ListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `shoal node approve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal node list                       shows the hosts that ask, and their codes
  shoal node approve desk               after the code on desk was found to be the same
  shoal node approve 3f2a               by the start of its id")]
pub(super) struct ApproveArgs {
    /// The node's name, its id, or the start of that.
    node: String,
}

/// Arguments of `shoal node remove`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal node remove desk                what it runs ends within seconds, and its certificate is worth nothing here

Other nodes take its certificate until that expires. `shoal node approve` makes it a member again.")]
pub(super) struct RemoveArgs {
    /// The node's name, its id, or the start of that.
    node: String,
}

/// Lists.
pub(super) fn list(args: &ListArgs, globals: &Globals) -> Result<()> {
    let nodes = registry(globals)?.members()?;
    if args.json {
        output::print_json(&nodes.iter().map(NodeView::from).collect::<Vec<_>>())?;
    } else {
        let nodes: Vec<NodeRecord> = nodes.into_iter().map(|member| member.record).collect();
        output::print(&table(&nodes, Timestamp::now()))?;
    }
    Ok(())
}

/// Lets in.
pub(super) fn approve(args: &ApproveArgs, globals: &Globals) -> Result<()> {
    let node = registry(globals)?.approve(&args.node)?;
    output::note(&format!("{} ({}) is a member of the cluster", node.name, node.id))?;
    Ok(())
}

/// Turns away.
pub(super) fn remove(args: &RemoveArgs, globals: &Globals) -> Result<()> {
    let node = registry(globals)?.remove(&args.node)?;
    output::note(&format!("{} ({}) is no member of the cluster any more", node.name, node.id))?;
    Ok(())
}

fn registry(globals: &Globals) -> Result<Registry> {
    Registry::open_existing(&state::folder(globals)?.cluster()).context("opening the cluster's state")
}

fn table(nodes: &[NodeRecord], now: Timestamp) -> String {
    if nodes.is_empty() {
        return "no nodes: `shoal token create` invites one".to_owned();
    }
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["name", "state", "id", "last seen", "address", "certificate expires", "code"]);
    for node in nodes {
        let relative = |time: Option<Timestamp>| time.map_or_else(String::new, |time| time.relative_to(now));
        table.add_row([
            node.name.0.clone(),
            node.state.to_string(),
            node.id.to_string(),
            relative(node.last_seen),
            node.reached.as_ref().map_or_else(String::new, Address::to_string),
            relative(node.certificate_expires),
            node.code.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use cluster::NodeId;
    use protocol::node::Build;
    use registry::{Member, MemberState};

    use super::*;

    #[test]
    fn the_table_shows_who_waits_and_with_which_code() {
        let now = Timestamp(1_800_000_000);
        let node = NodeRecord {
            id: "00000000-0000-4000-8000-000000000001".parse().unwrap(),
            name: NodeId("desk".into()),
            state: MemberState::Pending,
            code: Some("ab12-cd34".into()),
            build: Build { version: "0.1.0".into(), llama_cpp: "b1".into(), features: vec![] },
            addresses: vec![],
            reached: None,
            asked: now,
            last_seen: Some(Timestamp(now.0 - 5)),
            certificate_expires: None,
        };
        let text = table(std::slice::from_ref(&node), now);
        for part in ["desk", "pending", "ab12-cd34", "5 s ago", "00000000-0000"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        let json = serde_json::to_value(NodeView::from(&Member { record: node, present: None })).unwrap();
        assert_eq!((&json["state"], &json["asked"]), (&"pending".into(), &"2027-01-15T08:00:00Z".into()));
    }
}
