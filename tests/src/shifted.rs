//! A workload that becomes another one at half time, and what its requests wait.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use serde_json::{Value, json};

use crate::chat::EventStream;
use crate::server::Server;

/// Requests that are alike.
#[derive(Debug, Clone, Copy)]
pub struct Half {
    /// How many come.
    pub requests: usize,
    /// A second, in the mean.
    pub rate: f64,
    /// Tokens of a prompt.
    pub prompt: u32,
    /// Tokens of an answer.
    pub answer: u32,
}

/// What requests waited, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Waits {
    /// The longest.
    pub longest: f64,
    /// The mean.
    pub mean: f64,
}

/// Sends the halves one after the other; what the requests of each waited.
///
/// A request waits until it gets a slot, as the server tells, and again between its first and its second token, if another
/// replica's slot is not free by then. All requests come when they should, whatever became of those before.
pub async fn send(server: &Server, halves: &[Half; 2]) -> Result<[Waits; 2]> {
    let (mut due, mut random) = (0.0, 1_u64);
    let mut asked = Vec::new();
    for (number, half) in halves.iter().enumerate() {
        for _ in 0..half.requests {
            let at = Duration::from_secs_f64(due);
            asked.push((number, at, *half, asked.len() as u32));
            due += interval(&mut random) / half.rate;
        }
    }
    let start = Instant::now();
    let all = asked.into_iter().map(|(number, at, half, id)| async move {
        tokio::time::sleep(at.saturating_sub(start.elapsed())).await;
        Ok::<_, anyhow::Error>((number, wait(server, half, id).await?))
    });
    let waits = try_join_all(all).await?;
    Ok([0, 1].map(|half| {
        let of: Vec<f64> =
            waits.iter().filter(|(number, _)| *number == half).map(|(_, wait)| *wait).collect();
        let longest = of.iter().copied().fold(0.0, f64::max);
        Waits { longest, mean: of.iter().sum::<f64>() / of.len().max(1) as f64 }
    }))
}

/// Exponential with mean 1, from a linear congruential generator (Knuth's MMIX): the same in every run.
fn interval(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let uniform = (*state >> 11) as f64 / (1_u64 << 53) as f64;
    -(1.0 - uniform).ln()
}

/// Sends one request, and reads all of its answer.
async fn wait(server: &Server, half: Half, id: u32) -> Result<f64> {
    // No two begin alike: nothing is in a cache.
    let prompt: Vec<u32> = (0..half.prompt).map(|place| 1000 + (id * 31 + place * 7) % 40_000).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": half.answer, "ignore_eos": true, "stream_options": { "include_usage": true },
    });
    let mut stream = EventStream::open(server, "/v1/completions", body).await?;
    let (mut pieces, mut usage, mut queue_ms) = (Vec::new(), Value::Null, None);
    while let Some(event) = stream.next_json().await? {
        if !event["error"].is_null() {
            bail!("error event: {event}");
        }
        if pieces.len() < 2 && event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            pieces.push(Instant::now());
        }
        if !event["usage"].is_null() {
            (usage, queue_ms) = (event["usage"].clone(), event["timings"]["queue_ms"].as_f64());
        }
    }
    if usage["completion_tokens"] != half.answer {
        bail!("{} tokens were asked for: {usage}", half.answer);
    }
    let between = pieces.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).sum::<f64>();
    Ok(queue_ms.context("no time in the queue")? / 1e3 + between)
}
