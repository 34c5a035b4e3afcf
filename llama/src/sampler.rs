//! Chooses the next token from logits, as llama-server's default chain does (common/sampling.cpp): logit bias,
//! penalties, top-k, top-p, min-p, temperature, draw; a grammar is asked about the chosen token first and masks the
//! vocabulary only if it refuses that one.
//!
//! The draw at a position depends on (seed, position) alone, on every platform, so that another replica can continue
//! a text. Top-k, top-p, min-p, temperature and the grammar are llama.cpp's. Bias and penalties do llama.cpp's
//! arithmetic here, on the few tokens they touch instead of on the whole vocabulary, and the draw is here because
//! llama.cpp's has a state and differs between C++ libraries.

mod chain;
mod draw;
mod logits;
mod penalties;

use std::cell::RefCell;

use llama_sys as sys;

use crate::grammar::{Constraint, Grammar, GrammarError};
use crate::shim::{ShimError, ShimErrorKind};
use crate::{Error, Token, Vocab, VocabularyFacts};

use chain::Chain;
use penalties::Penalties;

pub use logits::logprobs;

/// Below this, a temperature is greedy: dividing by it could overflow.
const MIN_TEMPERATURE: f32 = 1e-5;

/// How tokens are chosen. The defaults are llama-server's (common/common.h, `common_params_sampling`).
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// Divides the logits; 0 (or less than 0.00001) chooses the most likely token.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; `None` or 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the most likely one's probability; 0 keeps all.
    pub min_p: f32,
    /// Which draws are made.
    pub seed: u64,
    /// Divides positive and multiplies negative logits of tokens seen; 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that all penalties look back on, prompt included; `None` is all of them, 0 turns penalties off.
    pub repeat_last_n: Option<u32>,
    /// Taken from the logits of tokens seen; 0 is off.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens seen, as often as they were seen; 0 is off.
    pub frequency_penalty: f32,
    /// Added to tokens' logits.
    pub logit_bias: Vec<LogitBias>,
    /// Constrains the text.
    pub grammar: Option<Grammar>,
}

/// An amount added to a token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token: Token,
    /// The amount; −∞ forbids the token.
    pub bias: f32,
}

impl Default for SamplerParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: Some(40),
            top_p: 0.95,
            min_p: 0.05,
            seed: 0,
            repeat_penalty: 1.0,
            repeat_last_n: Some(64),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            grammar: None,
        }
    }
}

impl SamplerParams {
    /// The most likely token, always.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    fn check(&self, n_vocab: u32) -> Result<(), SamplerError> {
        let number = |field, value: f32, range: std::ops::RangeInclusive<f32>, wanted| {
            // A NaN is in no range.
            if range.contains(&value) { Ok(()) } else { Err(SamplerError::Param { field, value, wanted }) }
        };
        number("temperature", self.temperature, f32::MIN..=f32::MAX, "finite")?;
        number("top_p", self.top_p, 0.0..=1.0, "between 0 and 1")?;
        number("min_p", self.min_p, 0.0..=1.0, "between 0 and 1")?;
        number("repeat_penalty", self.repeat_penalty, 1e-3..=1e3, "between 0.001 and 1000")?;
        number("presence_penalty", self.presence_penalty, -1e4..=1e4, "between -10000 and 10000")?;
        number("frequency_penalty", self.frequency_penalty, -1e4..=1e4, "between -10000 and 10000")?;
        for LogitBias { token, bias } in &self.logit_bias {
            check_token(*token, n_vocab)?;
            if *bias != f32::NEG_INFINITY {
                number(
                    "logit_bias",
                    *bias,
                    -1e4..=1e4,
                    "between -10000 and 10000, or -inf to forbid the token",
                )?;
            }
        }
        Ok(())
    }
}

