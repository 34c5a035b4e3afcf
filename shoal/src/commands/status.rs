//! `shoal status`: whether a model is served, by which nodes, and what they run, as the orchestrator sees it now.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use cluster::{Bytes, DemandRange};
use comfy_table::{Table, presets};
use deploy::StepView;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::admin::{Admin, AdminArgs};
use crate::cli::Globals;
use crate::interrupt::stop_asked;
use crate::output;

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
    #[command(flatten)]
    admin: AdminArgs,
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
    /// Likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<Vec<Value>>,
    /// Which plan is desired, and how far it is carried out; nothing where the stages do not run on the cluster's nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    deployment: Option<Value>,
    /// What is asked for of late, and what is made of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    workload: Option<Value>,
}

/// Of what is asked for, what people are shown.
#[derive(Debug, Deserialize)]
struct Workload {
    window_s: f64,
    requests_per_second: f64,
    prompt_tokens: f64,
    answer_tokens: f64,
    adaptation: Option<Adaptation>,
}

#[derive(Debug, Deserialize)]
struct Adaptation {
    mode: String,
    planned: Option<DemandRange>,
    outside: Option<String>,
    last: Option<String>,
}

/// Of what is deployed, what people are shown.
#[derive(Debug, Deserialize)]
struct Deployed {
    plan: Option<u64>,
    reached: bool,
    replicas: Vec<DeployedReplica>,
    steps: Vec<StepView>,
}

#[derive(Debug, Deserialize)]
struct DeployedReplica {
    replica: usize,
    role: String,
    state: String,
    reason: Option<String>,
    slots: u32,
    stages: Vec<Stage>,
}

#[derive(Debug, Deserialize)]
struct Stage {
    node: String,
    first_block: u32,
    end_block: u32,
}

