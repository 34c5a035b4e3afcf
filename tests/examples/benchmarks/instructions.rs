//! Instructions and allocations of Rust code per generated token, as valgrind's callgrind counts them: unlike times, they
//! do not depend on what else the machine does.
//!
//! The server runs twice, with short and with long answers, and what both have in common falls out: starting, prompts,
//! ending. Meant for a tiny model, since valgrind makes llama.cpp a hundred times slower.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tests::process::{children_of, eventually, shoal_binary, signal};
use tests::server::free_port;

use crate::Arguments;

const AT_ONCE: u32 = 8;
/// Requests of each run.
const REQUESTS: u32 = 32;
/// Tokens of an answer in the two runs.
const ANSWERS: [u32; 2] = [10, 110];
/// valgrind takes its time.
const DEADLINE: Duration = Duration::from_secs(180);

/// Whose counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Http,
    /// The worker's thread that computes.
    Inference,
    /// The worker's other threads.
    Streams,
}

/// What callgrind counted of it.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    /// Instructions of lines in Rust files, those of inlined functions among them.
    rust: u64,
    /// Calls of Rust's allocator.
    allocations: u64,
}

pub(crate) async fn instructions(arguments: &Arguments) -> Result<()> {
    let [short, long] = [run(arguments, ANSWERS[0]).await?, run(arguments, ANSWERS[1]).await?];
    let tokens = f64::from(REQUESTS * (ANSWERS[1] - ANSWERS[0]));
    println!("| part | Rust instructions per token | allocations per token |");
    println!("| --- | --- | --- |");
    for (name, part) in [
        ("HTTP process", Part::Http),
        ("stage worker, inference thread", Part::Inference),
        ("stage worker, streams", Part::Streams),
    ] {
        let [short, long] = [&short, &long].map(|counts| counts.get(&part).copied().unwrap_or_default());
        let per_token = |short: u64, long: u64| (long as f64 - short as f64) / tokens;
        let instructions = per_token(short.rust, long.rust);
        let allocations = per_token(short.allocations, long.allocations);
        println!("| {name} | {instructions:.0} | {allocations:.1} |");
    }
    Ok(())
}

