//! Running `shoal node`s, and the identities that make them members of one cluster.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{children_of, eventually, is_alive, shoal_binary, signal};

/// Until a node listens; it lists devices before, and test machines are busy.
const LISTEN_DEADLINE: Duration = Duration::from_secs(30);

/// A cluster's certificate authority, and a folder for what its members need.
pub struct Trust {
    folder: TempDir,
}

impl Trust {
    /// Founds a cluster.
    pub fn found() -> Result<Self> {
        let trust = Self { folder: TempDir::new()? };
        succeed(Command::new(shoal_binary()?).args(["identity", "init"]).arg(trust.ca()))?;
        Ok(trust)
    }

    /// Issues a member's identity; its file.
    pub fn issue(&self, name: &str) -> Result<PathBuf> {
        let file = self.folder.path().join(format!("{name}.json"));
        let mut issue = Command::new(shoal_binary()?);
        succeed(issue.args(["identity", "issue"]).arg(self.ca()).arg(name).arg("-o").arg(&file))?;
        Ok(file)
    }

    /// The folder of the certificate authority.
    pub fn ca(&self) -> PathBuf {
        self.folder.path().join("ca")
    }

    /// A folder for other files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A running `shoal node`, killed with its children when dropped.
pub struct Node {
    child: Child,
    events: PathBuf,
    log: PathBuf,
    port: u16,
    addresses: Vec<String>,
    _folder: TempDir,
}

impl Node {
    /// Starts `shoal node --identity FILE ARGS` at a free port of the loopback address and waits until it listens.
    pub async fn start(identity: &Path, args: &[&str]) -> Result<Self> {
        let mut command = Command::new(shoal_binary()?);
        command.arg("node").arg("--bind").arg("127.0.0.1:0");
        Self::run(command, identity, args).await
    }

    /// The same for a command that is `shoal` already, such as one in a host of a Lan; it has a word for `node` and one
    /// for where to bind.
    pub async fn run(mut command: Command, identity: &Path, args: &[&str]) -> Result<Self> {
        command.arg("--identity").arg(identity).args(args);
        let mut node = Self::launch(command)?;
        node.wait_listening().await?;
        Ok(node)
    }

    /// Starts a command that is `shoal node` already, without waiting.
    pub fn launch(mut command: Command) -> Result<Self> {
        let folder = TempDir::new()?;
        let (events, log) = (folder.path().join("events"), folder.path().join("log"));
        let child = command
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::from(File::create(&events)?))
            .stderr(Stdio::from(File::create(&log)?))
            .spawn()
            .context("starting shoal node")?;
        Ok(Self { child, events, log, port: 0, addresses: Vec::new(), _folder: folder })
    }

    /// Waits until it listens.
    pub async fn wait_listening(&mut self) -> Result<()> {
        let listening = self.event("listening").await?;
        self.port = u16::try_from(listening["port"].as_u64().context("no port")?)?;
        let addresses = listening["addresses"].as_array().context("no addresses")?;
        self.addresses = addresses.iter().filter_map(|address| address.as_str().map(str::to_owned)).collect();
        Ok(())
    }

    /// Waits until it tells of an event of this kind, and gives the first.
    pub async fn event(&mut self, kind: &str) -> Result<Value> {
        let what = format!("the node to tell of {kind:?}");
        let event = eventually(&what, LISTEN_DEADLINE, async || {
            let found = self.events(kind).into_iter().next();
            let ended = self.child.try_wait().ok().flatten().filter(|_| found.is_none());
            let early = |status| Err(anyhow::anyhow!("shoal node ended early with {status}"));
            found.map(Ok).or_else(|| ended.map(early))
        });
        match event.await {
            Ok(Ok(event)) => Ok(event),
            Ok(Err(e)) | Err(e) => bail!("{e}; its log:\n{}", self.log()),
        }
    }

    /// What it has told of this kind so far.
    pub fn events(&self, kind: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.events).unwrap_or_default();
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.filter(|event| event["event"] == kind).collect()
    }

    /// Waits for its end.
    pub async fn wait_exit(&mut self, deadline: Duration) -> Result<ExitStatus> {
        eventually("the node's end", deadline, async || self.child.try_wait().ok().flatten()).await
    }

    /// The port it listens at.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Its address on the loopback interface.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where it says that others reach it.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes that it runs for others, in the order in which they were started.
    pub fn workers(&self) -> Vec<u32> {
        children_of(self.pid())
    }

    /// What it said on standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Presses Ctrl-C and waits for its end.
    pub async fn interrupt(&mut self, deadline: Duration) -> Result<ExitStatus> {
        signal(self.pid(), "INT")?;
        self.wait_exit(deadline).await
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let workers = self.workers();
        // It may have ended already; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in workers.into_iter().filter(|&pid| is_alive(pid)) {
            let _ = signal(pid, "KILL");
        }
    }
}

/// At which nodes of a Lan's hosts listen.
pub const NODE_PORT: u16 = 8470;

/// A cluster with a node on each of these hosts, and the arguments that name its nodes as seen from the hosts.
#[cfg(target_os = "linux")]
pub async fn cluster_on(hosts: &[&crate::lan::Host]) -> Result<(Trust, Vec<Node>, String)> {
    let trust = Trust::found()?;
    let mut nodes = Vec::new();
    for host in hosts {
        let mut command = host.command(shoal_binary()?);
        command.arg("node").arg("--bind").arg(format!("0.0.0.0:{NODE_PORT}"));
        nodes.push(Node::run(command, &trust.issue(host.name())?, &[]).await?);
    }
    let addresses = hosts.iter().map(|host| format!("{}:{NODE_PORT}", host.address())).collect::<Vec<_>>();
    Ok((trust, nodes, addresses.join(",")))
}

fn succeed(command: &mut Command) -> Result<Output> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}

/// Runs `shoal links` to its end: whether it succeeded, its JSON, and what it said on standard error.
pub async fn links(mut command: Command, identity: &Path, args: &[&str]) -> Result<(bool, Value, String)> {
    command.arg("links").arg("--json").arg("--identity").arg(identity).args(args).stdin(Stdio::null());
    let output = tokio::process::Command::from(command).kill_on_drop(true).output();
    let output =
        tokio::time::timeout(Duration::from_secs(120), output).await.context("measuring links")??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok((output.status.success(), report, said))
}
