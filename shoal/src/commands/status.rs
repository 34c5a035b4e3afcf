//! `shoal status`: whether a model is served, by which nodes, and what they run, as the orchestrator sees it now.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use cluster::Bytes;
use comfy_table::{Table, presets};
use reqwest::{Client, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::state;
use crate::cli::Globals;
use crate::interrupt::stop_asked;
use crate::output;

/// Within which the orchestrator answers; it does nothing for it that takes time.
const DEADLINE: Duration = Duration::from_secs(5);

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Moves to the top left corner, and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Arguments of `shoal status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal status                                  on the orchestrator's host
  shoal status --watch                          again every second, until Ctrl-C
  shoal status --json
  shoal status --server http://desk:8080 --admin-key admin-key      from elsewhere, with a copy of the key

The admin API asks for a key. It lies in the orchestrator's state folder, in cluster/admin-key.")]
pub(crate) struct StatusArgs {
    /// Address of the API.
    #[arg(long, env = "SHOAL_SERVER", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    server: String,
    /// File with the admin key [default: the one in the state folder].
    #[arg(long, env = "SHOAL_ADMIN_KEY_FILE", value_name = "FILE")]
    admin_key: Option<PathBuf>,
    /// Look again every second.
    #[arg(long)]
    watch: bool,
    /// Print JSON, with --watch a line each time.
    #[arg(long)]
    json: bool,
}

/// What is shown.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
    pub(crate) server: String,
    /// What `/ready` says.
    pub(crate) ready: Value,
    /// What the admin API says; nothing where there is no cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes: Option<Vec<Value>>,
}

/// Of a node, what people are shown.
#[derive(Debug, Deserialize)]
struct Node {
    name: String,
    state: String,
    code: Option<String>,
    last_seen: Option<String>,
    present: Option<Present>,
}

#[derive(Debug, Deserialize)]
struct Present {
    address: Option<String>,
    unreachable: Option<String>,
    memory_total_bytes: u64,
    memory_available_bytes: u64,
    running: Vec<Running>,
}

#[derive(Debug, Deserialize)]
struct Running {
    model: String,
    stage: u32,
    n_stages: u32,
    first_block: u32,
    end_block: u32,
}

/// Looks once, or until Ctrl-C.
pub(crate) fn run(args: &StatusArgs, globals: &Globals) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting the async runtime")?.block_on(async {
        let (client, key) = (Client::new(), admin_key(args.admin_key.as_deref(), globals)?);
        if !args.watch {
            return show(&look(&args.server, &client, key.as_deref()).await?, args);
        }
        loop {
            match look(&args.server, &client, key.as_deref()).await {
                Ok(status) => show(&status, args)?,
                // It may come back.
                Err(error) => output::note(&format!("{error:#}"))?,
            }
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = stop_asked() => return Ok(()),
            }
        }
    })
}

/// The key in a file, or in the state folder.
pub(crate) fn admin_key(file: Option<&Path>, globals: &Globals) -> Result<Option<String>> {
    let own = state::folder(globals)?.cluster().join("admin-key");
    let file = match file {
        Some(file) => file.to_owned(),
        // A server that is no orchestrator has none.
        None if !own.exists() => return Ok(None),
        None => own,
    };
    Ok(Some(protocol::trust::read_text(&file).context("reading the admin key")?.trim().to_owned()))
}

/// What a server says.
pub(crate) async fn look(server: &str, client: &Client, key: Option<&str>) -> Result<Status> {
    let server = server.trim_end_matches('/').to_owned();
    let asking = || format!("asking {server}");
    let ready = client.get(format!("{server}/ready")).timeout(DEADLINE).send().await.with_context(asking)?;
    let ready = ready.json().await.with_context(|| format!("{server} is no server of shoal"))?;
    let request = client.get(format!("{server}/admin/v1/nodes")).timeout(DEADLINE);
    let nodes = request.bearer_auth(key.unwrap_or_default()).send().await.with_context(asking)?;
    let nodes = match nodes.status() {
        StatusCode::OK => {
            let mut list: Value = nodes.json().await.with_context(asking)?;
            Some(serde_json::from_value(list["data"].take()).with_context(asking)?)
        }
        StatusCode::NOT_FOUND => None,
        StatusCode::UNAUTHORIZED => bail!(
            "{server} asks for the admin key of another state folder: give it with --admin-key, or its folder with --state"
        ),
        other => bail!("{server} answers with {other}"),
    };
    Ok(Status { server, ready, nodes })
}

fn show(status: &Status, args: &StatusArgs) -> Result<()> {
    if args.json {
        let printed = if args.watch { output::print_json_line(status) } else { output::print_json(status) };
        return Ok(printed?);
    }
    if args.watch {
        let mut stdout = io::stdout().lock();
        write!(stdout, "{CLEAR}").and_then(|()| stdout.flush())?;
    }
    Ok(output::print(&text(status)?)?)
}

fn text(status: &Status) -> Result<String> {
    let word = |name: &str| status.ready[name].as_str().unwrap_or_default();
    let served = match word("status") {
        "ready" => format!("{} serves {}", status.server, word("model")),
        other => format!("{} is {other}: {}", status.server, word("reason")),
    };
    let Some(nodes) = &status.nodes else {
        return Ok(format!("{served}\nno cluster: all runs on that host"));
    };
    let nodes: Vec<Node> = nodes
        .iter()
        .map(|node| serde_json::from_value(node.clone()))
        .collect::<Result<_, _>>()
        .context("reading the nodes")?;
    if nodes.is_empty() {
        return Ok(format!("{served}\nno nodes: `shoal token create` invites one"));
    }
    Ok(format!("{served}\n{}", table(&nodes)))
}

fn table(nodes: &[Node]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["node", "state", "address", "memory available", "runs"]);
    for node in nodes {
        let (state, address) = (state_of(node), node.present.as_ref().map(address_of).unwrap_or_default());
        let memory = node.present.as_ref().map_or_else(String::new, |present| {
            format!("{} of {}", Bytes(present.memory_available_bytes), Bytes(present.memory_total_bytes))
        });
        let runs: Vec<String> =
            node.present.iter().flat_map(|present| &present.running).map(Running::to_text).collect();
        table.add_row([node.name.clone(), state, address, memory, runs.join("\n")]);
    }
    table.to_string()
}

fn state_of(node: &Node) -> String {
    match (node.state.as_str(), &node.present, &node.code, &node.last_seen) {
        ("pending", _, Some(code), _) => format!("waits to be approved: {code}"),
        ("approved", Some(_), ..) => "here".to_owned(),
        ("approved", None, _, Some(seen)) => format!("away since {seen}"),
        ("approved", None, ..) => "away".to_owned(),
        (other, ..) => other.to_owned(),
    }
}

fn address_of(present: &Present) -> String {
    match (&present.address, &present.unreachable) {
        (Some(address), _) => address.clone(),
        (None, Some(reason)) => format!("not reached: {reason}"),
        (None, None) => "being reached".to_owned(),
    }
}

impl Running {
    fn to_text(&self) -> String {
        let Self { model, stage, n_stages, first_block, end_block } = self;
        format!("{model}, stage {stage} of {n_stages}: blocks {first_block}..{end_block}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(ready: Value, nodes: Option<Vec<Value>>) -> String {
        text(&Status { server: "http://x".into(), ready, nodes }).unwrap()
    }

    #[test]
    fn people_see_who_is_here_who_waits_and_who_is_away() {
        let running = json!({ "model": "m", "stage": 1, "n_stages": 2, "first_block": 15, "end_block": 30 });
        let present = json!({
            "address": "10.0.0.1:8470", "memory_total_bytes": 2_u64 << 30, "memory_available_bytes": 1_u64 << 30,
            "running": [running],
        });
        let nodes = vec![
            json!({ "name": "desk", "state": "approved", "present": present }),
            json!({ "name": "mac", "state": "pending", "code": "ab12" }),
            json!({ "name": "nas", "state": "approved", "last_seen": "2027-01-15T08:00:00Z" }),
        ];
        let shown = status(json!({ "status": "ready", "model": "m" }), Some(nodes));
        for part in [
            "http://x serves m",
            "10.0.0.1:8470",
            "stage 1 of 2: blocks 15..30",
            "waits to be approved: ab12",
            "away since 2027",
        ] {
            assert!(shown.contains(part), "{part} is missing in\n{shown}");
        }
    }

    #[test]
    fn a_server_that_does_not_serve_says_why() {
        let shown = status(json!({ "status": "down", "reason": "stage 1 was killed" }), None);
        assert!(shown.contains("is down: stage 1 was killed") && shown.contains("no cluster"), "{shown}");
    }
}
