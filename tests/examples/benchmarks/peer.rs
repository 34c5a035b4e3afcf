//! llama-server as `scripts/build-peers.sh` builds it, and what it and Shoal hold in memory.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use tests::models::cache_folder;
use tests::process::eventually;
use tests::server::{READY_DEADLINE, Server, free_port};

use crate::{Arguments, CTX, SLOTS};

/// A running llama-server, killed when dropped.
pub(crate) struct Peer {
    child: Child,
    port: u16,
}

impl Peer {
    /// Starts it and waits until it would answer.
    pub(crate) async fn start(arguments: &Arguments) -> Result<Self> {
        let peer = Self::launch(arguments)?;
        let client = reqwest::Client::new();
        let healthy = async || {
            let reply = client.get(format!("{}/health", peer.url())).send().await.ok()?;
            reply.status().is_success().then_some(())
        };
        eventually("llama-server", READY_DEADLINE, healthy).await?;
        Ok(peer)
    }

    /// Starts it with the slots, context and threads that Shoal gets. Without its cache of earlier prompts in memory,
    /// which Shoal does not have.
    pub(crate) fn launch(arguments: &Arguments) -> Result<Self> {
        let port = free_port()?;
        let threads = arguments.threads.to_string();
        let child = Command::new(program()?)
            .arg("-m")
            .arg(&arguments.model)
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "-np", &SLOTS.to_string()])
            .args(["-c", &(SLOTS * CTX).to_string(), "-t", &threads, "-tb", &threads, "--cache-ram", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting llama-server")?;
        Ok(Self { child, port })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Result<PathBuf> {
    let program = cache_folder()?.join("peers/bin/llama-server");
    ensure!(program.is_file(), "{} is missing: run scripts/build-peers.sh", program.display());
    Ok(program)
}

/// What processes hold, in MiB: resident, and with pages that several map shared out among them.
pub(crate) fn held(pids: &[u32]) -> Result<(f64, f64)> {
    let (mut resident, mut share) = (0.0, 0.0);
    for pid in pids {
        let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
        resident += mib(&path, "Rss:")?;
        share += mib(&path, "Pss:")?;
    }
    Ok((resident, share))
}

fn mib(path: &Path, field: &str) -> Result<f64> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let Some(line) = text.lines().find_map(|line| line.strip_prefix(field)) else {
        bail!("no {field} in {}", path.display());
    };
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// Prints both servers' memory as Markdown.
pub(crate) fn memory_table(server: &Server, peer: &Peer) -> Result<()> {
    let pids: Vec<u32> = std::iter::once(server.pid()).chain(server.workers()).collect();
    let (ours, theirs) = (held(&pids)?, held(&[peer.child.id()])?);
    println!();
    println!("| memory | Shoal, both processes | llama-server | ratio |");
    println!("| --- | --- | --- | --- |");
    for (name, ours, theirs) in [("resident", ours.0, theirs.0), ("proportional share", ours.1, theirs.1)] {
        println!("| {name} | {ours:.1} MiB | {theirs:.1} MiB | {:.3} |", ours / theirs);
    }
    Ok(())
}