fn check_token(token: Token, n_vocab: u32) -> Result<(), SamplerError> {
    if u32::try_from(token.0).is_ok_and(|id| id < n_vocab) {
        Ok(())
    } else {
        Err(SamplerError::Token { token, n_vocab })
    }
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A parameter is out of its range.
    #[error("{field} is {value}, but must be {wanted}")]
    Param {
        /// The parameter.
        field: &'static str,
        /// What it is.
        value: f32,
        /// What it may be.
        wanted: &'static str,
    },
    /// A token that the vocabulary lacks.
    #[error("token {} is outside the vocabulary of {n_vocab}", token.0)]
    Token {
        /// The token.
        token: Token,
        /// Tokens in the vocabulary.
        n_vocab: u32,
    },
    /// The grammar cannot be used.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Not one logit for each token.
    #[error("{got} logits for a vocabulary of {n_vocab}")]
    LogitCount {
        /// Logits given.
        got: usize,
        /// Tokens in the vocabulary.
        n_vocab: u32,
    },
    /// The model computed something that is no logit.
    #[error("the logit of token {} is {value}", token.0)]
    BadLogit {
        /// The first such token.
        token: Token,
        /// NaN, +∞ or beyond 1e30.
        value: f32,
    },
    /// The grammar and the biases leave no token.
    #[error("no token is allowed at position {position}")]
    NothingAllowed {
        /// Position of the token to choose.
        position: u32,
    },
    /// A token that the grammar does not allow was to be accepted.
    #[error("token {} cannot be accepted: {reason}", token.0)]
    NotAllowed {
        /// The token.
        token: Token,
        /// The grammar's reason.
        reason: String,
    },
    /// llama.cpp's samplers failed.
    #[error("sampling failed: {reason}")]
    Failed {
        /// Its message.
        reason: String,
    },
}

impl From<ShimError> for SamplerError {
    fn from(error: ShimError) -> Self {
        match error.kind {
            ShimErrorKind::OutOfMemory => Self::Failed { reason: "out of memory".to_owned() },
            ShimErrorKind::Refused => Self::Failed { reason: error.message },
        }
    }
}

/// Chooses the tokens of one sequence. Its memory is what was accepted: penalties and the grammar's state.
#[derive(Debug)]
pub struct Sampler {
    n_vocab: u32,
    seed: u64,
    /// Biases of the request and of the model (`tokenizer.ggml.suppress_tokens`).
    biases: Vec<LogitBias>,
    penalties: Option<Penalties>,
    /// `None` is greedy.
    chain: Option<Chain>,
    constraint: Option<Constraint>,
}

/// As long as the vocabulary, and kept for its memory.
#[derive(Default)]
struct Scratch {
    /// The logits after biases and penalties.
    adjusted: Vec<f32>,
    candidates: Vec<sys::llama_token_data>,
}

