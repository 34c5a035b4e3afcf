//! What the command line asks for, read and checked before any server is asked.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use llama::{AddSpecial, Model, ModelParams, Special, Vocab};
use loadgen::{
    ApiKey, Arrivals, CountTokens, Ending, Endpoint, Lengths, Limits, Load, Prompts, Rate, Requests,
    Synthetic, TargetConfig, Trace,
};

use super::{ArrivalsArg, EndpointArg, Fields, ServeArgs};
use crate::cli::Globals;
use crate::commands::model;

/// Requests of a round for each that is under way at once, so that the first and the last matter little.
const REQUESTS_EACH: u64 = 8;

/// And at least so many.
const REQUESTS_AT_LEAST: u64 = 32;

/// Between the first requests of two rounds if their number is not known before.
const APART: u64 = 1 << 32;

/// What is measured.
pub(super) struct Plan {
    /// One or two.
    pub(super) servers: Vec<TargetConfig>,
    pub(super) rounds: u32,
    pub(super) requests: Requests,
    pub(super) load: Load,
    pub(super) ending: Ending,
    /// How many requests before, and how many of them at once.
    pub(super) warm_up: (u64, usize),
    pub(super) limits: Limits,
    pub(super) words: Words,
    /// What the load is called.
    pub(super) kind: LoadKind,
}

/// What the load is, for the report.
#[derive(Debug, Clone, Copy)]
pub(super) enum LoadKind {
    Closed { concurrency: u32 },
    Fixed(Rate),
    Poisson(Rate),
    Trace { requests: u64 },
}

/// How long texts are, for the report.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words {
    /// Of made-up prompts.
    pub(super) prompt_tokens: Option<Lengths>,
    pub(super) max_tokens: Lengths,
}

impl fmt::Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { concurrency } => write!(f, "closed loop, {concurrency} at once"),
            Self::Fixed(rate) => write!(f, "open loop, {rate} at equal intervals"),
            Self::Poisson(rate) => write!(f, "open loop, {rate} at random"),
            Self::Trace { requests } => write!(f, "open loop, a trace of {requests} requests"),
        }
    }
}

impl Plan {
    /// Reads the files that the command line names.
    pub(super) fn new(args: &ServeArgs, globals: &Globals) -> Result<Self> {
        let trace = args.load.trace.as_deref().map(read_trace).transpose()?;
        let prompts = match &args.text.prompts {
            Some(path) => {
                Prompts::parse(&read(path)?).with_context(|| format!("reading {}", path.display()))?
            }
            None => {
                let count =
                    args.text.model.as_deref().map(|name| Vocabulary::load(name, globals)).transpose()?;
                Prompts::Synthetic(Synthetic::new(args.text.prompt_tokens, count))
            }
        };
        let (kind, load) = load(args, trace.as_ref());
        let made_up = args.text.prompts.is_none();
        let at_once = match kind {
            LoadKind::Closed { concurrency } => concurrency,
            _ => 1,
        };
        let (ttft, tpot) = (args.result.slo_ttft_ms, args.result.slo_tpot_ms);
        Ok(Self {
            servers: servers(args),
            rounds: if args.server.vs.is_some() { args.server.rounds } else { 1 },
            load,
            ending: ending(args, kind),
            warm_up: (u64::from(args.load.warmup.unwrap_or(at_once)), at_once as usize),
            limits: Limits { ttft: ttft.map(|limit| limit.0), tpot: tpot.map(|limit| limit.0) },
            words: Words {
                prompt_tokens: made_up.then_some(args.text.prompt_tokens),
                max_tokens: args.text.max_tokens,
            },
            requests: Requests { prompts, max_tokens: args.text.max_tokens, trace, seed: args.load.seed },
            kind,
        })
    }

