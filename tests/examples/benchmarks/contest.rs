//! Two servers under the same load in turns, by `shoal bench serve --vs`, and the ratios that come of it.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::process::shoal_binary;

use crate::Arguments;

/// Who is compared.
pub(crate) struct Contest<'a> {
    pub(crate) arguments: &'a Arguments,
    pub(crate) ours: String,
    pub(crate) theirs: String,
}

/// A closed loop.
pub(crate) struct Load {
    pub(crate) at_once: u32,
    pub(crate) requests: u32,
    /// Tokens.
    pub(crate) prompt: u32,
    /// Tokens.
    pub(crate) answer: u32,
}

/// A figure of both servers.
pub(crate) struct Row {
    load: String,
    figure: String,
    /// Of all rounds together; none where the report has it by rounds alone.
    values: Option<(f64, f64)>,
    median: f64,
    min: f64,
    max: f64,
}

impl Contest<'_> {
    /// Runs a closed loop; `figures` of its report.
    pub(crate) fn run(&self, name: &str, load: &Load, figures: &[&str]) -> Result<Vec<Row>> {
        self.bench(name, &load.options(), figures)
    }

    /// Seven answers begin together, and a long prompt comes while they are written.
    pub(crate) fn trace(&self, name: &str, figures: &[&str]) -> Result<Vec<Row>> {
        let mut trace = tempfile::NamedTempFile::new()?;
        for _ in 0..7 {
            writeln!(trace, r#"{{"at": 0.0, "prompt_tokens": 64, "max_tokens": 200}}"#)?;
        }
        writeln!(trace, r#"{{"at": 4.0, "prompt_tokens": 1500, "max_tokens": 4}}"#)?;
        trace.flush()?;
        self.bench(name, &[("--trace", trace.path().to_string_lossy().into_owned())], figures)
    }

    fn bench(&self, name: &str, load: &[(&str, String)], figures: &[&str]) -> Result<Vec<Row>> {
        let rounds = self.arguments.rounds.to_string();
        let servers = [&self.ours, "--vs", &self.theirs, "--rounds", &rounds];
        let report = report(self.arguments, &servers, load).with_context(|| name.to_owned())?;
        figures.iter().map(|figure| Row::new(name, figure, &report)).collect()
    }
}

impl Load {
    fn options(&self) -> [(&'static str, String); 4] {
        let Self { at_once, requests, prompt, answer } = self;
        [
            ("--concurrency", at_once.to_string()),
            ("--requests", requests.to_string()),
            ("--prompt-tokens", prompt.to_string()),
            ("--max-tokens", answer.to_string()),
        ]
    }
}

/// A figure of one server by itself.
pub(crate) fn alone(arguments: &Arguments, server: &str, load: &Load, figure: &str) -> Result<f64> {
    let report = report(arguments, &[server], &load.options())?;
    value(&report["servers"][0], figure).with_context(|| format!("no {figure} in the report"))
}

/// What `shoal bench serve` says of servers under a load, none of whose requests failed.
fn report(arguments: &Arguments, servers: &[&str], load: &[(&str, String)]) -> Result<Value> {
    let mut command = Command::new(shoal_binary()?);
    command.args(["bench", "serve", "--json", "--body", r#"{"ignore_eos": true}"#]).args(servers);
    command.arg("--model").arg(&arguments.model).stderr(Stdio::inherit());
    for (option, value) in load {
        command.arg(option).arg(value);
    }
    let output = command.output().context("running shoal bench serve")?;
    ensure!(output.status.success(), "shoal bench serve ended with {}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout)?;
    for server in report["servers"].as_array().context("no servers in the report")? {
        ensure!(server["failed"] == 0, "requests failed: {}", server["failures"]);
    }
    Ok(report)
}

impl Row {
    fn new(load: &str, figure: &str, report: &Value) -> Result<Self> {
        let ratios = report["ratios"].as_array().context("no ratios in the report")?;
        let ratio = ratios.iter().find(|ratio| ratio["figure"] == figure);
        let ratio = ratio.with_context(|| format!("no {figure} in the report"))?;
        let number = |name: &str| ratio[name].as_f64().with_context(|| format!("no {name} of {figure}"));
        let value = |server: usize| value(&report["servers"][server], figure);
        Ok(Self {
            load: load.to_owned(),
            figure: figure.to_owned(),
            values: value(0).zip(value(1)),
            median: number("median")?,
            min: number("min")?,
            max: number("max")?,
        })
    }
}

/// A figure such as `ttft_mean` or `tokens_per_second` of a server's report.
fn value(server: &Value, figure: &str) -> Option<f64> {
    server[figure].as_f64().or_else(|| {
        let (kind, statistic) = figure.rsplit_once('_')?;
        server[format!("{kind}_ms")][statistic].as_f64()
    })
}

/// Prints rows as Markdown.
pub(crate) fn ratio_table(other: &str, rows: &[Row]) {
    println!("| load | figure | Shoal | {other} | ratio: median (least to most) |");
    println!("| --- | --- | --- | --- | --- |");
    for Row { load, figure, values, median, min, max } in rows {
        let (ours, theirs) = values.unwrap_or((f64::NAN, f64::NAN));
        println!("| {load} | `{figure}` | {ours:.1} | {theirs:.1} | {median:.3} ({min:.2} to {max:.2}) |");
    }
}
