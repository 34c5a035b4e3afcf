//! A request to generate, checked: NaN, infinite and out-of-range numbers are refused here by name, so that neither
//! the engine nor llama.cpp's samplers ever meet one. Knows nothing of slots or queues; a prompt longer than a slot
//! is the engine's to refuse.

use std::time::Duration;

use cluster::RequestId;
use thiserror::Error;

use crate::hand_off::{HandOff, HandOffError, HeldSlot};
use crate::v1;

/// Longest request id in bytes: a UUID has 36, and the id goes into every log line.
pub const MAX_REQUEST_ID: usize = 256;

/// Most alternatives reported per token: OpenAI's limit of `top_logprobs` is 20.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// Largest grammar in bytes; llama.cpp parses a grammar in time proportional to its length at best.
pub const MAX_GRAMMAR: usize = 1 << 20;

/// Most triggers of a lazy grammar.
pub const MAX_TRIGGERS: usize = 1024;

/// Longest hold of a slot: a hand-off takes seconds, and whoever holds a slot for minutes has forgotten it.
pub const MAX_HOLD_MS: u32 = 10 * 60 * 1000;

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The client's request, for logs.
    pub request: RequestId,
    /// Prompt tokens, at least one, each in the vocabulary.
    pub prompt: Vec<i32>,
    /// Tokens at the prompt's end that an earlier attempt generated; fewer than the prompt has.
    pub replayed: u32,
    /// Tokens to generate at most, at least 1.
    pub max_tokens: u32,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Report each token's log probability, and those of this many alternatives.
    pub top_logprobs: Option<u32>,
    /// Go on past end-of-generation tokens.
    pub ignore_eos: bool,
    /// What it has to do with another replica.
    pub hand_off: HandOff,
}

/// How tokens are chosen; every number finite and in range.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// At least 0; 0 is greedy.
    pub temperature: f32,
    /// `None` is off.
    pub top_k: Option<u32>,
    /// In (0, 1]; 1 is off.
    pub top_p: f32,
    /// In [0, 1]; 0 is off.
    pub min_p: f32,
    /// The draw at a position depends on this and the position alone.
    pub seed: u64,
    /// Above 0; 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that penalties look back on; `None` is the whole context.
    pub repeat_last_n: Option<u32>,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens; −∞ forbids one.
    pub logit_bias: Vec<LogitBias>,
    /// Constrains the text.
    pub grammar: Option<Grammar>,
}

/// An amount added to a token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token: i32,
    /// The amount.
    pub bias: f32,
}

/// A grammar in llama.cpp's GBNF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grammar {
    /// The grammar's text.
    pub gbnf: String,
    /// When it binds.
    pub binding: GrammarBinding,
    /// The end of the prompt, which a grammar that binds always covers too.
    pub prefill: String,
}

/// When a grammar begins to constrain the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrammarBinding {
    /// From the first token.
    Always,
    /// Once the text matches a pattern or one of the tokens was generated.
    After {
        /// Regular expressions over the generated text.
        patterns: Vec<String>,
        /// Tokens.
        tokens: Vec<i32>,
        /// Text in which nothing triggers.
        thinking: Option<ThinkingTags>,
    },
}

/// What a model puts around its reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThinkingTags {
    /// Begins it.
    pub start: String,
    /// Each of these ends it.
    pub ends: Vec<String>,
}

impl Sampling {
    /// The most likely token, always.
    pub const fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repeat_penalty: 1.0,
            repeat_last_n: Some(0),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            grammar: None,
        }
    }
}

