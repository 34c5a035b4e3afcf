//! 2,000 streams at once through one orchestrator, over eight emulated replicas: `cargo run --release -p tests --example streams`, after
//! `cargo build --release`. Linux only.
//!
//! No stage computes anything, so what is seen is what HTTP, text and routing cost. The text of an emulated replica depends on the
//! position alone, so all streams must have the same text, of the same number of tokens.
#![allow(clippy::print_stdout)] // its result

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::json;
use tests::chat::{Answer, completion};
use tests::node::{Node, Trust};
use tests::process::{eventually, shoal_binary};
use tests::server::{READY_DEADLINE, Server, sample};

const STREAMS: usize = 2000;
const REPLICAS: usize = 8;
const TOKENS: u32 = 40;
/// A step of all of a replica's streams takes some 0.3 s then: two cores have the client to run too.
const TIME_SCALE: &str = "100";

#[tokio::main]
async fn main() -> Result<()> {
    let trust = Trust::found()?;
    let device = trust.folder().join("device.json");
    let profile = Command::new(shoal_binary()?)
        .args(["profile", "--json", "--seconds", "2", "-m", "glassllm", "-o"])
        .arg(&device)
        .output()?;
    ensure!(profile.status.success(), "{}", String::from_utf8_lossy(&profile.stderr));
    let (mut nodes, mut args) = (Vec::new(), Vec::new());
    for number in 0..REPLICAS {
        let emulate = ["--emulate", &*device.to_string_lossy(), "--time-scale", TIME_SCALE];
        let node = Node::start(&trust.issue(&format!("n{number}"))?, &emulate).await?;
        args.extend(["--replica".to_owned(), node.address()]);
        nodes.push(node);
    }
    let me = trust.issue("me")?;
    let slots = (STREAMS / REPLICAS).to_string();
    // All have a slot at once; but a busy host may take one of its own replicas for lost.
    let queue = STREAMS.to_string();
    let common =
        ["--slots", &*slots, "--queue", &*queue, "--ctx", "128", "--identity", &*me.to_string_lossy()];
    let args: Vec<&str> = common.into_iter().chain(args.iter().map(String::as_str)).collect();
    let server = Server::start("glassllm", &args).await?;
    eventually("all replicas", READY_DEADLINE, async || server.ready_replicas(REPLICAS).await).await?;
    let idle = resident(server.pid())?;
    let is_over = AtomicBool::new(false);
    let since = Instant::now();
    let (answers, (most, open)) = tokio::join!(all(&server, &is_over), watch(&server, &is_over));
    let (answers, seconds) = (answers?, since.elapsed().as_secs_f64());
    let first = answers.first().context("no answer")?;
    let alike = answers.iter().filter(|answer| answer.text == first.text).count();
    let tokens: u64 = answers.iter().filter_map(|answer| answer.usage["completion_tokens"].as_u64()).sum();
    println!("streams at once                {open} of {STREAMS}");
    println!("answers that are alike         {alike}, of {} characters", first.text.chars().count());
    println!("tokens                         {tokens}, {:.0} a second", tokens as f64 / seconds);
    println!("orchestrator's memory          {idle:.1} MiB idle, {most:.1} MiB at most");
    println!("for each stream                {:.1} KiB", (most - idle) * 1024.0 / STREAMS as f64);
    ensure!(alike == STREAMS && tokens == STREAMS as u64 * u64::from(TOKENS), "events were lost");
    Ok(())
}

async fn all(server: &Server, is_over: &AtomicBool) -> Result<Vec<Answer>> {
    let body = json!({
        "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": true, "stream_options": { "include_usage": true },
    });
    let asked: FuturesUnordered<_> = (0..STREAMS).map(|_| completion(server, body.clone())).collect();
    let answers = asked.collect::<Vec<_>>().await;
    is_over.store(true, Ordering::Relaxed);
    answers.into_iter().collect()
}

/// The most memory that the server held, and the most requests that it had open.
async fn watch(server: &Server, is_over: &AtomicBool) -> (f64, f64) {
    let (mut most, mut open) = (0.0, 0.0);
    while !is_over.load(Ordering::Relaxed) {
        most = resident(server.pid()).map_or(most, |now: f64| now.max(most));
        if let Ok(metrics) = server.metrics().await {
            open = sample(&metrics, "shoal_open_requests").map_or(open, |now| now.max(open));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    (most, open)
}

/// MiB that a process holds.
fn resident(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("the server has ended")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}
