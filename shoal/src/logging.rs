//! Where log events go: to stderr, in two shapes. People get time and colour; an agent reads its worker's lines as
//! `LEVEL target: text` and logs them as its own.

use std::io::{self, IsTerminal};

use anyhow::{Context, Result, anyhow};
use tracing_subscriber::EnvFilter;

/// Overrides what `-v` says; the syntax of tracing's `EnvFilter`.
pub(crate) const FILTER_VARIABLE: &str = "SHOAL_LOG";

/// llama.cpp warns of things that are so by design here (a context shorter than the model's, no file of its own
/// making), so its warnings count as information.
const FILTERS: [&str; 4] =
    ["warn,llama.cpp=error", "info,llama.cpp=warn", "debug,h2=info,hyper=info", "trace"];

/// The filter in force.
pub(crate) fn filter(verbose: u8) -> String {
    let asked = std::env::var(FILTER_VARIABLE).ok().filter(|filter| !filter.trim().is_empty());
    asked.unwrap_or_else(|| FILTERS[usize::from(verbose).min(FILTERS.len() - 1)].to_owned())
}

/// For commands that a person starts.
pub(crate) fn init(verbose: u8) -> Result<()> {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(parse(&filter(verbose))?)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    subscriber.try_init().map_err(|e| anyhow!(e)).context("starting the log")
}

/// For a stage worker.
pub(crate) fn init_worker() -> Result<()> {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(parse(&filter(0))?)
        .with_writer(io::stderr)
        .with_ansi(false)
        .without_time();
    subscriber.try_init().map_err(|e| anyhow!(e)).context("starting the log")
}

fn parse(filter: &str) -> Result<EnvFilter> {
    EnvFilter::try_new(filter).with_context(|| format!("{FILTER_VARIABLE}={filter:?} is not a log filter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_of_verbosity_is_a_filter() {
        for filter in FILTERS {
            parse(filter).unwrap();
        }
        assert!(parse("shoal=loud").unwrap_err().to_string().contains("SHOAL_LOG"));
    }
}
