//! One generation under way: from tokens to pieces of text, and what it came to.
//!
//! Knows nothing of the shape of answers, nor of where its tokens come from. Dropping it cancels the request on every stage, so whoever holds it need
//! not do anything when the client goes away, wherever the request is then: in the queue, in prefill or in decode.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::v1;
use protocol::v1::generate_event::Event;

use crate::app::{Admission, App};
use crate::demand::RunningAnswer;
use crate::dispatch::Expected;
use crate::metrics::{GenerationEnd, Metrics, TokenClock};
use crate::model::{Control, TextModel};
use crate::openai::{ApiError, Candidate, Spent, Timings, TokenLogprob, Usage};
use crate::source::Source;
use crate::text::{self, TextStream};

/// A request, ready to be sent to a master, and how to read its answer.
pub(crate) struct Prepared {
    /// For the master.
    pub(crate) request: v1::GenerateRequest,
    /// The text ends before the first of these.
    pub(crate) stops: Vec<String>,
    /// Control tokens that are part of the text, since the parser of the answer looks for them.
    pub(crate) shown: HashSet<i32>,
}

/// A piece of the answer's text, and its tokens' log probabilities where they were asked for.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprob>,
}

/// A step of a generation.
#[derive(Debug)]
pub(crate) enum Progress {
    /// More follows.
    Piece(Piece),
    /// Nothing follows.
    Last(Piece, Outcome),
}

/// What a generation came to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) end: End,
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The model ended its answer, or a stop string did.
    Stopped,
    /// `max_tokens` or the slot's end.
    Full,
}

/// A generation under way.
pub(crate) struct Generation {
    source: Source,
    /// Received before the client was answered.
    first: Option<Event>,
    text: TextStream<TokenLogprob>,
    shown: HashSet<i32>,
    model: Arc<TextModel>,
    journal: Journal,
    expected: Expected,
    _place: Admission,
}

/// What is counted on the way.
#[derive(Debug)]
struct Journal {
    request: String,
    prompt: u32,
    cached: u32,
    generated: u32,
    sent: Instant,
    started: Option<Instant>,
    /// Where it started.
    replica: Option<usize>,
    first_token: Option<Instant>,
    clock: TokenClock,
    metrics: Arc<Metrics>,
    /// Counts for what is asked for, once it was let in.
    answer: Option<RunningAnswer>,
    is_closed: bool,
}

impl Generation {
    /// Takes a place in the queue. If that is a slot, sends the request and waits for the master's first word, so that a refusal
    /// still becomes an HTTP status; one that has to wait is answered at once, with a stream that begins later.
    pub(crate) async fn start(
        app: &Arc<App>,
        model: Arc<TextModel>,
        prepared: Prepared,
        place: Admission,
    ) -> Result<Self, ApiError> {
        let Prepared { request, stops, shown } = prepared;
        let mut journal = Journal::new(&request, Arc::clone(&app.metrics));
        let source = Source::start(app, request).inspect_err(|error| journal.fail(error))?;
        journal.answer = Some(app.fleet.meter().arrived(journal.prompt));
        let mut generation = Self {
            expected: source.expected(),
            source,
            first: None,
            text: TextStream::new(stops),
            shown,
            model,
            journal,
            _place: place,
        };
        if generation.source.has_slot() {
            generation.first = Some(generation.receive().await?);
        }
        Ok(generation)
    }

    /// How long it was predicted to wait, and behind whom, when it came.
    pub(crate) fn expected(&self) -> Expected {
        self.expected
    }

    /// The next piece of text that is not empty, or the last.
    pub(crate) async fn next(&mut self) -> Result<Progress, ApiError> {
        loop {
            let event = match self.first.take() {
                Some(first) => first,
                None => self.receive().await?,
            };
            match event {
                Event::Queued(queued) => {
                    tracing::debug!(request = self.journal.request, position = queued.position, "queued");
                }
                Event::Started(started) => self.journal.start(&started, self.source.replica()),
                Event::Token(token) => {
                    let piece = self.token(&token)?;
                    if let Some(stop) = &piece.stopped_by {
                        tracing::trace!(bytes = stop.len(), "a stop string was completed");
                        return Ok(self.stop(piece.into()));
                    }
                    let piece = Piece::from(piece);
                    if !piece.text.is_empty() || !piece.logprobs.is_empty() {
                        return Ok(Progress::Piece(piece));
                    }
                }
                // The source deals with these.
                Event::Held(_) | Event::HandedOver(_) => {}
                Event::Finished(finished) => return Ok(self.finish(finished)),
                // Already an error where it was received.
                Event::Failed(failed) => return Err(ApiError::Engine { reason: failed.message }),
            }
        }
    }

    async fn receive(&mut self) -> Result<Event, ApiError> {
        let received = self.source.next().await;
        received.inspect_err(|error| self.journal.fail(error))
    }

