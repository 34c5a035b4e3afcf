//! A run in a few numbers, in the form in which it is written as JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::client::Client;

/// Times of one kind, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// How many there were.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half of them are shorter.
    pub p50: f64,
    /// 95 % are shorter.
    pub p95: f64,
    /// 99 % are shorter.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// What an answer must keep to be good, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limits {
    /// The longest time to first token.
    pub ttft: Option<f64>,
    /// The longest time per further token.
    pub tpot: Option<f64>,
}

/// How many answers kept the limits. Failed requests did not.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goodput {
    /// As asked for.
    pub ttft_limit_ms: Option<f64>,
    /// As asked for.
    pub tpot_limit_ms: Option<f64>,
    /// Answers within both.
    pub good: u64,
    /// Of all requests that ended.
    pub share: f64,
    /// Good answers per second.
    pub requests_per_second: f64,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Answered completely.
    pub answered: u64,
    /// Not answered, or not completely.
    pub failed: u64,
    /// Given up when the run was interrupted.
    pub unfinished: u64,
    /// From the first request's time to the last one's end.
    pub seconds: f64,
    /// Answers per second.
    pub requests_per_second: f64,
    /// Generated tokens per second, of complete answers.
    pub tokens_per_second: f64,
    /// Generated tokens of complete answers.
    pub tokens: u64,
    /// Tokens of their prompts, where the server counts them.
    pub prompt_tokens: Option<u64>,
    /// Of these, tokens that the server had computed for an earlier request.
    pub cached_tokens: Option<u64>,
    /// Time to first token.
    pub ttft_ms: Option<Distribution>,
    /// Time per further token: an answer's time after its first token, over the number of its further tokens.
    pub tpot_ms: Option<Distribution>,
    /// Between two events that carry tokens, of all answers.
    pub inter_token_ms: Option<Distribution>,
    /// From a request's time to its answer's end.
    pub request_ms: Option<Distribution>,
    /// How long the server says that requests waited for their turn.
    pub queue_wait_ms: Option<Distribution>,
    /// If limits were given.
    pub goodput: Option<Goodput>,
    /// How many requests failed in which way.
    pub failures: BTreeMap<String, u64>,
    /// The load generator's own part.
    pub client: Client,
}