/// Why a request cannot be served.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum InvalidRequest {
    #[error("request id has {got} bytes, more than {MAX_REQUEST_ID}")]
    RequestId { got: usize },
    #[error("prompt is empty")]
    EmptyPrompt,
    #[error("{field} names token {token}, outside the vocabulary of {n_vocab}")]
    Token { field: &'static str, token: i32, n_vocab: u32 },
    #[error("{replayed} replayed tokens leave nothing of a prompt of {prompt}")]
    Replayed { replayed: u32, prompt: usize },
    #[error("max_tokens is 0: at least 1 token must be generated")]
    MaxTokens,
    #[error("sampling parameters are missing")]
    NoSampling,
    #[error("{field} is {value}, but must be {wanted}")]
    Number { field: &'static str, value: f64, wanted: &'static str },
    #[error("logit_bias has {got} entries, more than the vocabulary's {n_vocab}")]
    LogitBiasCount { got: usize, n_vocab: u32 },
    #[error("grammar has {got} bytes, more than {MAX_GRAMMAR}")]
    GrammarSize { got: usize },
    #[error("grammar is empty")]
    EmptyGrammar,
    #[error("grammar has {got} triggers, more than {MAX_TRIGGERS}")]
    TriggerCount { got: usize },
    #[error("a lazy grammar without triggers would never bind")]
    NoTrigger,
    #[error("a slot is to be held for {got} ms, more than {MAX_HOLD_MS}")]
    Hold { got: u32 },
    #[error("a request cannot both take a prompt over and hand it off")]
    HoldAndFrom,
    #[error("where the prompt is to be had: {0}")]
    From(#[from] HandOffError),
    #[error("{tokens} tokens of another replica's slot leave nothing of a prompt of {prompt} to compute")]
    NothingLeft { tokens: u32, prompt: usize },
}

impl Generation {
    /// Checks every field against its range and the vocabulary's size.
    pub fn check(wire: v1::GenerateRequest, n_vocab: u32) -> Result<Self, InvalidRequest> {
        if wire.request.len() > MAX_REQUEST_ID {
            return Err(InvalidRequest::RequestId { got: wire.request.len() });
        }
        if wire.prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        check_tokens("prompt", wire.prompt.iter().copied(), n_vocab)?;
        if wire.replayed as usize >= wire.prompt.len() {
            return Err(InvalidRequest::Replayed { replayed: wire.replayed, prompt: wire.prompt.len() });
        }
        if wire.max_tokens == 0 {
            return Err(InvalidRequest::MaxTokens);
        }
        if wire.top_logprobs > MAX_TOP_LOGPROBS {
            return Err(InvalidRequest::Number {
                field: "top_logprobs",
                value: f64::from(wire.top_logprobs),
                wanted: "at most 20",
            });
        }
        let hand_off = check_hand_off(wire.hold_ms, wire.from, wire.prompt.len())?;
        let reported = wire.logprobs || wire.top_logprobs > 0;
        Ok(Self {
            request: RequestId(wire.request),
            prompt: wire.prompt,
            replayed: wire.replayed,
            max_tokens: wire.max_tokens,
            sampling: check_sampling(wire.sampling.ok_or(InvalidRequest::NoSampling)?, n_vocab)?,
            top_logprobs: reported.then_some(wire.top_logprobs),
            ignore_eos: wire.ignore_eos,
            hand_off,
        })
    }
}

fn check_hand_off(
    hold_ms: u32,
    from: Option<v1::HeldSlot>,
    prompt: usize,
) -> Result<HandOff, InvalidRequest> {
    match (hold_ms, from.map(HeldSlot::check).transpose()?) {
        (0, None) => Ok(HandOff::None),
        (0, Some(HeldSlot { tokens, .. })) if tokens as usize >= prompt => {
            Err(InvalidRequest::NothingLeft { tokens, prompt })
        }
        (0, Some(from)) => Ok(HandOff::From(from)),
        (got, _) if got > MAX_HOLD_MS => Err(InvalidRequest::Hold { got }),
        (_, Some(_)) => Err(InvalidRequest::HoldAndFrom),
        (ms, None) => Ok(HandOff::Hold(Duration::from_millis(u64::from(ms)))),
    }
}

fn check_tokens(
    field: &'static str,
    tokens: impl IntoIterator<Item = i32>,
    n_vocab: u32,
) -> Result<(), InvalidRequest> {
    for token in tokens {
        if u32::try_from(token).map_or(true, |id| id >= n_vocab) {
            return Err(InvalidRequest::Token { field, token, n_vocab });
        }
    }
    Ok(())
}

fn check_sampling(wire: v1::Sampling, n_vocab: u32) -> Result<Sampling, InvalidRequest> {
    let any = f32::MIN..=f32::MAX;
    let finite = "finite";
    let number = |field, value: f32, range: &std::ops::RangeInclusive<f32>, wanted| {
        // A NaN is in no range.
        if range.contains(&value) {
            Ok(value)
        } else {
            Err(InvalidRequest::Number { field, value: f64::from(value), wanted })
        }
    };
    let positive = f32::MIN_POSITIVE..=f32::MAX;
    Ok(Sampling {
        temperature: number("temperature", wire.temperature, &(0.0..=f32::MAX), "finite and at least 0")?,
        top_k: check_count("top_k", wire.top_k, 0, "at least 0")?.filter(|&k| k > 0),
        top_p: number("top_p", wire.top_p, &(f32::MIN_POSITIVE..=1.0), "above 0 and at most 1")?,
        min_p: number("min_p", wire.min_p, &(0.0..=1.0), "between 0 and 1")?,
        seed: wire.seed,
        repeat_penalty: number("repeat_penalty", wire.repeat_penalty, &positive, "finite and above 0")?,
        repeat_last_n: check_count("repeat_last_n", wire.repeat_last_n, -1, "at least -1")?,
        presence_penalty: number("presence_penalty", wire.presence_penalty, &any, finite)?,
        frequency_penalty: number("frequency_penalty", wire.frequency_penalty, &any, finite)?,
        logit_bias: check_biases(wire.logit_bias, n_vocab)?,
        grammar: wire.grammar.map(|grammar| check_grammar(grammar, n_vocab)).transpose()?,
    })
}

/// A number of at least `least`, where −1, if allowed, means none.
fn check_count(
    field: &'static str,
    value: i32,
    least: i32,
    wanted: &'static str,
) -> Result<Option<u32>, InvalidRequest> {
    if value < least {
        return Err(InvalidRequest::Number { field, value: f64::from(value), wanted });
    }
    Ok(u32::try_from(value).ok())
}

fn check_biases(biases: Vec<v1::LogitBias>, n_vocab: u32) -> Result<Vec<LogitBias>, InvalidRequest> {
    if biases.len() > n_vocab as usize {
        return Err(InvalidRequest::LogitBiasCount { got: biases.len(), n_vocab });
    }
    check_tokens("logit_bias", biases.iter().map(|bias| bias.token), n_vocab)?;
    biases
        .into_iter()
        .map(|v1::LogitBias { token, bias }| {
            if bias.is_nan() || bias == f32::INFINITY {
                Err(InvalidRequest::Number {
                    field: "logit_bias",
                    value: f64::from(bias),
                    wanted: "finite, or -inf to forbid the token",
                })
            } else {
                Ok(LogitBias { token, bias })
            }
        })
        .collect()
}

fn check_grammar(wire: v1::Grammar, n_vocab: u32) -> Result<Grammar, InvalidRequest> {
    if wire.gbnf.trim().is_empty() {
        return Err(InvalidRequest::EmptyGrammar);
    }
    let tags = wire.thinking.iter().flat_map(|tags| tags.ends.iter().chain([&tags.start]));
    let texts = wire.trigger_patterns.iter().chain(tags).chain([&wire.gbnf, &wire.prefill]);
    let bytes = texts.map(String::len).sum();
    if bytes > MAX_GRAMMAR {
        return Err(InvalidRequest::GrammarSize { got: bytes });
    }
    let triggers = wire.trigger_patterns.len() + wire.trigger_tokens.len();
    if triggers > MAX_TRIGGERS {
        return Err(InvalidRequest::TriggerCount { got: triggers });
    }
    if wire.lazy && triggers == 0 {
        return Err(InvalidRequest::NoTrigger);
    }
    check_tokens("grammar trigger", wire.trigger_tokens.iter().copied(), n_vocab)?;
    let binding = if wire.lazy {
        GrammarBinding::After {
            patterns: wire.trigger_patterns,
            tokens: wire.trigger_tokens,
            thinking: wire.thinking.map(|v1::ThinkingTags { start, ends }| ThinkingTags { start, ends }),
        }
    } else {
        GrammarBinding::Always
    };
    Ok(Grammar { gbnf: wire.gbnf, binding, prefill: wire.prefill })
}

impl From<Generation> for v1::GenerateRequest {
    fn from(generation: Generation) -> Self {
        let (hold_ms, from) = match generation.hand_off {
            HandOff::None => (0, None),
            // Less than a millisecond is none at all.
            HandOff::Hold(time) => (u32::try_from(time.as_millis()).unwrap_or(u32::MAX), None),
            HandOff::From(slot) => (0, Some(slot.into())),
        };
        Self {
            request: generation.request.0,
            prompt: generation.prompt,
            replayed: generation.replayed,
            max_tokens: generation.max_tokens,
            sampling: Some(generation.sampling.into()),
            logprobs: generation.top_logprobs.is_some(),
            top_logprobs: generation.top_logprobs.unwrap_or(0),
            ignore_eos: generation.ignore_eos,
            hold_ms,
            from,
        }
    }
}

impl From<Sampling> for v1::Sampling {
    fn from(sampling: Sampling) -> Self {
        // A count beyond i32 is beyond every vocabulary and context: the same as none.
        let count = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        Self {
            temperature: sampling.temperature,
            top_k: sampling.top_k.map_or(0, count),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            repeat_penalty: sampling.repeat_penalty,
            repeat_last_n: sampling.repeat_last_n.map_or(-1, count),
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling
                .logit_bias
                .into_iter()
                .map(|LogitBias { token, bias }| v1::LogitBias { token, bias })
                .collect(),
            grammar: sampling.grammar.map(Into::into),
        }
    }
}

impl From<Grammar> for v1::Grammar {
    fn from(Grammar { gbnf, binding, prefill }: Grammar) -> Self {
        let always = Self { gbnf, prefill, ..Self::default() };
        match binding {
            GrammarBinding::Always => always,
            GrammarBinding::After { patterns, tokens, thinking } => Self {
                lazy: true,
                trigger_patterns: patterns,
                trigger_tokens: tokens,
                thinking: thinking.map(|ThinkingTags { start, ends }| v1::ThinkingTags { start, ends }),
                ..always
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_VOCAB: u32 = 50;

    fn good() -> v1::GenerateRequest {
        let mut sampling = Sampling::greedy();
        sampling.top_k = Some(40);
        sampling.repeat_last_n = None;
        sampling.logit_bias = vec![LogitBias { token: 3, bias: f32::NEG_INFINITY }];
        sampling.grammar = Some(Grammar {
            gbnf: "root ::= \"a\"".to_owned(),
            binding: GrammarBinding::After {
                patterns: vec!["<tool>".to_owned()],
                tokens: vec![49],
                thinking: Some(ThinkingTags {
                    start: "<think>".to_owned(),
                    ends: vec!["</think>".to_owned()],
                }),
            },
            prefill: "<|assistant|>".to_owned(),
        });
        Generation {
            request: RequestId("r1".to_owned()),
            prompt: vec![0, 49],
            replayed: 1,
            max_tokens: 5,
            sampling,
            top_logprobs: Some(2),
            ignore_eos: true,
            hand_off: HandOff::Hold(Duration::from_millis(20)),
        }
        .into()
    }

    fn refusal(change: impl FnOnce(&mut v1::GenerateRequest)) -> String {
        let mut wire = good();
        change(&mut wire);
        Generation::check(wire, N_VOCAB).unwrap_err().to_string()
    }

    fn sampling_refusal(change: impl FnOnce(&mut v1::Sampling)) -> String {
        refusal(|wire| change(wire.sampling.as_mut().unwrap()))
    }

    #[test]
    fn a_good_request_survives_the_wire() {
        let checked = Generation::check(good(), N_VOCAB).unwrap();
        assert_eq!(v1::GenerateRequest::from(checked), good());
    }

    #[test]
    fn not_a_number_and_infinity_are_refused_everywhere() {
        let fields: [fn(&mut v1::Sampling) -> &mut f32; 6] = [
            |s| &mut s.temperature,
            |s| &mut s.top_p,
            |s| &mut s.min_p,
            |s| &mut s.repeat_penalty,
            |s| &mut s.presence_penalty,
            |s| &mut s.frequency_penalty,
        ];
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for field in fields {
                let message = sampling_refusal(|s| *field(s) = value);
                assert!(message.contains("but must be"), "{message}");
            }
        }
        sampling_refusal(|s| s.logit_bias[0].bias = f32::NAN);
        sampling_refusal(|s| s.logit_bias[0].bias = f32::INFINITY);
    }

    #[test]
    fn a_number_out_of_range_is_refused_by_name() {
        assert_eq!(
            sampling_refusal(|s| s.temperature = -0.5),
            "temperature is -0.5, but must be finite and at least 0"
        );
        for (message, field) in [
            (sampling_refusal(|s| s.top_p = 0.0), "top_p"),
            (sampling_refusal(|s| s.top_p = 1.5), "top_p"),
            (sampling_refusal(|s| s.min_p = -0.1), "min_p"),
            (sampling_refusal(|s| s.repeat_penalty = 0.0), "repeat_penalty"),
            (sampling_refusal(|s| s.top_k = -1), "top_k"),
            (sampling_refusal(|s| s.repeat_last_n = -2), "repeat_last_n"),
            (refusal(|r| r.top_logprobs = 21), "top_logprobs"),
            (refusal(|r| r.max_tokens = 0), "max_tokens"),
        ] {
            assert!(message.starts_with(field), "{message}");
        }
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_refused() {
        for message in [
            refusal(|r| r.prompt.push(50)),
            refusal(|r| r.prompt.push(-1)),
            sampling_refusal(|s| s.logit_bias[0].token = 50),
            sampling_refusal(|s| s.grammar.as_mut().unwrap().trigger_tokens[0] = i32::MIN),
        ] {
            assert!(message.contains("outside the vocabulary of 50"), "{message}");
        }
    }

    #[test]
    fn what_would_be_empty_or_endless_is_refused() {
        assert_eq!(refusal(|r| r.prompt.clear()), "prompt is empty");
        assert!(refusal(|r| r.replayed = 2).contains("2 replayed"));
        assert!(refusal(|r| r.request = "x".repeat(257)).contains("257 bytes"));
        assert!(refusal(|r| r.sampling = None).contains("missing"));
        let grammar =
            |change: fn(&mut v1::Grammar)| sampling_refusal(|s| change(s.grammar.as_mut().unwrap()));
        grammar(|g| g.gbnf = " ".to_owned());
        grammar(|g| g.gbnf = "x".repeat(MAX_GRAMMAR + 1));
        grammar(|g| g.trigger_tokens = vec![1; MAX_TRIGGERS + 1]);
        grammar(|g| {
            g.trigger_tokens.clear();
            g.trigger_patterns.clear();
        });
        sampling_refusal(|s| s.logit_bias = vec![v1::LogitBias { token: 1, bias: 0.0 }; 51]);
    }

    #[test]
    fn a_request_hands_off_or_takes_over_within_limits() {
        let slot = |tokens| v1::HeldSlot { epoch: 1, slot: 2, hold: 3, tokens, chain: Vec::new() };
        assert!(refusal(|r| r.hold_ms = MAX_HOLD_MS + 1).contains("held for 600001 ms"));
        assert!(refusal(|r| r.from = Some(slot(1))).contains("both take a prompt over and hand it off"));
        let from = |tokens| v1::GenerateRequest { hold_ms: 0, from: Some(slot(tokens)), ..good() };
        let refused = |tokens| Generation::check(from(tokens), N_VOCAB).unwrap_err().to_string();
        assert!(refused(2).contains("2 tokens of another replica's slot leave nothing of a prompt of 2"));
        assert!(refused(0).contains("has no tokens"));
        let checked = Generation::check(from(1), N_VOCAB).unwrap();
        assert_eq!(v1::GenerateRequest::from(checked), from(1));
    }
}
