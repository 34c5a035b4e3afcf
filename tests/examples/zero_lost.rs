//! What clients see of a deployment whose stages, hosts, links and masters fail at random moments, which is nothing but a pause:
//! `cargo run --release -p tests --example zero_lost -- [--seeds N] [--seed S] [--requests N] [--restart]`, after `cargo build --release`. Linux and root
//! only. About a minute a seed.
//!
//! 300 requests, all sent at once, over two replicas of two stages on four hosts. It ends with an error if any answer is not the whole
//! model's, a fault is noticed later than after 3 s, or all replicas serve again later than 30 s after the last fault.
//!
//! With `--restart` the orchestrator itself is killed under the same load, and started again when it has been away for 10 s: its stages
//! stay loaded, requests that were cut off end at once for their clients, and all serves again 5 s after its return.
#![allow(clippy::print_stdout)] // its result

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    use std::time::Duration;

    use anyhow::ensure;
    use clap::Parser;
    use tests::survival::{Course, Exam, Fault, hosts, run};

    #[derive(Parser)]
    struct Args {
        /// The first seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How many, one after the other.
        #[arg(long, default_value_t = 1)]
        seeds: u64,
        /// Sent at once.
        #[arg(long, default_value_t = 300)]
        requests: usize,
        /// Kill the orchestrator instead.
        #[arg(long)]
        restart: bool,
    }

    let Args { seed, seeds, requests, restart } = Args::parse();
    let exam = Exam::new(60)?;
    if restart {
        let report = tests::restart::run(requests, Duration::from_secs(10), &exam, &hosts().build()?)?;
        println!("{report}");
        let breaches = report.breaches();
        ensure!(breaches.is_empty(), "{}", breaches.join("\n"));
        return Ok(());
    }
    let mut broken = Vec::new();
    for seed in seed..seed + seeds {
        let course = Course { seed, requests, faults: Fault::all(seed), within: Duration::from_secs(20) };
        let report = run(&course, &exam, &hosts().build()?)?;
        println!("seed {seed}\n{report}");
        for breach in report.breaches() {
            println!("  BREACH: {breach}");
            broken.push(seed);
        }
    }
    broken.dedup();
    ensure!(broken.is_empty(), "{} of {seeds} seeds: {broken:?}", broken.len());
    println!("{seeds} seeds, nothing lost");
    Ok(())
}