    fn token(&mut self, token: &v1::GeneratedToken) -> Result<text::Piece<TokenLogprob>, ApiError> {
        self.journal.count();
        let control = if self.shown.contains(&token.id) { Control::Shown } else { Control::Hidden };
        let bytes = self.model.token_bytes(token.id, control)?;
        let logprob = token.logprob.map(|logprob| self.logprob(token, logprob)).transpose()?;
        Ok(self.text.push(&bytes, logprob))
    }

    fn logprob(&self, token: &v1::GeneratedToken, logprob: f32) -> Result<TokenLogprob, ApiError> {
        let candidate = |id, logprob| {
            let bytes = self.model.token_bytes(id, Control::Shown)?;
            Ok(Candidate::new(bytes, logprob))
        };
        let top =
            token.top.iter().map(|top| candidate(top.id, top.logprob)).collect::<Result<_, ApiError>>()?;
        Ok(TokenLogprob::new(candidate(token.id, logprob)?, top))
    }

    /// A stop string ends the generation before the master does.
    fn stop(&mut self, last: Piece) -> Progress {
        self.source.end();
        let Journal { prompt, cached, generated, .. } = self.journal;
        let usage = Usage::new(prompt, cached, generated);
        let timings = Timings::new(usage, self.journal.spent());
        self.last(last, Outcome { end: End::Stopped, usage, timings })
    }

    fn finish(&mut self, finished: v1::Finished) -> Progress {
        let rest = self.text.finish();
        let end = match finished.reason() {
            v1::FinishReason::Length => End::Full,
            v1::FinishReason::Stop
            | v1::FinishReason::Unspecified
            | v1::FinishReason::HandedOff
            | v1::FinishReason::HoldExpired => End::Stopped,
        };
        let Journal { prompt, cached, .. } = self.journal;
        let usage = Usage::new(prompt, cached, finished.generated_tokens);
        let seen = self.journal.spent();
        // The master's clock is nearer to the work; when the request began to wait, it does not tell. Nor does one of several
        // masters know of the others.
        let spent = if self.source.was_disturbed() {
            seen
        } else {
            Spent { prefill: finished.prefill_ms, decode: finished.decode_ms, ..seen }
        };
        let timings = Timings::new(usage, spent);
        self.last(rest.into(), Outcome { end, usage, timings })
    }

    fn last(&mut self, piece: Piece, outcome: Outcome) -> Progress {
        self.journal.close(&outcome);
        Progress::Last(piece, outcome)
    }
}

impl From<text::Piece<TokenLogprob>> for Piece {
    fn from(piece: text::Piece<TokenLogprob>) -> Self {
        Self { text: piece.text, logprobs: piece.tokens }
    }
}

impl Journal {
    fn new(request: &v1::GenerateRequest, metrics: Arc<Metrics>) -> Self {
        Self {
            request: request.request.clone(),
            // A prompt that fits a slot has fewer tokens than that.
            prompt: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            cached: 0,
            generated: 0,
            sent: Instant::now(),
            started: None,
            replica: None,
            first_token: None,
            clock: TokenClock::start(),
            metrics,
            answer: None,
            is_closed: false,
        }
    }

    /// What came to pass when it was sent again is no news to the client.
    fn start(&mut self, started: &v1::Started, replica: Option<usize>) {
        if self.started.is_some() {
            return;
        }
        self.cached = started.cached_tokens;
        self.replica = replica;
        self.started = Some(Instant::now());
        self.metrics.started(self.prompt, self.cached);
    }

    fn count(&mut self) {
        self.generated = self.generated.saturating_add(1);
        if let Some(answer) = &self.answer {
            answer.token();
        }
        self.first_token.get_or_insert_with(Instant::now);
        self.clock.tick(&self.metrics);
    }

    /// As seen from here.
    fn spent(&self) -> Spent {
        let started = self.started.unwrap_or(self.sent);
        let first = self.first_token.unwrap_or(started);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Spent {
            queue: ms(started - self.sent),
            prefill: ms(first - started),
            decode: ms(first.elapsed()),
            replica: self.replica,
        }
    }

    fn close(&mut self, outcome: &Outcome) {
        self.is_closed = true;
        self.metrics.ended(match outcome.end {
            End::Stopped => GenerationEnd::Stop,
            End::Full => GenerationEnd::Length,
        });
        tracing::info!(
            request = self.request,
            end = ?outcome.end,
            prompt_tokens = outcome.usage.prompt_tokens(),
            cached_tokens = self.cached,
            completion_tokens = outcome.usage.completion_tokens(),
            total_ms = self.sent.elapsed().as_millis(),
            "answered"
        );
    }

    fn fail(&mut self, error: &ApiError) {
        self.is_closed = true;
        self.metrics.ended(GenerationEnd::Failed);
        let (_, code) = error.status_and_code();
        tracing::warn!(request = self.request, code, generated = self.generated, "ended early");
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.is_closed {
            self.metrics.ended(GenerationEnd::Cancelled);
            tracing::info!(
                request = self.request,
                generated = self.generated,
                "cancelled: the client went away"
            );
        }
    }
}