    /// The index of a round's first request: no two rounds ask the same, lest the second finds its prompts cached.
    pub(super) fn first_of(&self, round: u32) -> u64 {
        let apart = match self.kind {
            // Each round replays it from the start.
            LoadKind::Trace { requests } => requests,
            _ => self.ending.requests.min(APART),
        };
        u64::from(round) * apart
    }

    /// How far a round is, if so many requests have ended and so much time has passed.
    pub(super) fn share(&self, ended: u64, passed: Duration) -> (u64, u64) {
        match self.ending {
            Ending { requests: u64::MAX, after: Some(after) } => {
                let (passed, after) = (passed.as_millis() as u64, after.as_millis() as u64);
                (passed.min(after), after)
            }
            Ending { requests, .. } => (ended, requests),
        }
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

fn read_trace(path: &Path) -> Result<Trace> {
    Trace::parse(&read(path)?).with_context(|| format!("reading {}", path.display()))
}

fn servers(args: &ServeArgs) -> Vec<TargetConfig> {
    let server = &args.server;
    let config = |url: &str, key: &Option<String>, model: &Option<String>| TargetConfig {
        url: url.to_owned(),
        key: key.clone().map(ApiKey::from),
        model: model.clone(),
        endpoint: match server.endpoint {
            EndpointArg::Chat => Endpoint::Chat,
            EndpointArg::Completions => Endpoint::Completions,
        },
        fields: server.body.clone().map(|Fields(fields)| fields).unwrap_or_default(),
        timeout: server.timeout.0,
    };
    let first = config(&args.url, &server.api_key, &server.model_name);
    // A key goes to the server that it is for, and to no other.
    let second = server.vs.as_ref().map(|url| config(url, &server.vs_api_key, &server.vs_model_name));
    [first].into_iter().chain(second).collect()
}

fn load(args: &ServeArgs, trace: Option<&Trace>) -> (LoadKind, Load) {
    match (trace, args.load.rate, args.load.arrivals) {
        (Some(trace), ..) => (LoadKind::Trace { requests: trace.len() }, Load::Open(trace.arrivals())),
        (None, Some(rate), ArrivalsArg::Fixed) => (LoadKind::Fixed(rate), Load::Open(Arrivals::Fixed(rate))),
        (None, Some(rate), ArrivalsArg::Poisson) => {
            (LoadKind::Poisson(rate), Load::Open(Arrivals::Poisson { rate, seed: args.load.seed }))
        }
        (None, None, _) => {
            let concurrency = args.load.concurrency.unwrap_or(1);
            (LoadKind::Closed { concurrency }, Load::Closed { concurrency: concurrency as usize })
        }
    }
}

fn ending(args: &ServeArgs, kind: LoadKind) -> Ending {
    let after = args.load.duration.map(|duration| duration.0);
    let by_default = match kind {
        LoadKind::Trace { requests } => requests,
        _ if after.is_some() => u64::MAX,
        LoadKind::Closed { concurrency } => (u64::from(concurrency) * REQUESTS_EACH).max(REQUESTS_AT_LEAST),
        LoadKind::Fixed(_) | LoadKind::Poisson(_) => REQUESTS_AT_LEAST,
    };
    Ending { requests: args.load.requests.unwrap_or(by_default), after }
}

/// Counts tokens with a model's vocabulary.
struct Vocabulary {
    vocab: Vocab,
}

impl Vocabulary {
    fn load(name: &str, globals: &Globals) -> Result<Arc<dyn CountTokens>> {
        let file = model::open(name, &model::folders(globals)?)?;
        let model =
            Model::load(file.path(), ModelParams::vocabulary_only()).context("loading the vocabulary")?;
        Ok(Arc::new(Self { vocab: model.vocab() }))
    }
}

impl CountTokens for Vocabulary {
    fn count(&self, text: &str) -> usize {
        // What cannot be tokenised has no tokens; made-up prompts are plain words.
        self.vocab.tokenize(text, AddSpecial::No, Special::Text).map_or(0, |tokens| tokens.len())
    }
}
