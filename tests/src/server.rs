//! A running `shoal serve`.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::StatusCode;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{children_of, eventually, is_alive, shoal_binary, signal};

/// How long a server may take to become ready; generous, because test machines are busy.
pub const READY_DEADLINE: Duration = Duration::from_secs(90);

/// How long a scrape may take, whatever the server is busy with.
const SCRAPE_DEADLINE: Duration = Duration::from_secs(5);

/// The value of the first sample whose name and labels begin so.
pub fn sample(metrics: &str, start: &str) -> Option<f64> {
    let line = metrics.lines().find(|line| line.starts_with(start))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// A running `shoal serve`, killed with its children when dropped.
pub struct Server {
    child: Child,
    port: u16,
    client: reqwest::Client,
    folder: TempDir,
}

impl Server {
    /// Starts `shoal serve -m MODEL ARGS` on a free port and waits until it is ready.
    pub async fn start(model: &str, args: &[&str]) -> Result<Self> {
        let mut server = Self::launch(model, args)?;
        server.wait_ready(READY_DEADLINE).await?;
        Ok(server)
    }

    /// Starts it without waiting.
    pub fn launch(model: &str, args: &[&str]) -> Result<Self> {
        Self::run(Command::new(shoal_binary()?), model, args)
    }

    /// The same for a command that is `shoal` already, such as one in a host of a Lan, whose loopback address it serves.
    pub fn run(mut command: Command, model: &str, args: &[&str]) -> Result<Self> {
        let port = free_port()?;
        let folder = TempDir::new()?;
        let log = File::create(folder.path().join("log"))?;
        let child = command
            .args(["serve", "-m", model, "--listen", &format!("127.0.0.1:{port}")])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::from(log.try_clone()?))
            .stderr(Stdio::from(log))
            .spawn()
            .context("starting shoal serve")?;
        Ok(Self { child, port, client: reqwest::Client::new(), folder })
    }

    /// Waits until `/ready` says so.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<()> {
        let outcome = eventually("/ready", deadline, async || {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(Err(anyhow::anyhow!("shoal serve ended early with {status}")));
            }
            let reply = self.client.get(self.url("/ready")).send().await.ok()?;
            (reply.status() == StatusCode::OK).then_some(Ok(()))
        })
        .await;
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) | Err(e) => bail!("{e}; its log:\n{}", self.log()),
        }
    }

    /// Status and body of `/ready`.
    pub async fn ready(&self) -> Result<(StatusCode, Value)> {
        let reply = self.client.get(self.url("/ready")).send().await?;
        Ok((reply.status(), reply.json().await?))
    }

    /// Whether the API is ready with so many replicas that serve.
    pub async fn ready_replicas(&self, wanted: usize) -> Option<()> {
        let (code, ready) = self.ready().await.ok()?;
        let ready =
            ready["replicas"].as_array()?.iter().filter(|replica| replica["status"] == "ready").count();
        (code.is_success() && ready == wanted).then_some(())
    }

    /// Posts JSON and gives the status and JSON answer.
    pub async fn post(&self, path: &str, body: &Value) -> Result<(StatusCode, Value)> {
        let reply = self.client.post(self.url(path)).json(body).send().await?;
        let status = reply.status();
        let text = reply.text().await?;
        let value = serde_json::from_str(&text).with_context(|| format!("{status}: not JSON: {text}"))?;
        Ok((status, value))
    }

    /// The address of a route.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// An HTTP client to use with it.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// What `/metrics` says.
    pub async fn metrics(&self) -> Result<String> {
        let reply = self.client.get(self.url("/metrics")).timeout(SCRAPE_DEADLINE).send().await?;
        Ok(reply.error_for_status()?.text().await?)
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The stage workers' process ids, in the order they were started.
    pub fn workers(&self) -> Vec<u32> {
        children_of(self.pid())
    }

    /// Everything it printed so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Presses Ctrl-C and waits for its end.
    pub async fn interrupt(&mut self, deadline: Duration) -> Result<ExitStatus> {
        signal(self.pid(), "INT")?;
        self.wait_exit(deadline).await
    }

    /// Waits for its end.
    pub async fn wait_exit(&mut self, deadline: Duration) -> Result<ExitStatus> {
        eventually("the server's end", deadline, async || self.child.try_wait().ok().flatten()).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let workers = self.workers();
        // The server may have ended already; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in workers.into_iter().filter(|&pid| is_alive(pid)) {
            let _ = signal(pid, "KILL");
        }
    }
}

/// A port that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