/// Of a replica, what people are shown.
#[derive(Debug, Deserialize)]
struct Replica {
    replica: u32,
    role: String,
    status: String,
    reason: Option<String>,
    slots: u32,
    waiting: u32,
    prefilling: u32,
    changing_hands: u32,
    running: u32,
    prefill_tokens_per_second: f64,
    ms_per_token_full: f64,
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
        let admin = args.admin.open(globals)?;
        if !args.watch {
            return show(&look(&admin).await?, args);
        }
        loop {
            match look(&admin).await {
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

/// What an orchestrator says.
pub(crate) async fn look(admin: &Admin) -> Result<Status> {
    let ready = admin.open_get("/ready").await?;
    let (nodes, replicas) = (list(admin, "nodes").await?, list(admin, "replicas").await?);
    let of_cluster = async |path: &str| if nodes.is_some() { admin.get(path).await } else { Ok(None) };
    let deployment = of_cluster("/admin/v1/deployment").await?;
    let workload = of_cluster("/admin/v1/workload").await?;
    Ok(Status { server: admin.server.clone(), ready, nodes, replicas, deployment, workload })
}

/// A list of the admin API; none where there is no such API.
async fn list(admin: &Admin, what: &str) -> Result<Option<Vec<Value>>> {
    let Some(mut list) = admin.get(&format!("/admin/v1/{what}")).await? else { return Ok(None) };
    Ok(Some(serde_json::from_value(list["data"].take()).with_context(|| format!("reading the {what}"))?))
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
    let replicas: Vec<Replica> = read(status.replicas.iter().flatten()).context("reading the replicas")?;
    let served = if replicas.is_empty() { served } else { format!("{served}\n{}", replica_table(&replicas)) };
    let served = match &status.workload {
        Some(workload) => {
            let workload = Workload::deserialize(workload).context("reading what is asked for")?;
            format!("{served}\n{}", workload_text(&workload))
        }
        None => served,
    };
    let nodes: Vec<Node> = read(nodes).context("reading the nodes")?;
    if nodes.is_empty() {
        return Ok(format!("{served}\nno nodes: `shoal token create` invites one"));
    }
    let mut text = format!("{served}\n{}", table(&nodes));
    if let Some(deployment) = &status.deployment {
        let deployed = serde_json::from_value(deployment.clone()).context("reading what is deployed")?;
        let _ = write!(text, "\n{}", deployment_text(&deployed));
    }
    Ok(text)
}

fn workload_text(workload: &Workload) -> String {
    let Workload { window_s, requests_per_second, prompt_tokens, answer_tokens, adaptation } = workload;
    let mut text = format!(
        "in the last {window_s:.0} s: {requests_per_second:.2} requests/s, prompts of {prompt_tokens:.0} tokens, answers \
         of {answer_tokens:.0}"
    );
    let Some(Adaptation { mode, planned, outside, last }) = adaptation else { return text };
    if let Some(DemandRange { low, high }) = planned {
        let _ = write!(
            text,
            "; planned for: {:.2} to {:.2} requests/s, {:.0} to {:.0} and {:.0} to {:.0} tokens",
            low.requests_per_second,
            high.requests_per_second,
            low.prompt_tokens,
            high.prompt_tokens,
            low.answer_tokens,
            high.answer_tokens
        );
    }
    let _ = write!(text, " (--adapt {mode})");
    for said in [outside, last].into_iter().flatten() {
        let _ = write!(text, "\n  {said}");
    }
    text
}

fn deployment_text(deployed: &Deployed) -> String {
    let Some(plan) = deployed.plan else { return "no plan is desired yet".to_owned() };
    let how_far = if deployed.reached { "is carried out" } else { "is being carried out" };
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["replica", "role", "state", "slots", "stages"]);
    for DeployedReplica { replica, role, state, reason, slots, stages } in &deployed.replicas {
        let stages = stages.iter().map(|stage| {
            let Stage { node, first_block, end_block } = stage;
            format!("{node}[{first_block}..{end_block}]")
        });
        let state = reason.as_ref().map_or_else(|| state.clone(), |reason| format!("{state}: {reason}"));
        let stages = stages.collect::<Vec<_>>().join(" → ");
        table.add_row([replica.to_string(), role.clone(), state, slots.to_string(), stages]);
    }
    let mut text = format!("plan {plan} {how_far}\n{table}");
    for step in &deployed.steps {
        let _ = write!(text, "\nto do: {}", step.in_words());
    }
    text
}

/// Entries of the admin API's lists, as far as they are looked at.
pub(crate) fn read<'a, T: serde::de::DeserializeOwned>(
    values: impl IntoIterator<Item = &'a Value>,
) -> Result<Vec<T>, serde_json::Error> {
    values.into_iter().map(|value| T::deserialize(value)).collect()
}

fn replica_table(replicas: &[Replica]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "replica", "role", "state", "slots", "prompts", "moving", "answers", "waiting", "rates",
    ]);
    for replica in replicas {
        let state = replica
            .reason
            .as_ref()
            .map_or_else(|| replica.status.clone(), |reason| format!("{}: {reason}", replica.status));
        let Replica { prefill_tokens_per_second: prefill, ms_per_token_full: tpot, .. } = replica;
        let counts =
            [replica.slots, replica.prefilling, replica.changing_hands, replica.running, replica.waiting];
        let mut row = vec![replica.replica.to_string(), replica.role.clone(), state];
        row.extend(counts.map(|count| count.to_string()));
        row.push(format!("{prefill:.0} prompt tokens/s, {tpot:.1} ms per token"));
        table.add_row(row);
    }
    table.to_string()
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
        let replica = json!({
            "replica": 1, "role": "decode", "status": "down", "reason": "stage 0 was killed", "slots": 4,
            "waiting": 0, "prefilling": 0, "changing_hands": 1, "running": 2,
            "prefill_tokens_per_second": 512.3, "ms_per_token_alone": 9.0, "ms_per_token_full": 20.5,
        });
        let replicas = nodes.as_ref().map(|_| vec![replica]);
        text(&Status { server: "http://x".into(), ready, nodes, replicas, deployment: None, workload: None })
            .unwrap()
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
            "down: stage 0 was killed",
            "512 prompt tokens/s, 20.5 ms per token",
        ] {
            assert!(shown.contains(part), "{part} is missing in\n{shown}");
        }
    }

    #[test]
    fn people_see_which_plan_is_carried_out_how_far_and_what_is_to_be_done() {
        let stages = json!([{ "node": "desk", "first_block": 0, "end_block": 30, "gpu_blocks": 0 }]);
        let replica = |number: u32, state: &str, reason: Option<&str>| json!({ "replica": number, "role": "mixed", "state": state, "slots": 4, "stages": stages, "reason": reason });
        let deployment = json!({
            "plan": 7, "decision": 9, "reached": false, "history": [],
            "replicas": [replica(0, "serving", None), replica(2, "loading", Some("stage 0 to load"))],
            "steps": [{ "act": "drain", "replica": 0, "chain": "desk[0..30], 4 slots",
                        "waits_for": "replica 0 of the plan to serve" }],
        });
        let shown = deployment_text(&serde_json::from_value(deployment).unwrap());
        for part in [
            "plan 7 is being carried out",
            "desk[0..30]",
            "loading: stage 0 to load",
            "to do: drain replica 0: desk[0..30], 4 slots; waits for replica 0 of the plan to serve",
        ] {
            assert!(shown.contains(part), "{part} is missing in\n{shown}");
        }
    }

    #[test]
    fn people_see_what_is_asked_for_and_what_was_made_of_it() {
        let workload = json!({
            "object": "workload", "window_s": 300.0, "requests_per_second": 1.5, "prompt_tokens": 82.4,
            "answer_tokens": 160.0, "adaptation": {
                "mode": "roles", "outside": null, "last": "replica 1 from prefill to decode",
                "planned": {
                    "low": { "requests_per_second": 1.0, "prompt_tokens": 80.0, "answer_tokens": 16.0 },
                    "high": { "requests_per_second": 1.5, "prompt_tokens": 810.0, "answer_tokens": 160.0 },
                },
            },
        });
        let shown = workload_text(&Workload::deserialize(&workload).unwrap());
        assert_eq!(
            shown,
            "in the last 300 s: 1.50 requests/s, prompts of 82 tokens, answers of 160; planned for: 1.00 to 1.50 \
             requests/s, 80 to 810 and 16 to 160 tokens (--adapt roles)\n  replica 1 from prefill to decode"
        );
    }

    #[test]
    fn a_server_that_does_not_serve_says_why() {
        let shown = status(json!({ "status": "down", "reason": "stage 1 was killed" }), None);
        assert!(shown.contains("is down: stage 1 was killed") && shown.contains("no cluster"), "{shown}");
    }
}
