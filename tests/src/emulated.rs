//! A cluster of emulated devices whose orchestrator carries a plan out: one replica on each, all of one speed.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::models::{SMOLLM2, model_path};
use crate::node::Node;
use crate::process::{eventually, shoal_binary};
use crate::server::{READY_DEADLINE, Server};

/// How fast a device computes the whole of SmolLM2. It has four slots.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpeed {
    /// Prompt tokens a second.
    pub prefill: f64,
    /// Milliseconds for each token, with one request and with four.
    pub tpot_ms: [f64; 2],
}

/// Requests that each replica generates at once.
pub const SLOTS: u32 = 4;

/// The cluster, running.
pub struct EmulatedCluster {
    /// Its orchestrator.
    pub server: Server,
    /// Its nodes, of which each runs one replica.
    pub nodes: Vec<Node>,
    /// Its folders and keys, which go last.
    pub cluster: Cluster,
}

impl EmulatedCluster {
    /// A replica of each role in turn, all serving; `args` are `serve`'s.
    pub async fn start(roles: &[&str], speed: DeviceSpeed, args: &[&str]) -> Result<Self> {
        let cluster = Cluster::new()?;
        let names: Vec<String> = (0..roles.len()).map(|number| format!("n{number}")).collect();
        let replicas: Vec<Value> = roles.iter().zip(&names).map(|(role, node)| replica(role, node)).collect();
        let plan = json!({ "objective": "by hand", "replicas": replicas });
        let file = cluster.folder().join("plan.json");
        std::fs::write(&file, plan.to_string())?;
        let (own, file) = (cluster.serve_args(), file.to_string_lossy().into_owned());
        let common = ["--cluster", "--plan", &*file, "--ctx", "2048", "--queue", "1000"];
        let args: Vec<&str> =
            own.iter().map(String::as_str).chain(common).chain(args.iter().copied()).collect();
        let server = Server::launch("SmolLM2", &args)?;
        // Nodes can join from then on.
        eventually("the API", READY_DEADLINE, async || server.ready().await.ok()).await?;
        let shape = shape()?;
        let mut nodes = Vec::new();
        for name in &names {
            let device = cluster.folder().join(format!("{name}.json"));
            std::fs::write(&device, device_file(name, &shape, speed).to_string())?;
            nodes.push(cluster.join_with(name, &["--emulate", &device.to_string_lossy()]).await?);
        }
        let this = Self { cluster, server, nodes };
        let reached = async || this.deployment().await.filter(|now| now["reached"] == true);
        let reached = eventually("all replicas", READY_DEADLINE, reached).await;
        reached.with_context(|| this.server.log())?;
        Ok(this)
    }

    /// What is desired and what is there.
    pub async fn deployment(&self) -> Option<Value> {
        self.cluster.admin(&self.server, "/admin/v1/deployment").await.ok()
    }

    /// All events of some kinds, in order.
    pub async fn events(&self, kinds: &[&str]) -> Result<Vec<Value>> {
        let mut events = self.cluster.admin(&self.server, "/admin/v1/events").await?;
        let Value::Array(events) = events["data"].take() else { return Ok(Vec::new()) };
        let is_asked = |event: &Value| event["kind"].as_str().is_some_and(|kind| kinds.contains(&kind));
        Ok(events.into_iter().filter(is_asked).collect())
    }
}

fn replica(role: &str, node: &str) -> Value {
    let stage = json!({ "device": node, "start": 0, "end": 30, "gpu_blocks": 0 });
    json!({ "role": role, "slots": SLOTS, "stages": [stage] })
}

/// The model, as device files describe it.
fn shape() -> Result<Value> {
    let model: PathBuf = model_path(SMOLLM2)?;
    let output = Command::new(shoal_binary()?).args(["slice", "info", "--json"]).arg(model).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("not JSON")
}

/// A device on which all blocks together are as fast as asked for.
fn device_file(node: &str, shape: &Value, speed: DeviceSpeed) -> Value {
    const BLOCKS: f64 = 30.0;
    let [alone, full] = speed.tpot_ms.map(|ms| ms / BLOCKS);
    let prefill = |rows: f64| rows / speed.prefill * 1e3 / BLOCKS;
    let kind = &shape["blocks"][0]["kind"];
    let block = json!({
        "attention": kind["attention"], "feed_forward": kind["feed_forward"],
        "decode": { "rows": [1, SLOTS], "depths": [0, 2048], "ms": [alone, alone, full, full] },
        "prefill": { "rows": [16, 512], "ms": [prefill(16.0), prefill(512.0)] },
    });
    let cpu = json!({ "blocks": [block], "head": { "rows": [1, SLOTS], "ms": [0.01, 0.01] } });
    json!({
        "profile": {
            "device": format!("{node}/cpu"), "model": shape["model"], "runtime": "emulated", "cpu": cpu,
            "hop_overhead_ms": 0.0, "buffers": { "prefill_bytes": 1, "decode_bytes": 1 },
        },
        "memory": { "kind": "discrete", "vram_bytes": 0, "ram_bytes": 32_000_000_000_u64 },
        "model": shape,
    })
}
