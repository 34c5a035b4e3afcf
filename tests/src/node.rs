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
        let folder = TempDir::new()?;
        let (events, log) = (folder.path().join("events"), folder.path().join("log"));
        let child = command
            .arg("--identity")
            .arg(identity)
            .arg("--json")
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::from(File::create(&events)?))
            .stderr(Stdio::from(File::create(&log)?))
            .spawn()
            .context("starting shoal node")?;
        let mut node = Self { child, log, port: 0, addresses: Vec::new(), _folder: folder };
        let listening = eventually("the node to listen", LISTEN_DEADLINE, async || {
            if let Ok(Some(status)) = node.child.try_wait() {
                return Some(Err(anyhow::anyhow!("shoal node ended early with {status}")));
            }
            let text = std::fs::read_to_string(&events).ok()?;
            serde_json::from_str::<Value>(text.lines().next()?).ok().map(Ok)
        });
        let listening = match listening.await {
            Ok(Ok(event)) => event,
            Ok(Err(e)) | Err(e) => bail!("{e}; its log:\n{}", node.log()),
        };
        node.port = u16::try_from(listening["port"].as_u64().context("no port")?)?;
        let addresses = listening["addresses"].as_array().context("no addresses")?;
        node.addresses = addresses.iter().filter_map(|address| address.as_str().map(str::to_owned)).collect();
        Ok(node)
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
        eventually("the node's end", deadline, async || self.child.try_wait().ok().flatten()).await
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