/// Counts the server's process and its worker's while they answer with so many tokens.
async fn run(arguments: &Arguments, answer: u32) -> Result<HashMap<Part, Count>> {
    let folder = tempfile::tempdir()?;
    let log = tempfile::NamedTempFile::new()?;
    let port = free_port()?;
    let url = format!("http://127.0.0.1:{port}");
    let mut server = Command::new("valgrind")
        .args(["--tool=callgrind", "--trace-children=yes", "--separate-threads=yes", "--quiet"])
        // One thread runs at a time: the one that computes is not to keep the others waiting.
        .arg("--fair-sched=yes")
        .arg(format!("--callgrind-out-file={}/%p", folder.path().display()))
        .arg(shoal_binary()?)
        .args(["serve", "--slots", &AT_ONCE.to_string(), "--ctx", "128", "--threads", "1"])
        // All answer each other, but in valgrind's time.
        .args(["--peer-timeout", "600"])
        .args(["--listen", &format!("127.0.0.1:{port}")])
        .arg("-m")
        .arg(&arguments.model)
        .stdout(Stdio::null())
        .stderr(log.reopen()?)
        .spawn()
        .context("starting shoal serve under valgrind")?;
    let client = reqwest::Client::new();
    let ready = async || client.get(format!("{url}/ready")).send().await.ok()?.error_for_status().ok();
    eventually("shoal serve under valgrind", DEADLINE, ready).await?;
    let load = Command::new(shoal_binary()?)
        .args(["bench", "serve", &url, "--endpoint", "completions", "--warmup", "0", "--json"])
        .args(["--concurrency", &AT_ONCE.to_string(), "--requests", &REQUESTS.to_string()])
        .args(["--prompt-tokens", "8", "--max-tokens", &answer.to_string()])
        .args(["--body", r#"{"ignore_eos": true}"#])
        .output()?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    // While they run: a worker whose agent goes has seconds to end, less than valgrind's last words take.
    let processes = [vec![server.id()], children_of(server.id())].concat();
    let asked =
        Command::new("callgrind_control").arg("--dump").args(processes.iter().map(u32::to_string)).output();
    let asked = asked.context("asking for the counts with callgrind_control")?;
    ensure!(asked.status.success(), "callgrind_control: {}", String::from_utf8_lossy(&asked.stderr));
    let counts = counts(folder.path())?;
    signal(server.id(), "INT")?;
    server.wait()?;
    let restarts = fs::read_to_string(log.path())?.matches("the stage was lost").count();
    ensure!(
        restarts == 0,
        "the worker was lost {restarts} times, since it could not answer its agent in time"
    );
    Ok(counts)
}

/// What callgrind has written, of each part.
fn counts(folder: &Path) -> Result<HashMap<Part, Count>> {
    let mut counts: HashMap<Part, Count> = HashMap::new();
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        let text = fs::read_to_string(&path)?;
        let command = text.lines().find(|line| line.starts_with("cmd:")).unwrap_or_default();
        let part = match command {
            _ if command.contains(" stage-worker") && text.contains("stage::inference::") => Part::Inference,
            _ if command.contains(" stage-worker") => Part::Streams,
            _ if command.contains(" serve") => Part::Http,
            _ => continue,
        };
        let (sum, more) = (counts.entry(part).or_default(), count(&text, &path)?);
        sum.rust += more.rust;
        sum.allocations += more.allocations;
    }
    ensure!(
        [Part::Http, Part::Inference, Part::Streams].iter().all(|part| counts.contains_key(part)),
        "callgrind has not counted all parts: {counts:?}"
    );
    Ok(counts)
}

/// Reads callgrind's file (valgrind manual, "Callgrind Format Specification"): names are given once and then by number.
fn count(text: &str, path: &Path) -> Result<Count> {
    let (mut files, mut functions) = (HashMap::new(), HashMap::new());
    let (mut count, mut is_rust, mut is_allocator) = (Count::default(), false, false);
    let mut is_of_call = false;
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else {
            // A line of costs; the one after `calls=` is what the called function costs itself.
            if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first))
                && !std::mem::take(&mut is_of_call)
                && is_rust
            {
                let cost = line.split_whitespace().nth(1).and_then(|cost| cost.parse::<u64>().ok());
                count.rust += cost.with_context(|| format!("{}: no cost in {line:?}", path.display()))?;
            }
            continue;
        };
        match key {
            "fl" | "fi" | "fe" => is_rust = named(&mut files, value, |name| name.ends_with(".rs"))?,
            "cfi" | "cfl" => {
                named(&mut files, value, |name| name.ends_with(".rs"))?;
            }
            "fn" => {
                named(&mut functions, value, is_rust_allocator)?;
            }
            "cfn" => is_allocator = named(&mut functions, value, is_rust_allocator)?,
            "calls" => {
                is_of_call = true;
                let calls = value.split_whitespace().next().and_then(|calls| calls.parse::<u64>().ok());
                let calls = calls.with_context(|| format!("{}: no number in {line:?}", path.display()))?;
                count.allocations += if is_allocator { calls } else { 0 };
            }
            _ => {}
        }
    }
    Ok(count)
}

fn is_rust_allocator(name: &str) -> bool {
    ["__rust_alloc", "__rust_alloc_zeroed", "__rust_realloc"].iter().any(|end| name.ends_with(end))
}

/// What is to be known of the name in `(number) name`, or of the one that had the number before.
fn named(known: &mut HashMap<String, bool>, value: &str, is: impl Fn(&str) -> bool) -> Result<bool> {
    let Some((number, name)) = value.split_once(')') else { bail!("{value:?} has no number") };
    if !name.is_empty() {
        known.insert(number.to_owned(), is(name));
    }
    known.get(number).copied().with_context(|| format!("{value:?} was never named"))
}
