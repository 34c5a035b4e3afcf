//! Long prompts with short answers, and from half time on short prompts with long answers, over four emulated replicas of which three
//! prefill: what requests wait where nothing is changed, and where roles are. `cargo run --release -p tests --example shifted`, after
//! `cargo build --release`.
//!
//! The orchestrator, router, hand-off and frames are the real ones; a stage sleeps in place of computing, in real time. Four minutes.
#![allow(clippy::print_stdout)] // its result

use anyhow::{Result, ensure};
use clap::Parser;
use serde_json::{Value, json};
use tests::emulated::{DeviceSpeed, EmulatedCluster};
use tests::shifted::{Half, Waits, send};

/// The longest wait of the second half with adaptation may be so much of that without.
const MOST: f64 = 0.6;

/// Each computes 400 prompt tokens a second, or 80 tokens of four answers.
const SPEED: DeviceSpeed = DeviceSpeed { prefill: 400.0, tpot_ms: [40.0, 50.0] };

/// Three such prefill replicas have 80 % of their time to compute prompts in the first half; in the second, one decode replica would
/// need 240 % to answer.
const HALVES: [Half; 2] = [
    Half { requests: 48, rate: 1.2, prompt: 800, answer: 16 },
    Half { requests: 54, rate: 1.2, prompt: 80, answer: 160 },
];

const ROLES: [&str; 4] = ["prefill", "prefill", "prefill", "decode"];

#[derive(Parser)]
struct Arguments {
    /// How often each is run, one after the other.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Arguments { rounds, json } = Arguments::parse();
    let mut all = Vec::new();
    for _ in 0..rounds {
        let (without, _) = run("off").await?;
        let (with, events) = run("roles").await?;
        let ratio = with[1].longest / without[1].longest;
        all.push(ratio);
        let told = json!({
            "without": without.map(entry), "with": with.map(entry), "ratio": ratio, "at_most": MOST, "events": events,
        });
        if json {
            println!("{told}");
        } else {
            print(&without, &with, ratio, &events);
        }
    }
    ensure!(all.iter().all(|ratio| *ratio <= MOST), "adaptation did not help enough");
    Ok(())
}

/// What requests of either half waited, and what was decided.
async fn run(adapt: &str) -> Result<([Waits; 2], Vec<Value>)> {
    let bed = EmulatedCluster::start(&ROLES, SPEED, &["--adapt", adapt]).await?;
    let waits = send(&bed.server, &HALVES).await?;
    let events = bed.events(&["workload_left", "adapted", "adaptation_declined"]).await?;
    Ok((waits, events))
}

fn entry(waits: Waits) -> Value {
    json!({ "longest_wait_s": waits.longest, "mean_wait_s": waits.mean })
}

fn print(without: &[Waits; 2], with: &[Waits; 2], ratio: f64, events: &[Value]) {
    println!("                     without adaptation      with");
    for (half, (without, with)) in ["first", "second"].iter().zip(without.iter().zip(with)) {
        println!("{half:>6} half, longest   {:>8.2} s           {:>8.2} s", without.longest, with.longest);
        println!("{half:>6} half, mean      {:>8.2} s           {:>8.2} s", without.mean, with.mean);
    }
    println!("ratio of the longest waits of the second half  {ratio:.2}, asked for: at most {MOST}");
    for event in events {
        println!(
            "{}: {}",
            event["kind"].as_str().unwrap_or_default(),
            event["text"].as_str().unwrap_or_default()
        );
    }
}
