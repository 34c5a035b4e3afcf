//! Log probabilities, in the form of the chat route and in the older one of the completions route.
//!
//! Knows nothing of how they are computed.

use serde::Serialize;
use serde_json::{Map, Value};

/// What OpenAI reports for what has no probability; JSON has no −∞.
const LEAST: f32 = -9999.0;

/// A token, its log probability, and those of its alternatives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    chosen: Candidate,
    top_logprobs: Vec<Candidate>,
}

/// A token that was or could have been chosen.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Candidate {
    /// Its text; bytes that are no character by themselves show as U+FFFD.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Candidate {
    /// A token by its bytes.
    pub(crate) fn new(bytes: Vec<u8>, logprob: f32) -> Self {
        let logprob = if logprob.is_finite() { logprob.max(LEAST) } else { LEAST };
        Self { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    }
}

impl TokenLogprob {
    /// The chosen token and its alternatives, the most likely first.
    pub(crate) fn new(chosen: Candidate, top_logprobs: Vec<Candidate>) -> Self {
        Self { chosen, top_logprobs }
    }
}

/// The completions route's form: one list per property.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Map<String, Value>>,
    text_offset: Vec<usize>,
}

impl LegacyLogprobs {
    /// `offset` is the number of characters of the tokens before these; it is moved behind them.
    pub(crate) fn new(tokens: Vec<TokenLogprob>, offset: &mut usize) -> Self {
        let mut legacy = Self::default();
        for TokenLogprob { chosen, top_logprobs } in tokens {
            legacy.text_offset.push(*offset);
            *offset += chosen.token.chars().count();
            let top = top_logprobs.into_iter().map(|top| (top.token, top.logprob.into()));
            legacy.top_logprobs.push(top.collect());
            legacy.tokens.push(chosen.token);
            legacy.token_logprobs.push(chosen.logprob);
        }
        legacy
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn token(text: &str) -> TokenLogprob {
        let candidate = |text: &str, logprob| Candidate::new(text.as_bytes().to_vec(), logprob);
        TokenLogprob::new(candidate(text, -0.5), vec![candidate(text, -0.5), candidate("x", -2.0)])
    }

    #[test]
    fn a_chat_logprob_has_openais_fields() {
        assert_eq!(
            serde_json::to_value(token("hi")).unwrap(),
            json!({ "token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": [
                { "token": "hi", "logprob": -0.5, "bytes": [104, 105] },
                { "token": "x", "logprob": -2.0, "bytes": [120] },
            ]})
        );
    }

    #[test]
    fn case_17_half_a_character_is_valid_json_with_its_bytes() {
        let half = serde_json::to_value(Candidate::new(vec![0xf0, 0x9f], f32::NEG_INFINITY)).unwrap();
        assert_eq!(half, json!({ "token": "\u{FFFD}", "logprob": -9999.0, "bytes": [240, 159] }));
    }

    #[test]
    fn legacy_offsets_go_on_over_chunks() {
        let mut offset = 0;
        let first = LegacyLogprobs::new(vec![token("hé"), token("!")], &mut offset);
        assert_eq!(first.text_offset, [0, 2]);
        assert_eq!(first.top_logprobs[0]["x"], json!(-2.0));
        assert_eq!(LegacyLogprobs::new(vec![token("a")], &mut offset).text_offset, [3]);
    }
}
