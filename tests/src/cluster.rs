//! A cluster that nodes join: an orchestrator's state folder, its tokens, and nodes with state folders of their own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::node::Node;
use crate::process::{eventually, shoal_binary};
use crate::server::{Server, free_port};

/// Until what was said on one side is seen on the other.
const SOON: Duration = Duration::from_secs(30);

/// The folders of a cluster, and the port at which nodes join.
pub struct Cluster {
    folder: TempDir,
    listen: SocketAddr,
}

impl Cluster {
    /// Nothing of it runs yet; all of it will on this host.
    pub fn new() -> Result<Self> {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// The same with an orchestrator that nodes reach at this address.
    pub fn at(address: IpAddr) -> Result<Self> {
        Ok(Self { folder: TempDir::new()?, listen: SocketAddr::new(address, free_port()?) })
    }

    /// The arguments with which `shoal serve` is its orchestrator.
    pub fn serve_args(&self) -> Vec<String> {
        let listen = self.address();
        let state = self.state().to_string_lossy().into_owned();
        ["--state", &state, "--cluster-listen", &listen, "--no-announce"].map(str::to_owned).to_vec()
    }

    /// Starts its orchestrator and waits until it serves a model on this host.
    pub async fn serve(&self, model: &str, args: &[&str]) -> Result<Server> {
        let own = self.serve_args();
        let args: Vec<&str> = own.iter().map(String::as_str).chain(args.iter().copied()).collect();
        Server::start(model, &args).await
    }

    /// The address of the cluster port.
    pub fn address(&self) -> String {
        self.listen.to_string()
    }

    /// The orchestrator's state folder.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("orchestrator")
    }

    /// A node's state folder.
    pub fn node_state(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A folder for other files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command on the orchestrator's state; what it printed.
    pub fn run(&self, args: &[&str]) -> Result<Output> {
        let output = self.command()?.args(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "shoal {args:?}: {said}");
        Ok(output)
    }

    /// The same for one that prints JSON.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let args = [args, &["--json"]].concat();
        serde_json::from_slice(&self.run(&args)?.stdout).context("not JSON")
    }

    /// `shoal` with the orchestrator's state.
    pub fn command(&self) -> Result<Command> {
        let mut command = Command::new(shoal_binary()?);
        command.arg("--state").arg(self.state());
        Ok(command)
    }

    /// A new token.
    pub fn token(&self) -> Result<String> {
        let created = self.json(&["token", "create", "--address", &self.address()])?;
        created["token"].as_str().map(str::to_owned).context("no token")
    }

    /// `shoal node` on this host's loopback address, with a state folder of its own.
    pub fn node_command(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(shoal_binary()?);
        command.arg("--state").arg(self.node_state(name));
        command.args(["node", "--bind", "127.0.0.1:0", "--name", name]);
        Ok(command)
    }

    /// A node that joins with a token, and is reached by the orchestrator.
    pub async fn join(&self, name: &str) -> Result<Node> {
        self.join_with(name, &[]).await
    }

    /// The same with further arguments.
    pub async fn join_with(&self, name: &str, args: &[&str]) -> Result<Node> {
        let mut command = self.node_command(name)?;
        command.args(["--join", &self.token()?]).args(args);
        let mut node = Node::launch(command)?;
        node.wait_listening().await?;
        node.event("reached").await?;
        Ok(node)
    }

    /// What the admin API says of a path.
    pub async fn admin(&self, server: &Server, path: &str) -> Result<Value> {
        let reply = server.client().get(server.url(path)).bearer_auth(self.admin_key()?).send().await?;
        Ok(reply.error_for_status()?.json().await?)
    }

    /// The key that it asks for.
    pub fn admin_key(&self) -> Result<String> {
        let path = self.state().join("cluster/admin-key");
        Ok(std::fs::read_to_string(&path)?.trim().to_owned())
    }

    /// Waits until a node is as wanted.
    pub async fn until(&self, server: &Server, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        eventually(&format!("node {name} to be as wanted"), SOON, async || {
            let nodes = self.admin(server, "/admin/v1/nodes").await.ok()?;
            nodes["data"].as_array()?.iter().find(|node| node["name"] == name && wanted(node)).cloned()
        })
        .await
    }
}
