//! `shoal bench serve`: load for any OpenAI-compatible server, and what its clients see of it.
//!
//! The load generator is the crate `loadgen`; here are its command line and its results. Knows servers by their address
//! alone: `shoal serve` is asked like any other.

mod plan;
mod plot;
mod ratios;
mod report;
mod session;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use loadgen::{Lengths, Rate};
use serde_json::{Map, Value};

use crate::cli::Globals;
use crate::exit::Interrupted;
use crate::output;
use report::Report;

/// Arguments of `shoal bench serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench serve                                         `shoal serve` on this host, one request at a time
  shoal bench serve http://10.0.0.7:8080 --concurrency 8 --requests 200
  shoal bench serve --rate 2 --duration 60 --slo-ttft-ms 500 --slo-tpot-ms 100
  shoal bench serve --trace monday.jsonl --svg monday.svg
  shoal bench serve -m SmolLM2 --prompt-tokens 1000 --max-tokens 1
  shoal bench serve --vs http://127.0.0.1:8081 --concurrency 4 --body '{\"ignore_eos\": true}'

A trace has a line like {\"at\": 1.5, \"prompt_tokens\": 200, \"max_tokens\": 50} for each request; `at` is in seconds. A prompts
file has a line of text for each prompt, or of JSON with \"prompt\" or \"messages\".

With --rate and --trace, latencies count from when a request was due, whenever it was sent. Ctrl-C ends the run and
prints what was measured so far. Exits with 1 if nothing was answered, and with 130 after Ctrl-C.")]
pub(crate) struct ServeArgs {
    /// Address of the server.
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    result: ResultArgs,
}

/// Whom to ask, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "Servers")]
struct ServerArgs {
    /// API key, if the server asks for one.
    #[arg(long, env = "SHOAL_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Model to ask for [default: the first that the server lists].
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// A second server: both are asked the same in turns, and the first's figures are divided by the second's.
    #[arg(long, value_name = "URL")]
    vs: Option<String>,
    /// API key of the second server.
    #[arg(long, env = "SHOAL_VS_API_KEY", hide_env_values = true, value_name = "KEY", requires = "vs")]
    vs_api_key: Option<String>,
    /// Model to ask the second server for [default: the first that it lists].
    #[arg(long, value_name = "NAME", requires = "vs")]
    vs_model_name: Option<String>,
    /// Runs of each server; who goes first changes.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "vs", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Which route generates.
    #[arg(long, value_enum, default_value_t = EndpointArg::Chat)]
    endpoint: EndpointArg,
    /// Further fields of each request, as a JSON object; they override what is sent otherwise (temperature 0).
    #[arg(long, value_name = "JSON")]
    body: Option<Fields>,
    /// Seconds after which a request counts as failed.
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    timeout: Seconds,
}

/// How many requests, and when.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
struct LoadArgs {
    /// Requests at once; the next is sent when one has ended [default: 1, unless --rate or --trace is given].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    concurrency: Option<u32>,
    /// Requests per second, however many are under way.
    #[arg(long, value_name = "RATE", conflicts_with = "concurrency")]
    rate: Option<Rate>,
    /// How the requests of --rate come.
    #[arg(long, value_enum, default_value_t = ArrivalsArg::Poisson, requires = "rate")]
    arrivals: ArrivalsArg,
    /// File with a line of JSON for each request: when it comes, and how long it is.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["concurrency", "rate"])]
    trace: Option<PathBuf>,
    /// Requests to send, in each round [default: all of a trace; 8 for each at once, at least 32; no limit with
    /// --duration].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: Option<u64>,
    /// Seconds after which no more are sent, in each round; answers under way are awaited.
    #[arg(long, value_name = "SECONDS")]
    duration: Option<Seconds>,
    /// Requests before the first round, which do not count [default: as many as are sent at once].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=100_000))]
    warmup: Option<u32>,
    /// The same seed makes the same load.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// What is asked.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompts and answers")]
struct TextArgs {
    /// File of prompts, which are sent in this order and from the start again.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt_tokens")]
    prompts: Option<PathBuf>,
    /// Tokens of made-up prompts, or a range; without -m about as many, since a word stands for a token.
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    prompt_tokens: Lengths,
    /// Model file whose vocabulary counts the tokens of made-up prompts.
    #[arg(short, long, value_name = "MODEL", conflicts_with = "prompts")]
    model: Option<String>,
    /// Tokens of an answer at most, or a range.
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    max_tokens: Lengths,
}

/// What is made of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
struct ResultArgs {
    /// Longest time to first token of a good answer.
    #[arg(long, value_name = "MS")]
    slo_ttft_ms: Option<Milliseconds>,
    /// Longest time per further token of a good answer.
    #[arg(long, value_name = "MS")]
    slo_tpot_ms: Option<Milliseconds>,
    /// Also draw the result into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum EndpointArg {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ArrivalsArg {
    /// At random times, independent of each other.
    Poisson,
    /// At equal intervals.
    Fixed,
}

/// A time in seconds, such as 0.5.
#[derive(Debug, Clone, Copy)]
struct Seconds(Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// A month: longer is a mistake.
        const LONGEST: f64 = 30.0 * 86_400.0;
        let seconds = text.trim().parse().ok().filter(|seconds| *seconds > 0.0 && *seconds <= LONGEST);
        let seconds = seconds.ok_or_else(|| format!("{text:?} is not a number of seconds above 0"))?;
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

/// A limit on a latency.
#[derive(Debug, Clone, Copy)]
struct Milliseconds(f64);

impl FromStr for Milliseconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ms = text.trim().parse().ok().filter(|ms: &f64| *ms > 0.0 && ms.is_finite());
        ms.map(Self).ok_or_else(|| format!("{text:?} is not a number of milliseconds above 0"))
    }
}

/// Fields of a request's body.
#[derive(Debug, Clone)]
struct Fields(Map<String, Value>);

impl FromStr for Fields {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map(Self).map_err(|error| format!("not a JSON object: {error}"))
    }
}

/// Measures and prints.
pub(crate) fn run(args: &ServeArgs, globals: &Globals) -> Result<()> {
    let plan = plan::Plan::new(args, globals)?;
    // One thread: what it has to do at most is known from the bench of `loadgen`, and two would share the host's cores with
    // a server on it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.context("starting the async runtime")?.block_on(session::measure(&plan))?;
    if let Some(path) = &args.result.svg {
        let drawing = plot::svg(&outcome.sides);
        std::fs::write(path, drawing).with_context(|| format!("writing {}", path.display()))?;
    }
    let report = Report::new(&plan, &outcome);
    if args.result.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.to_text())?;
    }
    if outcome.is_interrupted {
        return Err(Interrupted.into());
    }
    match report.silent_servers() {
        None => Ok(()),
        Some(which) => bail!("{which}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_limits_are_positive_numbers() {
        assert_eq!("0.5".parse::<Seconds>().unwrap().0, Duration::from_millis(500));
        for bad in ["0", "-1", "inf", "nan", "1e9", ""] {
            assert!(bad.parse::<Seconds>().is_err(), "{bad}");
        }
        for bad in ["0", "-1", "inf", "nan", ""] {
            assert!(bad.parse::<Milliseconds>().is_err(), "{bad}");
        }
    }

    #[test]
    fn fields_are_a_json_object() {
        assert_eq!("{\"ignore_eos\": true}".parse::<Fields>().unwrap().0["ignore_eos"], true);
        assert!("[1]".parse::<Fields>().unwrap_err().contains("not a JSON object"));
    }
}
