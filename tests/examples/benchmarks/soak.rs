//! Many streams for long: what the processes hold while they answer, and where their time goes.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::process::shoal_binary;
use tests::server::Server;

use crate::Arguments;
use crate::peer::held;

const STREAMS: &str = "200";

/// Rows of the table.
const LOOKS: u32 = 10;

pub(crate) async fn soak(arguments: &Arguments) -> Result<()> {
    let args = ["--slots", STREAMS, "--ctx", "256"];
    let server = Server::start(&arguments.model.to_string_lossy(), &args).await?;
    let pids: Vec<u32> = std::iter::once(server.pid()).chain(server.workers()).collect();
    let mut load = Command::new(shoal_binary()?)
        .args(["bench", "serve", &server.url(""), "--json", "--concurrency", STREAMS])
        .args(["--duration", &arguments.seconds.to_string(), "--prompt-tokens", "16"])
        .args(["--max-tokens", "100", "--warmup", "0", "--body", r#"{"ignore_eos": true}"#])
        .stdout(Stdio::piped())
        .spawn()
        .context("starting shoal bench serve")?;
    println!("| after | resident memory | descriptors | threads |");
    println!("| --- | --- | --- | --- |");
    let period = Duration::from_secs(arguments.seconds) / LOOKS;
    let started = Instant::now();
    for _ in 0..LOOKS {
        tokio::time::sleep(period).await;
        let (descriptors, threads) = (entries(&pids, "fd")?, entries(&pids, "task")?);
        let (resident, _) = held(&pids)?;
        let seconds = started.elapsed().as_secs();
        println!("| {seconds} s | {resident:.1} MiB | {descriptors} | {threads} |");
        ensure!(load.try_wait()?.is_none() || seconds >= arguments.seconds, "the load ended early");
    }
    let (inference, all) = (cpu(&pids, |thread| thread == "inference")?, cpu(&pids, |_| true)?);
    let output = load.wait_with_output()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let figures = &report["servers"][0];
    println!();
    println!(
        "{} requests answered, {} failed, {} tokens.",
        figures["answered"], figures["failed"], figures["tokens"]
    );
    println!("CPU outside the inference thread: {:.2} %.", 100.0 * (1.0 - inference / all));
    Ok(())
}

/// Entries of a folder of each process in /proc.
fn entries(pids: &[u32], folder: &str) -> Result<usize> {
    let count = |pid: &u32| Ok(fs::read_dir(format!("/proc/{pid}/{folder}"))?.count());
    pids.iter().map(count).sum()
}

/// Clock ticks that threads of these names have computed. ggml's threads bear the inference thread's name.
fn cpu(pids: &[u32], is_wanted: impl Fn(&str) -> bool) -> Result<f64> {
    let mut ticks = 0.0;
    for pid in pids {
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            let stat = fs::read_to_string(thread?.path().join("stat"))?;
            let (name, rest) = stat.rsplit_once(')').context("a stat line without a name")?;
            let name = name.split_once('(').map_or("", |(_, name)| name);
            if is_wanted(name) {
                // User and system time are fields 14 and 15; the state after the name is field 3.
                let times = rest.split_whitespace().skip(11).take(2);
                ticks += times.filter_map(|time| time.parse::<f64>().ok()).sum::<f64>();
            }
        }
    }
    Ok(ticks)
}
