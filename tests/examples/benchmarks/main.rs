//! Makes the tables of `docs/benchmarks.md`: Shoal against llama-server and against itself, each table by one command.
//!
//! `cargo run --release -p tests --example benchmarks -- TABLE -m MODEL`, after `cargo build --release` and
//! `scripts/build-peers.sh`. The machine should do nothing else meanwhile.
#![allow(clippy::print_stdout)] // its result

mod contest;
mod instructions;
mod peer;
mod soak;
mod start;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use contest::{Contest, Load, ratio_table};
use peer::Peer;
use tests::server::Server;

/// What both servers are given.
const SLOTS: u32 = 8;
const CTX: u32 = 2048;

/// Makes a table of docs/benchmarks.md
#[derive(Parser)]
struct Arguments {
    /// Which
    table: Table,
    /// Model file
    #[arg(short, long)]
    model: PathBuf,
    /// Alternations of the two sides
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// CPU threads of each side
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Seconds of the soak
    #[arg(long, default_value_t = 600)]
    seconds: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Table {
    /// One process of Shoal against llama-server: generations, a long prompt, resident memory
    OneHost,
    /// A long prompt among seven generations, against llama-server
    LongPrompt,
    /// From the start of the program to the first token, against llama-server
    ColdStart,
    /// Three stage processes against one
    Stages,
    /// Instructions and allocations of Rust code per token, by valgrind
    Instructions,
    /// 200 streams at once, and what the processes hold meanwhile
    Soak,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.table {
        Table::OneHost => one_host(&arguments).await,
        Table::LongPrompt => long_prompt(&arguments).await,
        Table::ColdStart => start::cold_start(&arguments).await,
        Table::Stages => stages(&arguments).await,
        Table::Instructions => instructions::instructions(&arguments).await,
        Table::Soak => soak::soak(&arguments).await,
    }
}

/// Arguments of `shoal serve` that make it like the peer.
fn shoal_arguments(arguments: &Arguments) -> Vec<String> {
    let Arguments { threads, .. } = arguments;
    ["--slots", &SLOTS.to_string(), "--ctx", &CTX.to_string(), "--threads", &threads.to_string()]
        .map(str::to_owned)
        .into()
}

async fn shoal(arguments: &Arguments, more: &[&str]) -> Result<Server> {
    let common = shoal_arguments(arguments);
    let args: Vec<&str> = common.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Server::start(&arguments.model.to_string_lossy(), &args).await
}

async fn one_host(arguments: &Arguments) -> Result<()> {
    let peer = Peer::start(arguments).await?;
    let server = shoal(arguments, &[]).await?;
    let contest = Contest { arguments, ours: server.url(""), theirs: peer.url() };
    let figures = ["tokens_per_second", "ttft_mean", "tpot_mean"];
    let mut rows = Vec::new();
    for at_once in [1, 4, 8] {
        let load = Load { at_once, requests: requests(at_once), prompt: 64, answer: 96 };
        rows.extend(contest.run(&format!("{at_once} at once"), &load, &figures)?);
    }
    let load = Load { at_once: 1, requests: 3, prompt: 1000, answer: 2 };
    rows.extend(contest.run("prompt of 1,000 tokens", &load, &["ttft_mean"])?);
    ratio_table("llama-server", &rows);
    peer::memory_table(&server, &peer)
}

/// Of one side in one round: times to first tokens are as many as requests, and each varies by a tenth.
fn requests(at_once: u32) -> u32 {
    (2 * at_once).max(10)
}

async fn long_prompt(arguments: &Arguments) -> Result<()> {
    let peer = Peer::start(arguments).await?;
    let server = shoal(arguments, &[]).await?;
    let contest = Contest { arguments, ours: server.url(""), theirs: peer.url() };
    let rows =
        contest.trace("1,500 tokens among seven answers", &["inter_token_max", "tokens_per_second"])?;
    ratio_table("llama-server", &rows);
    Ok(())
}

async fn stages(arguments: &Arguments) -> Result<()> {
    let start = async |stages: &str| {
        let args = ["--slots", &SLOTS.to_string(), "--ctx", &CTX.to_string(), "--stages", stages];
        Server::start(&arguments.model.to_string_lossy(), &args).await
    };
    let (three, one) = (start("3").await?, start("1").await?);
    let contest = Contest { arguments, ours: three.url(""), theirs: one.url("") };
    let mut rows = Vec::new();
    for at_once in [1, 8] {
        let load = Load { at_once, requests: requests(at_once), prompt: 64, answer: 96 };
        let figures = ["tpot_mean", "tokens_per_second", "ttft_mean"];
        rows.extend(contest.run(&format!("{at_once} at once"), &load, &figures)?);
    }
    ratio_table("one stage", &rows);
    Ok(())
}
