//! The result in words and as JSON.

use comfy_table::{Table, presets};
use loadgen::{Distribution, Goodput, Summary};
use serde::Serialize;

use super::plan::{LoadKind, Plan};
use super::ratios::{Ratio, ratios};
use super::session::{Outcome, Side, failures};

/// What is printed.
#[derive(Serialize)]
pub(super) struct Report {
    load: LoadReport,
    rounds: u32,
    is_interrupted: bool,
    servers: Vec<ServerReport>,
    /// Of the first server's figures over the second's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<Ratio>,
}

#[derive(Serialize)]
struct LoadReport {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    concurrency: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests_per_second: Option<f64>,
    /// Of made-up prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<String>,
    max_tokens: String,
    seed: u64,
    #[serde(skip)]
    words: String,
}

#[derive(Serialize)]
struct ServerReport {
    url: String,
    model: String,
    #[serde(flatten)]
    summary: Summary,
}

impl Report {
    pub(super) fn new(plan: &Plan, outcome: &Outcome) -> Self {
        let ratios = match outcome.sides.as_slice() {
            [first, second] => ratios(&first.rounds, &second.rounds),
            _ => Vec::new(),
        };
        Self {
            load: LoadReport::new(plan),
            rounds: plan.rounds,
            is_interrupted: outcome.is_interrupted,
            servers: outcome.sides.iter().map(ServerReport::new).collect(),
            ratios,
        }
    }

    /// The servers that answered nothing, and why.
    pub(super) fn silent_servers(&self) -> Option<String> {
        let silent = self.servers.iter().filter(|server| server.summary.answered == 0);
        let silent: Vec<String> = silent
            .map(|server| format!("{} answered nothing: {}", server.url, failures(&server.summary)))
            .collect();
        (!silent.is_empty()).then(|| silent.join("; "))
    }

    /// For people.
    pub(super) fn to_text(&self) -> String {
        let mut parts = vec![self.load.words.clone()];
        parts.extend(self.servers.iter().map(ServerReport::to_text));
        if let ([first, second], false) = (self.servers.as_slice(), self.ratios.is_empty()) {
            parts.push(format!("{} over {}\n{}", first.url, second.url, ratio_table(&self.ratios)));
        }
        if self.is_interrupted {
            parts.push("interrupted: these are the figures until then".to_owned());
        }
        parts.join("\n\n")
    }
}

impl LoadReport {
    fn new(plan: &Plan) -> Self {
        let (kind, concurrency, rate) = match plan.kind {
            LoadKind::Closed { concurrency } => ("closed", Some(concurrency), None),
            LoadKind::Fixed(rate) => ("fixed", None, Some(rate.per_second())),
            LoadKind::Poisson(rate) => ("poisson", None, Some(rate.per_second())),
            LoadKind::Trace { .. } => ("trace", None, None),
        };
        let prompt_tokens = plan.words.prompt_tokens.map(|lengths| lengths.to_string());
        let prompts = match &prompt_tokens {
            Some(lengths) => format!("made-up prompts of {lengths} tokens"),
            None => "prompts of a file".to_owned(),
        };
        let max_tokens = plan.words.max_tokens.to_string();
        Self {
            words: format!("{}; {prompts}, answers of at most {max_tokens} tokens", plan.kind),
            kind,
            concurrency,
            requests_per_second: rate,
            prompt_tokens,
            max_tokens,
            seed: plan.requests.seed,
        }
    }
}

impl ServerReport {
    fn new(side: &Side) -> Self {
        Self { url: side.url.clone(), model: side.model.clone(), summary: side.tally.summary() }
    }

    fn to_text(&self) -> String {
        let summary = &self.summary;
        let mut lines = vec![format!(
            "{} ({}): {} answered, {} failed in {:.1} s; {:.1} tokens/s, {:.2} requests/s",
            self.url,
            self.model,
            summary.answered,
            summary.failed,
            summary.seconds,
            summary.tokens_per_second,
            summary.requests_per_second
        )];
        lines.push(latency_table(summary));
        lines.extend(summary.goodput.map(goodput_line));
        if let Some(prompt) = summary.prompt_tokens {
            let cached = summary.cached_tokens.unwrap_or(0);
            let tokens = summary.tokens;
            lines.push(format!("tokens: {tokens} generated, {prompt} of prompts, {cached} of these cached"));
        }
        if summary.unfinished > 0 {
            lines.push(format!("given up: {}", summary.unfinished));
        }
        if summary.failed > 0 {
            lines.push(format!("failed: {}", failures(summary)));
        }
        if summary.client.was_overloaded() {
            lines.push(format!(
                "beware: the load generator itself was late by {:.1} ms at p99 and took {:.0} % of a core, so these latencies \
                 may be its own",
                summary.client.late_ms.p99,
                summary.client.cpu_share * 100.0
            ));
        }
        lines.join("\n")
    }
}

fn latency_table(summary: &Summary) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["ms", "mean", "p50", "p95", "p99", "max"]);
    let rows: [(&str, Option<Distribution>); 5] = [
        ("time to first token", summary.ttft_ms),
        ("time per token", summary.tpot_ms),
        ("between tokens", summary.inter_token_ms),
        ("whole request", summary.request_ms),
        ("wait in the queue", summary.queue_wait_ms),
    ];
    for (name, of) in rows.into_iter().filter_map(|(name, of)| Some((name, of?))) {
        let numbers = [of.mean, of.p50, of.p95, of.p99, of.max].map(|ms| format!("{ms:.1}"));
        table.add_row([name.to_owned()].into_iter().chain(numbers));
    }
    table.to_string()
}

fn goodput_line(goodput: Goodput) -> String {
    let Goodput { ttft_limit_ms, tpot_limit_ms, share, requests_per_second, .. } = goodput;
    let limit = |name: &str, limit: Option<f64>| limit.map(|ms| format!("{name} {ms} ms"));
    let limits = [limit("time to first token", ttft_limit_ms), limit("time per token", tpot_limit_ms)];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    format!(
        "good: {requests_per_second:.2} requests/s, {:.1} %, within {}",
        share * 100.0,
        limits.join(" and ")
    )
}

fn ratio_table(ratios: &[Ratio]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["ratio of", "median", "lowest", "highest", "rounds"]);
    for Ratio { figure, median, min, max, rounds } in ratios {
        let numbers = [median, min, max].map(|ratio| format!("{ratio:.3}"));
        let name = figure.replace('_', " ");
        table.add_row([name].into_iter().chain(numbers).chain([rounds.to_string()]));
    }
    table
}
