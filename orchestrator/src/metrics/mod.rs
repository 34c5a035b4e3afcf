//! What `/metrics` tells: counters and histograms of requests, kept here as they go by, and what the engine and the stages say of
//! themselves, asked for at each scrape. Names and units are in `docs/metrics.md`.
//!
//! Nothing of a prompt, an answer or a client is in any name or label, and the number of labels is bounded.

mod snapshot;

use std::time::{Duration, Instant};

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

pub(crate) use snapshot::{ReplicaSnapshot, Snapshot};

/// The media type of the answer: OpenMetrics, which Prometheus reads.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Before all names.
const PREFIX: &str = "shoal";

/// Upper bounds in seconds: from a short prompt on a fast host to a long one on a slow host, in a queue.
const FIRST_TOKEN_SECONDS: [f64; 12] = [0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// Upper bounds in seconds: 7 tokens a second is what people read, 1/7 s lies between two of these.
const BETWEEN_TOKENS_SECONDS: [f64; 12] =
    [0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.143, 0.2, 0.3, 0.5, 1.0];

/// Upper bounds in seconds: from a few tokens on one host to a long prompt over 100 Mbit/s.
const HAND_OFF_SECONDS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Everything that is counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    answers: Family<AnswerLabels, Counter>,
    generations: Family<EndLabels, Counter>,
    replays: Counter,
    hand_offs: Family<HandOffLabels, Counter>,
    hand_off_bytes: Counter,
    hand_off_time: Histogram,
    prompt_tokens: Counter,
    cached_prompt_tokens: Counter,
    generated_tokens: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AnswerLabels {
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    end: GenerationEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandOffLabels {
    outcome: HandOffEnd,
}

/// What became of a request whose prompt was computed for another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum HandOffEnd {
    /// The other replica has its KV.
    Moved,
    /// The other replica computed the prompt, because it could not get the KV.
    Failed,
    /// The other replica computed the prompt, because that is faster.
    LeftOut,
    /// Nobody decoded any more, so it went on where it was.
    Stayed,
}

impl EncodeLabelValue for HandOffEnd {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let name = match self {
            Self::Moved => "moved",
            Self::Failed => "failed",
            Self::LeftOut => "left_out",
            Self::Stayed => "stayed",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

/// How a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GenerationEnd {
    /// The model or a stop string ended it.
    Stop,
    /// `max_tokens` or the slot's end.
    Length,
    /// It was refused or lost.
    Failed,
    /// The client went away.
    Cancelled,
}

impl EncodeLabelValue for GenerationEnd {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let name = match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix(PREFIX),
            answers: Family::default(),
            generations: Family::default(),
            replays: Counter::default(),
            hand_offs: Family::default(),
            hand_off_bytes: Counter::default(),
            hand_off_time: Histogram::new(HAND_OFF_SECONDS),
            prompt_tokens: Counter::default(),
            cached_prompt_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            first_token: Histogram::new(FIRST_TOKEN_SECONDS),
            between_tokens: Histogram::new(BETWEEN_TOKENS_SECONDS),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "http_requests",
            "Requests answered, by route and status; a stream counts when it begins",
            self.answers.clone(),
        );
        registry.register(
            "generations",
            "Generations that were asked for, by how they ended",
            self.generations.clone(),
        );
        registry.register(
            "replays",
            "Generations sent again, to the same replica or another, because theirs was lost",
            self.replays.clone(),
        );
        registry.register(
            "hand_offs",
            "Requests whose prompts were computed for another replica, by what became of them",
            self.hand_offs.clone(),
        );
        registry.register_with_unit(
            "hand_off",
            "Keys and values that travelled from one replica to another",
            Unit::Bytes,
            self.hand_off_bytes.clone(),
        );
        registry.register_with_unit(
            "hand_off",
            "From the start of a request on its second replica until its keys and values were there",
            Unit::Seconds,
            self.hand_off_time.clone(),
        );
        registry.register("prompt_tokens", "Tokens of prompts that were started", self.prompt_tokens.clone());
        registry.register(
            "cached_prompt_tokens",
            "Tokens of prompts that were in the cache already",
            self.cached_prompt_tokens.clone(),
        );
        registry.register("generated_tokens", "Tokens received from masters", self.generated_tokens.clone());
        registry.register_with_unit(
            "time_to_first_token",
            "From a request's arrival in the queue until its first token",
            Unit::Seconds,
            self.first_token.clone(),
        );
        registry.register_with_unit(
            "inter_token",
            "From one token of a request to its next",
            Unit::Seconds,
            self.between_tokens.clone(),
        );
    }

    /// An HTTP request was answered.
    pub(crate) fn answered(&self, route: &str, status: u16) {
        self.answers.get_or_create(&AnswerLabels { route: route.to_owned(), status }).inc();
    }

    /// A generation is sent again.
    pub(crate) fn replayed(&self) {
        self.replays.inc();
    }

    /// What became of a request whose prompt was computed for another replica.
    pub(crate) fn handed_off(&self, outcome: HandOffEnd) {
        self.hand_offs.get_or_create(&HandOffLabels { outcome }).inc();
    }

    /// A request's keys and values went from one replica to another.
    pub(crate) fn moved(&self, bytes: u64, took: Duration) {
        self.hand_off_bytes.inc_by(bytes);
        self.hand_off_time.observe(took.as_secs_f64());
    }

    /// A generation has got a slot.
    pub(crate) fn started(&self, prompt_tokens: u32, cached_tokens: u32) {
        self.prompt_tokens.inc_by(u64::from(prompt_tokens));
        self.cached_prompt_tokens.inc_by(u64::from(cached_tokens));
    }

    /// A generation's first token came so long after it was asked for.
    pub(crate) fn first_token(&self, after: Duration) {
        self.generated_tokens.inc();
        self.first_token.observe(after.as_secs_f64());
    }

    /// A further token of a generation came.
    pub(crate) fn next_token(&self, after: Duration) {
        self.generated_tokens.inc();
        self.between_tokens.observe(after.as_secs_f64());
    }

    /// A generation is over.
    pub(crate) fn ended(&self, end: GenerationEnd) {
        self.generations.get_or_create(&EndLabels { end }).inc();
    }

    /// The text of a scrape, with what others said for it.
    pub(crate) fn render(&self, snapshot: Snapshot) -> Result<String, std::fmt::Error> {
        let mut asked = Registry::with_prefix(PREFIX);
        asked.register_collector(Box::new(snapshot));
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &asked)?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// Times the tokens of one generation.
#[derive(Debug)]
pub(crate) struct TokenClock {
    asked: Instant,
    last: Option<Instant>,
}

impl TokenClock {
    /// It was asked for just now.
    pub(crate) fn start() -> Self {
        Self { asked: Instant::now(), last: None }
    }

    /// A token came just now.
    pub(crate) fn tick(&mut self, metrics: &Metrics) {
        let now = Instant::now();
        match self.last {
            None => metrics.first_token(now.saturating_duration_since(self.asked)),
            Some(last) => metrics.next_token(now.saturating_duration_since(last)),
        }
        self.last = Some(now);
    }
}
