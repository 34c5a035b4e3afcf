//! The bodies of answers, as OpenAI's clients read them. Knows nothing of how they come about.

use serde::Serialize;

use super::logprobs::{LegacyLogprobs, TokenLogprob};

/// Changes when the server's software does, so that clients can tell why the same seed gives another text.
const FINGERPRINT: &str = concat!("shoal-", env!("CARGO_PKG_VERSION"));

/// What every answer and every chunk begins with.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
}

impl<'a> Envelope<'a> {
    /// An answer of kind `object`.
    pub(crate) fn new(object: &'static str, id: &'a str, created: u64, model: &'a str) -> Self {
        Self { id, object, created, model, system_fingerprint: FINGERPRINT }
    }
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokens,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct PromptTokens {
    cached_tokens: u32,
}

impl Usage {
    /// `cached` of the `prompt` tokens were in the slot already.
    pub(crate) fn new(prompt: u32, cached: u32, completion: u32) -> Self {
        Self {
            prompt_tokens: prompt,
            completion_tokens: completion,
            total_tokens: prompt.saturating_add(completion),
            prompt_tokens_details: PromptTokens { cached_tokens: cached },
        }
    }

    /// Tokens of the prompt.
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Tokens of the answer.
    pub(crate) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }
}

/// How long a request took in the engine, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spent {
    /// Waiting for a slot.
    pub(crate) queue: f64,
    /// On the prompt.
    pub(crate) prefill: f64,
    /// On the answer.
    pub(crate) decode: f64,
    /// The replica that computed the prompt.
    pub(crate) replica: Option<usize>,
}

/// How long a request took in the engine, with llama-server's names; the queue, and where its prompt was computed, have ours.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timings {
    queue_ms: f64,
    cache_n: u32,
    prompt_n: u32,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: u32,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    replica: Option<usize>,
}

impl Timings {
    /// Cached tokens cost no time.
    pub(crate) fn new(usage: Usage, spent: Spent) -> Self {
        let Spent { queue: queue_ms, prefill: prefill_ms, decode: decode_ms, replica } = spent;
        let cached = usage.prompt_tokens_details.cached_tokens;
        let prompt_n = usage.prompt_tokens.saturating_sub(cached);
        let predicted_n = usage.completion_tokens;
        Self {
            queue_ms,
            cache_n: cached,
            prompt_n,
            prompt_ms: prefill_ms,
            prompt_per_token_ms: ratio(prefill_ms, f64::from(prompt_n)),
            prompt_per_second: ratio(f64::from(prompt_n) * 1e3, prefill_ms),
            predicted_n,
            predicted_ms: decode_ms,
            predicted_per_token_ms: ratio(decode_ms, f64::from(predicted_n)),
            predicted_per_second: ratio(f64::from(predicted_n) * 1e3, decode_ms),
            replica,
        }
    }
}

/// JSON has no infinity.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// `finish_reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct Whole<'a, C> {
    #[serde(flatten)]
    pub(crate) envelope: Envelope<'a>,
    pub(crate) choices: [C; 1],
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

/// A piece of a streamed answer. `usage` is `null` in all chunks but the last where the client asked for it.
#[derive(Debug, Serialize)]
pub(crate) struct Chunk<'a, C> {
    #[serde(flatten)]
    pub(crate) envelope: Envelope<'a>,
    pub(crate) choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

/// The one choice of a whole chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: AssistantMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: FinishReason,
}

/// A whole assistant message.
#[derive(Debug, Serialize)]
pub(crate) struct AssistantMessage {
    pub(crate) role: &'static str,
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<CalledTool>,
    /// Always null: models here do not mark refusals.
    pub(crate) refusal: Option<String>,
}

/// A whole tool call.
#[derive(Debug, Serialize)]
pub(crate) struct CalledTool {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) function: CalledFunction,
}

/// The function of a tool call, with its arguments as JSON text.
#[derive(Debug, Serialize)]
pub(crate) struct CalledFunction {
    pub(crate) name: String,
    pub(crate) arguments: String,
}

/// Log probabilities of a chat answer's tokens.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenLogprob>,
    /// Always null.
    pub(crate) refusal: Option<Vec<TokenLogprob>>,
}

impl ChatLogprobs {
    /// Of an answer's own tokens.
    pub(crate) fn of(content: Vec<TokenLogprob>) -> Self {
        Self { content, refusal: None }
    }
}

/// The one choice of a chat chunk.
#[derive(Debug, Serialize)]
pub(crate) struct ChatDeltaChoice {
    pub(crate) index: u32,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

impl ChatDeltaChoice {
    /// A part of an answer that goes on.
    pub(crate) fn new(delta: Delta, logprobs: Option<ChatLogprobs>) -> Self {
        Self { index: 0, delta, logprobs, finish_reason: None }
    }
}

/// What a chunk adds to the message.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCallDelta>,
}

/// What a chunk adds to a tool call: first its id and name, then its arguments piece by piece.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) function: FunctionDelta,
}

/// The function's part of a tool call's delta.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

/// The one choice of a completion or of one of its chunks.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) logprobs: Option<LegacyLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn usage_and_timings_have_the_names_clients_know() {
        let usage = Usage::new(10, 4, 5);
        assert_eq!(
            serde_json::to_value(usage).unwrap(),
            json!({ "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
                "prompt_tokens_details": { "cached_tokens": 4 } })
        );
        let spent = Spent { queue: 7.0, prefill: 60.0, decode: 100.0, replica: Some(2) };
        let timings = serde_json::to_value(Timings::new(usage, spent)).unwrap();
        assert_eq!(timings["replica"], 2);
        assert_eq!(timings["queue_ms"], 7.0);
        assert_eq!(timings["prompt_n"], 6);
        assert_eq!(timings["prompt_per_token_ms"], 10.0);
        assert_eq!(timings["predicted_per_second"], 50.0);
    }

    #[test]
    fn a_time_of_zero_gives_no_infinite_rate() {
        let timings =
            Timings::new(Usage::new(1, 1, 0), Spent { queue: 0.0, prefill: 0.0, decode: 0.0, replica: None });
        assert!(!serde_json::to_string(&timings).unwrap().contains("null"));
    }
}
