//! Sends the requests of a trial to an orchestrator when they are due, and notes when their tokens come. A client like any other: all
//! it knows of the server is its API.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use planner::sim::Request;
use serde::Deserialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::bed::MODEL;

/// What a client saw of one request, in seconds of the devices' time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Seen {
    /// When it was due.
    pub(super) arrival: f64,
    /// When its first token came.
    pub(super) first: f64,
    /// When its second token came; as its first, if there was none.
    pub(super) second: f64,
    /// When its last token came.
    pub(super) last: f64,
    /// Tokens that came.
    pub(super) tokens: f64,
    /// The replica that computed its prompt.
    pub(super) replica: usize,
}

/// Where to send them, and how fast time runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Server {
    pub(super) api: SocketAddr,
    /// Tokens of its vocabulary.
    pub(super) n_vocab: u32,
    pub(super) time_scale: f64,
}

/// Sends all, and gives what became of them, in their order. `progress` is told how many have ended.
pub(super) async fn drive(
    server: Server,
    requests: &[Request],
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Seen>> {
    let client = reqwest::Client::builder().tcp_nodelay(true).build().context("making an HTTP client")?;
    let start = Instant::now();
    let mut under_way = JoinSet::new();
    for (index, request) in requests.iter().enumerate() {
        let exchange = Exchange { client: client.clone(), server, start, request: *request };
        under_way.spawn(async move { (index, exchange.run(index).await) });
    }
    let mut seen = vec![None; requests.len()];
    while let Some(ended) = under_way.join_next().await {
        let (index, outcome) = ended.context("a request was not followed to its end")?;
        seen[index] = Some(outcome.with_context(|| format!("request {index}"))?);
        progress(seen.iter().flatten().count() as u64);
    }
    seen.into_iter().collect::<Option<_>>().context("a request has no outcome")
}

struct Exchange {
    client: reqwest::Client,
    server: Server,
    start: Instant,
    request: Request,
}

/// Of the last chunk of an answer.
#[derive(Deserialize)]
struct Last {
    timings: Timings,
}

#[derive(Deserialize)]
struct Timings {
    predicted_n: u32,
    replica: Option<usize>,
}

impl Exchange {
    async fn run(self, index: usize) -> Result<Seen> {
        let scale = self.server.time_scale;
        let due = self.start + Duration::from_secs_f64(self.request.at * scale);
        let body = json!({
            "model": MODEL,
            "prompt": prompt(index, self.request.prompt as usize, self.server.n_vocab),
            "max_tokens": self.request.output as u64,
            "ignore_eos": true,
            "temperature": 0.0,
            "stream": true,
        });
        let url = format!("http://{}/v1/completions", self.server.api);
        let ready = self.client.post(url).json(&body);
        tokio::time::sleep_until(due).await;
        let mut answer = ready.send().await.context("asking")?;
        if !answer.status().is_success() {
            bail!("the server answered {}: {}", answer.status(), answer.text().await.unwrap_or_default());
        }
        let mut events = Events::default();
        while let Some(bytes) = answer.chunk().await.context("reading the answer")? {
            events.take(&bytes, Instant::now());
        }
        let last: Last = serde_json::from_str(&events.last).context("the answer's last event")?;
        let tokens = f64::from(last.timings.predicted_n);
        ensure!(tokens == self.request.output, "{tokens} tokens came of {}", self.request.output);
        let [first, second, end] = [events.first, events.second.or(events.first), events.newest]
            .map(|at| at.map(|at| at.saturating_duration_since(self.start).as_secs_f64() / scale));
        Ok(Seen {
            arrival: self.request.at,
            first: first.context("no token came")?,
            second: second.context("no token came")?,
            last: end.context("no token came")?,
            tokens,
            replica: last.timings.replica.context("the server does not tell which replica served")?,
        })
    }
}

/// Tokens of a prompt, unlike those of any other from the first on: nothing of it is cached.
fn prompt(index: usize, tokens: usize, n_vocab: u32) -> Vec<usize> {
    let n_vocab = n_vocab as usize;
    // Ordinary pieces of words, some way from the special ones at either end.
    let (first, n) = (n_vocab / 4, (n_vocab / 2).max(1));
    (0..tokens).map(|at| first + (index + at * 7) % n).collect()
}

/// When an answer's events came.
#[derive(Default)]
struct Events {
    /// Bytes after the last whole line.
    rest: Vec<u8>,
    first: Option<Instant>,
    second: Option<Instant>,
    newest: Option<Instant>,
    /// The last event's JSON.
    last: String,
}

impl Events {
    fn take(&mut self, bytes: &[u8], at: Instant) {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        for line in whole.split(|byte| *byte == b'\n') {
            if let Some(data) = line.strip_prefix(b"data: ").filter(|data| data.starts_with(b"{")) {
                self.event(data, at);
            }
        }
    }

    fn event(&mut self, data: &[u8], at: Instant) {
        self.last = String::from_utf8_lossy(data).into_owned();
        if self.first.is_none() {
            self.first = Some(at);
        } else if self.second.is_none() {
            self.second = Some(at);
        }
        self.newest = Some(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_from_comments_wherever_they_are_torn() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut events = Events::default();
        for (bytes, ms) in [
            (": keep-alive\n\n", 1),
            ("data: {\"a\"", 2),
            (": 1}\n\nda", 3),
            ("ta: {\"b\": 2}\n\n", 4),
            ("data: {\"c\": 3}\n\ndata: [DONE]\n\n", 5),
        ] {
            events.take(bytes.as_bytes(), at(ms));
        }
        assert_eq!((events.first, events.second, events.newest), (Some(at(3)), Some(at(4)), Some(at(5))));
        assert_eq!(events.last, "{\"c\": 3}");
    }

    #[test]
    fn prompts_begin_differently_and_lie_in_the_vocabulary() {
        let prompts: Vec<_> = (0..100).map(|index| prompt(index, 300, 512)).collect();
        let firsts: std::collections::HashSet<_> = prompts.iter().map(|prompt| prompt[0]).collect();
        assert_eq!(firsts.len(), 100);
        assert!(prompts.iter().flatten().all(|token| *token < 512));
    }
}
