//! A deployment on hosts of a Lan: an orchestrator on the first, a node on each of the others, and a plan of replicas of two stages.
//!
//! All its methods are called on the orchestrator's host ([`on`]).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::lan::{Host, Lan};
use crate::node::{NODE_PORT, Node};
use crate::process::{eventually, shoal_binary};
use crate::server::{READY_DEADLINE, Server};

/// Until the API answers, which is before it serves.
const SOON: Duration = Duration::from_secs(30);

/// Runs work on a host of a Lan, and what it starts.
pub fn on<T: Send>(host: &Host, work: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
    host.inside(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(work())
    })?
}

/// A deployment.
pub struct Site<'a> {
    lan: &'a Lan,
    cluster: Cluster,
    /// The orchestrator.
    pub server: Server,
    nodes: Vec<Node>,
    plan: PathBuf,
}

/// A replica that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// Its number.
    pub number: usize,
    /// Whether it serves.
    pub serves: bool,
    /// The hosts of its stages, the master's last.
    pub hosts: Vec<String>,
}

impl<'a> Site<'a> {
    /// A replica of two stages on each two hosts after the first. All serve when it returns.
    pub async fn start(lan: &'a Lan, args: &[&str]) -> Result<Self> {
        let boss = lan.hosts().first().context("no host")?;
        let cluster = Cluster::at(boss.address())?;
        let plan = cluster.folder().join("plan.json");
        let replicas = lan.hosts()[1..].chunks_exact(2).map(|pair| replica(pair[0].name(), pair[1].name()));
        let replicas: Vec<Value> = replicas.collect();
        let whole =
            json!({ "objective": "by hand", "model": "SmolLM2-135M-Instruct.Q4_1", "replicas": replicas });
        std::fs::write(&plan, whole.to_string())?;
        let server = launch(boss, &cluster, &[&["--plan", &*plan.to_string_lossy()], args].concat())?;
        let mut site = Self { lan, cluster, server, nodes: Vec::new(), plan };
        site.answers().await?;
        for host in &lan.hosts()[1..] {
            let node = site.start_node(host)?;
            site.nodes.push(node);
        }
        site.until_full(READY_DEADLINE).await?;
        Ok(site)
    }

    fn start_node(&self, host: &Host) -> Result<Node> {
        let mut command = host.command(shoal_binary()?);
        command.arg("--state").arg(self.cluster.node_state(host.name()));
        command.args(["node", "--bind", &format!("0.0.0.0:{NODE_PORT}"), "--name", host.name()]);
        command.args(["--join", &self.cluster.token()?]);
        Node::launch(command)
    }

    /// Starts the orchestrator again, with the same arguments, after it was killed.
    pub async fn start_again(&mut self, args: &[&str]) -> Result<()> {
        self.server.wait_exit(SOON).await?;
        let boss = self.lan.hosts().first().context("no host")?;
        let plan = self.plan.to_string_lossy().into_owned();
        self.server = launch(boss, &self.cluster, &[&["--plan", &*plan], args].concat())?;
        self.answers().await
    }

    async fn answers(&self) -> Result<()> {
        let up = eventually("the API", SOON, async || self.server.ready().await.ok().map(drop)).await;
        up.with_context(|| self.server.log())
    }

    /// What is desired and what is there.
    pub async fn deployment(&self) -> Result<Value> {
        self.cluster.admin(&self.server, "/admin/v1/deployment").await
    }

    /// The replicas that are there.
    pub async fn replicas(&self) -> Result<Vec<Replica>> {
        let deployment = self.deployment().await?;
        let all = deployment["replicas"].as_array().context("no replicas")?;
        all.iter().map(|one| as_replica(one).context("a replica without its facts")).collect()
    }

    /// Waits until every replica of the first plan serves; gives how long that took.
    pub async fn until_full(&self, deadline: Duration) -> Result<Duration> {
        let since = Instant::now();
        let full = eventually("service at full width", deadline, async || {
            let now = self.deployment().await.ok()?;
            (now["reached"] == true && now["plan"] == 1).then_some(())
        });
        if let Err(error) = full.await {
            bail!("{error}: {:#}\n{}", self.deployment().await.unwrap_or_default(), self.server.log());
        }
        Ok(since.elapsed())
    }

    /// The stages' processes on each host with a node.
    pub fn workers(&self) -> Vec<Vec<u32>> {
        self.nodes.iter().map(Node::workers).collect()
    }

    /// Those of one host.
    pub fn workers_of(&self, host: &str) -> Vec<u32> {
        let hosts = self.lan.hosts()[1..].iter().map(Host::name);
        hosts
            .zip(&self.nodes)
            .find(|(name, _)| *name == host)
            .map(|(_, node)| node.workers())
            .unwrap_or_default()
    }

    /// The Lan.
    pub fn lan(&self) -> &'a Lan {
        self.lan
    }

    /// The first host's name.
    pub fn boss(&self) -> &'a str {
        self.lan.hosts().first().map_or("", Host::name)
    }

    /// What the orchestrator and the nodes said.
    pub fn logs(&self) -> String {
        let nodes = self.nodes.iter().map(Node::log).collect::<Vec<_>>();
        format!("{}\n{}", self.server.log(), nodes.join("\n"))
    }

    /// The cluster's events, in words.
    pub async fn events(&self) -> Result<Vec<Value>> {
        let events = self.cluster.admin(&self.server, "/admin/v1/events").await?;
        Ok(events["data"].as_array().context("no events")?.clone())
    }
}

fn launch(boss: &Host, cluster: &Cluster, args: &[&str]) -> Result<Server> {
    let own = cluster.serve_args();
    let common = ["--cluster", "--ctx", "128", "--threads", "1"];
    let args: Vec<&str> = own.iter().map(String::as_str).chain(common).chain(args.iter().copied()).collect();
    Server::run(boss.command(shoal_binary()?), "SmolLM2", &args)
}

/// Four slots over two hosts.
fn replica(first: &str, second: &str) -> Value {
    let stage = |host: &str, start: u32, end: u32| json!({ "device": host, "start": start, "end": end, "gpu_blocks": 0 });
    json!({ "role": "mixed", "slots": 4, "stages": [stage(first, 0, 14), stage(second, 14, 30)] })
}

fn as_replica(one: &Value) -> Option<Replica> {
    let hosts = one["stages"].as_array()?.iter().map(|stage| stage["node"].as_str().map(str::to_owned));
    Some(Replica {
        number: usize::try_from(one["replica"].as_u64()?).ok()?,
        serves: one["state"] == "serving",
        hosts: hosts.collect::<Option<_>>()?,
    })
}
