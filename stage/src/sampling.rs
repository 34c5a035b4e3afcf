//! llama.cpp's samplers behind the engine's seam, and beside them the rule by which an emulated replica writes.

use std::path::PathBuf;

use llama::{Model, ModelParams, Sampler, SamplerError, SamplerParams, Vocab, VocabularyFacts};
use protocol::sampling::{Generation, Grammar, GrammarBinding, LogitBias, Sampling};

use crate::emulated::{RuleSampler, TextRule};
use crate::engine::{self, Request, Sample, Sampled, SamplingError, Token, TokenProbability};

/// What a request says about sampling.
#[derive(Debug)]
pub(crate) struct Params {
    sampling: Sampling,
    top_logprobs: Option<u32>,
}

/// What tokens are drawn of. The tokens' text, most of a vocabulary's memory, is read when the first grammar asks for it.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    facts: VocabularyFacts,
    /// The file that has the text.
    path: PathBuf,
    text: Option<Vocab>,
}

impl Vocabulary {
    /// Reads the facts from a slice with a tokenizer.
    pub(crate) fn of(path: PathBuf) -> Result<Self, llama::Error> {
        let facts = Model::load(&path, ModelParams::vocabulary_only())?.vocab().facts();
        Ok(Self { facts, path, text: None })
    }

    pub(crate) fn facts(&self) -> &VocabularyFacts {
        &self.facts
    }

    fn sampler(&mut self, params: &SamplerParams) -> Result<Sampler, SamplerError> {
        let Self { facts, path, text } = self;
        let read = || match text {
            Some(vocab) => Ok(vocab.clone()),
            None => {
                let vocab = Model::load(path, ModelParams::vocabulary_only())?.vocab();
                Ok(text.insert(vocab).clone())
            }
        };
        Sampler::by_facts(facts, read, params)
    }
}

/// Makes samplers: for a model's vocabulary, or by rule.
#[derive(Debug)]
pub(crate) enum StageSampling {
    /// Draws from logits.
    Logits(Vocabulary),
    /// Needs none.
    Rule(TextRule),
}

/// Draws the tokens of one request.
#[derive(Debug)]
pub(crate) enum RequestSampler {
    /// From logits.
    Logits(Box<LogitSampler>),
    /// By rule.
    Rule(RuleSampler),
}

/// llama.cpp's sampler for one request.
#[derive(Debug)]
pub(crate) struct LogitSampler {
    sampler: Sampler,
    top_logprobs: Option<u32>,
}

/// The engine's form of a checked request.
pub(crate) fn request(generation: Generation) -> Request<Params> {
    let Generation { request, prompt, replayed, max_tokens, sampling, top_logprobs, ignore_eos, hand_off } =
        generation;
    Request {
        id: request,
        prompt,
        replayed,
        max_tokens,
        ignore_eos,
        hand_off,
        sampling: Params { sampling, top_logprobs },
    }
}

impl StageSampling {
    /// Size of the vocabulary.
    pub(crate) fn n_vocab(&self) -> u32 {
        match self {
            Self::Logits(vocabulary) => vocabulary.facts.n_tokens,
            Self::Rule(rule) => rule.n_vocab(),
        }
    }
}

impl engine::Sampling for StageSampling {
    type Params = Params;
    type Sampler = RequestSampler;

    fn sampler(
        &mut self,
        params: &Params,
        prompt: &[Token],
        replayed: u32,
    ) -> Result<RequestSampler, SamplingError> {
        match self {
            Self::Logits(vocabulary) => {
                Ok(RequestSampler::Logits(Box::new(LogitSampler::new(vocabulary, params, prompt, replayed)?)))
            }
            Self::Rule(rule) => {
                Ok(RequestSampler::Rule(rule.sampler(&params.sampling, params.top_logprobs)?))
            }
        }
    }

    fn ends_generation(&self, token: Token) -> bool {
        match self {
            Self::Logits(vocabulary) => vocabulary.facts.is_end_of_generation(llama::Token(token)),
            Self::Rule(_) => false,
        }
    }
}

impl Sample for RequestSampler {
    fn sample(&mut self, logits: &[f32], position: u32) -> Result<Sampled, SamplingError> {
        match self {
            Self::Logits(sampler) => Ok(sampler.sample(logits, position)?),
            Self::Rule(sampler) => Ok(sampler.sample(position)),
        }
    }
}

impl LogitSampler {
    fn new(
        vocabulary: &mut Vocabulary,
        params: &Params,
        prompt: &[Token],
        replayed: u32,
    ) -> Result<Self, SamplerError> {
        let tokens: Vec<llama::Token> = prompt.iter().copied().map(llama::Token).collect();
        let (asked, replayed) = tokens.split_at(tokens.len().saturating_sub(replayed as usize));
        let mut sampler = vocabulary.sampler(&sampler_params(&params.sampling))?;
        sampler.accept_prompt(asked)?;
        sampler.replay(replayed)?;
        Ok(Self { sampler, top_logprobs: params.top_logprobs })
    }

    fn sample(&mut self, logits: &[f32], position: u32) -> Result<Sampled, SamplerError> {
        let token = self.sampler.sample(logits, position)?;
        let (logprob, top) = self.probabilities(logits, token)?;
        self.sampler.accept(token)?;
        Ok(Sampled { token: token.0, logprob, top })
    }

    fn probabilities(
        &self,
        logits: &[f32],
        token: llama::Token,
    ) -> Result<(Option<f32>, Vec<TokenProbability>), SamplerError> {
        let Some(n) = self.top_logprobs else { return Ok((None, Vec::new())) };
        let (logprob, top) = llama::logprobs(logits, token, n as usize)?;
        let top = top.into_iter().map(|(token, logprob)| TokenProbability { id: token.0, logprob });
        Ok((Some(logprob), top.collect()))
    }
}

fn sampler_params(sampling: &Sampling) -> SamplerParams {
    SamplerParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        repeat_penalty: sampling.repeat_penalty,
        repeat_last_n: sampling.repeat_last_n,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias: sampling.logit_bias.iter().map(logit_bias).collect(),
        grammar: sampling.grammar.as_ref().map(grammar),
    }
}

fn logit_bias(&LogitBias { token, bias }: &LogitBias) -> llama::LogitBias {
    llama::LogitBias { token: llama::Token(token), bias }
}

fn grammar(Grammar { gbnf, binding, prefill }: &Grammar) -> llama::Grammar {
    let always = llama::Grammar { prefill: prefill.clone(), ..llama::Grammar::new(gbnf.clone()) };
    match binding {
        GrammarBinding::Always => always,
        GrammarBinding::After { patterns, tokens, thinking } => llama::Grammar {
            lazy: true,
            trigger_patterns: patterns.clone(),
            trigger_tokens: tokens.iter().copied().map(llama::Token).collect(),
            thinking: thinking
                .as_ref()
                .map(|tags| llama::ThinkingTags { start: tags.start.clone(), ends: tags.ends.clone() }),
            ..always
        },
    }
}