thread_local! {
    /// The samplers of a thread work one after the other, so one does for all of them.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Sampler {
    /// A sampler that has accepted nothing yet, but the grammar's [`prefill`](Grammar::prefill).
    pub fn new(vocab: &Vocab, params: &SamplerParams) -> Result<Self, SamplerError> {
        Self::build((vocab.n_tokens(), &vocab.suppressed()), || Ok(vocab.clone()), params)
    }

    /// As [`new`](Self::new), where the vocabulary is at hand only if it is asked for: a grammar needs its text.
    pub fn by_facts(
        facts: &VocabularyFacts,
        vocab: impl FnOnce() -> Result<Vocab, Error>,
        params: &SamplerParams,
    ) -> Result<Self, SamplerError> {
        Self::build((facts.n_tokens, &facts.suppressed), vocab, params)
    }

    fn build(
        (n_vocab, suppressed): (u32, &[Token]),
        vocab: impl FnOnce() -> Result<Vocab, Error>,
        params: &SamplerParams,
    ) -> Result<Self, SamplerError> {
        params.check(n_vocab)?;
        let mut biases = params.logit_bias.clone();
        let never = |token: &Token| LogitBias { token: *token, bias: f32::NEG_INFINITY };
        biases.extend(suppressed.iter().map(never));
        let constraint = match &params.grammar {
            None => None,
            Some(grammar) => {
                let vocab = vocab().map_err(|error| SamplerError::Failed { reason: error.to_string() })?;
                Some(Constraint::new(&vocab, grammar)?)
            }
        };
        let is_greedy = params.temperature < MIN_TEMPERATURE;
        Ok(Self {
            n_vocab,
            seed: params.seed,
            biases,
            penalties: Penalties::new(params),
            chain: if is_greedy { None } else { Some(Chain::new(params)?) },
            constraint,
        })
    }

    /// The token at `position`, from the `[n_vocab]` logits of the token before it. Changes nothing that a later call
    /// could notice: accept the token to go on.
    pub fn sample(&mut self, logits: &[f32], position: u32) -> Result<Token, SamplerError> {
        if logits.len() != self.n_vocab as usize {
            return Err(SamplerError::LogitCount { got: logits.len(), n_vocab: self.n_vocab });
        }
        let max = logits::max(logits)?;
        let is_adjusted =
            !self.biases.is_empty() || self.penalties.as_ref().is_some_and(Penalties::is_active);
        SCRATCH.with_borrow_mut(|Scratch { adjusted, candidates }| {
            if !is_adjusted {
                return self.choose(logits, max, position, candidates);
            }
            self.adjust(logits, adjusted);
            let max = logits::max(adjusted)?;
            self.choose(adjusted, max, position, candidates)
        })
    }

    /// Moves on by a generated token.
    pub fn accept(&mut self, token: Token) -> Result<(), SamplerError> {
        check_token(token, self.n_vocab)?;
        if let Some(constraint) = &mut self.constraint {
            constraint
                .accept(token)
                .map_err(|error| SamplerError::NotAllowed { token, reason: error.message })?;
        }
        if let Some(penalties) = &mut self.penalties {
            penalties.accept(token);
        }
        Ok(())
    }

    /// Lets the penalties see a prompt. The grammar does not: it covers the answer.
    pub fn accept_prompt(&mut self, prompt: &[Token]) -> Result<(), SamplerError> {
        prompt.iter().try_for_each(|token| check_token(*token, self.n_vocab))?;
        if let Some(penalties) = &mut self.penalties {
            prompt.iter().for_each(|token| penalties.accept(*token));
        }
        Ok(())
    }

    /// Accepts what an earlier attempt at the same answer generated.
    pub fn replay(&mut self, tokens: &[Token]) -> Result<(), SamplerError> {
        tokens.iter().try_for_each(|token| self.accept(*token))
    }

    fn adjust(&self, logits: &[f32], adjusted: &mut Vec<f32>) {
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        for LogitBias { token, bias } in &self.biases {
            // Tokens were checked against the vocabulary, whose size the logits have.
            adjusted[token.0 as usize] += bias;
        }
        if let Some(penalties) = &self.penalties {
            penalties.apply(adjusted);
        }
    }

    fn choose(
        &mut self,
        logits: &[f32],
        max: f32,
        position: u32,
        candidates: &mut Vec<sys::llama_token_data>,
    ) -> Result<Token, SamplerError> {
        let nothing = SamplerError::NothingAllowed { position };
        if max == f32::NEG_INFINITY {
            return Err(nothing);
        }
        let token = match &mut self.chain {
            None => logits::first_of(logits, max),
            Some(chain) => {
                logits::fill(logits, candidates);
                chain.draw(candidates, draw::uniform(self.seed, position))?
            }
        };
        let Some(constraint) = &self.constraint else { return token.ok_or(nothing) };
        match token {
            Some(token) if constraint.allows(token)? => return Ok(token),
            _ => {}
        }
        logits::fill(logits, candidates);
        constraint.mask(candidates)?;
        candidates.retain(|candidate| candidate.logit > f32::NEG_INFINITY);
        match &mut self.chain {
            None => Ok(draw::most_likely(candidates)),
            Some(chain) => chain.draw(candidates, draw::uniform(self.seed, position)),
        }?
        .ok_or(nothing)
    }
}
