//! From a tokenised prompt and checked parameters to the request that a master gets.
//!
//! Knows nothing of text.

use std::collections::HashSet;

use cluster::RequestId;
use protocol::sampling::{Generation, InvalidRequest};

use super::error::ApiError;
use super::params::Common;
use crate::generation::Prepared;

/// A prompt as tokens.
pub(crate) struct Prompt {
    /// The parameter it came from.
    pub(crate) param: &'static str,
    pub(crate) tokens: Vec<i32>,
    /// Report each token's log probability, and those of this many alternatives.
    pub(crate) top_logprobs: Option<u32>,
}

/// Sizes that a request must keep to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Tokens a slot holds.
    pub(crate) n_ctx: u32,
    /// Tokens of the vocabulary.
    pub(crate) n_vocab: u32,
}

impl Prompt {
    /// Checks the prompt against a slot and the vocabulary, before anything is sent.
    pub(crate) fn prepare(self, common: Common, id: String, bounds: Bounds) -> Result<Prepared, ApiError> {
        let Self { param, tokens, top_logprobs } = self;
        if tokens.is_empty() {
            return Err(ApiError::invalid(param, "the prompt has no tokens"));
        }
        if tokens.len() > bounds.n_ctx as usize {
            return Err(ApiError::ContextLength { param, prompt: tokens.len(), n_ctx: bounds.n_ctx });
        }
        let generation = Generation {
            request: RequestId(id),
            prompt: tokens,
            replayed: 0,
            // The slot's end comes first.
            max_tokens: common.max_tokens.unwrap_or(bounds.n_ctx),
            sampling: common.sampling,
            top_logprobs,
            ignore_eos: common.ignore_eos,
            hand_off: protocol::hand_off::HandOff::None,
        };
        let checked = Generation::check(generation.into(), bounds.n_vocab).map_err(refusal)?;
        Ok(Prepared { request: checked.into(), stops: common.stops, shown: HashSet::new() })
    }
}

fn refusal(error: InvalidRequest) -> ApiError {
    match error {
        InvalidRequest::Token { field, .. } | InvalidRequest::Number { field, .. } => {
            ApiError::invalid(field, error.to_string())
        }
        InvalidRequest::LogitBiasCount { .. } => ApiError::invalid("logit_bias", error.to_string()),
        InvalidRequest::GrammarSize { .. } => ApiError::invalid("grammar", error.to_string()),
        other => ApiError::Refused { reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::openai::fields::Fields;

    fn prepare(tokens: Vec<i32>, body: serde_json::Value) -> Result<Prepared, ApiError> {
        let mut fields = Fields::of(body, "").unwrap();
        let common = Common::take(&mut fields, 8).unwrap();
        let prompt = Prompt { param: "prompt", tokens, top_logprobs: Some(2) };
        prompt.prepare(common, "cmpl-1".into(), Bounds { n_ctx: 8, n_vocab: 50 })
    }

    #[test]
    fn a_request_carries_everything_that_was_asked() {
        let prepared =
            prepare(vec![1, 2], json!({ "max_tokens": 3, "seed": 7, "stop": "x", "ignore_eos": true }))
                .unwrap();
        let request = prepared.request;
        assert_eq!(
            (request.request.as_str(), request.prompt.as_slice(), request.max_tokens),
            ("cmpl-1", &[1, 2][..], 3)
        );
        assert!(request.ignore_eos && request.logprobs && request.top_logprobs == 2);
        assert_eq!(request.sampling.unwrap().seed, 7);
        assert_eq!(prepared.stops, ["x"]);
    }

    #[test]
    fn case_20_a_prompt_longer_than_the_slot_is_refused_before_anything_is_sent() {
        assert!(prepare(vec![1; 8], json!({})).is_ok());
        let error = prepare(vec![1; 9], json!({})).err().unwrap();
        assert_eq!(error, ApiError::ContextLength { param: "prompt", prompt: 9, n_ctx: 8 });
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_refused_by_parameter() {
        assert_eq!(prepare(vec![50], json!({})).err().unwrap().param(), Some("prompt"));
        assert_eq!(prepare(vec![-1], json!({})).err().unwrap().param(), Some("prompt"));
        assert_eq!(
            prepare(vec![1], json!({ "logit_bias": { "50": 1 } })).err().unwrap().param(),
            Some("logit_bias")
        );
        assert_eq!(prepare(vec![], json!({})).err().unwrap().param(), Some("prompt"));
    }

    #[test]
    fn without_a_limit_a_generation_may_fill_the_slot() {
        assert_eq!(prepare(vec![1], json!({})).unwrap().request.max_tokens, 8);
    }
}
