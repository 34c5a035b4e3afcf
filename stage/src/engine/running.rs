//! One request's life: from its ticket, over its prompt, token by token, to its last event.
//!
//! It knows its own phase and nothing of frames, other requests or who comes next.

use std::error::Error;
use std::time::Duration;

use cluster::{RequestId, SlotId};
use protocol::hand_off::HandOff;

use super::events::{Closed, Event, EventSink, FailureKind, FinishReason, Finished, GeneratedToken};
use super::limits::EngineLimits;
use super::request::{RequestKey, Token};
use super::sampling::{Sample, Sampled};

/// An admitted request, with all it needs to run. `M` is its sampler, `E` its event sink.
#[derive(Debug)]
pub(super) struct Ticket<M, E> {
    pub(super) key: RequestKey,
    pub(super) id: RequestId,
    pub(super) prompt: Vec<Token>,
    pub(super) max_tokens: u32,
    pub(super) ignore_eos: bool,
    pub(super) hand_off: HandOff,
    pub(super) sampler: M,
    pub(super) events: E,
}

/// A request that has a slot.
#[derive(Debug)]
pub(super) struct Running<M, E> {
    pub(super) ticket: Ticket<M, E>,
    pub(super) slot: SlotId,
    pub(super) phase: Phase,
    generated: u32,
    pub(super) started: Duration,
    first_token: Option<Duration>,
}

/// What it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Prompt tokens `..sent` are in the slot or under way. With all of them sent: for the last one's logits.
    Prefill { sent: usize },
    /// For a place in a decode frame, to send this token.
    Ready { token: Token },
    /// For the logits of the token that it sent.
    InFlight,
    /// For the keys and values of its prompt's beginning. The slot holds the first `cached` tokens.
    TakingOver { cached: usize, stage: TakeOver },
    /// For another replica, until then, to take its sequence over.
    Held { until: Duration },
}

/// How far taking over is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TakeOver {
    /// Nobody has been asked to begin: rows of the slot's last request may be under way.
    Due,
    /// Stages may be writing to the slot.
    Begun,
    /// They may, and the request is no more.
    Abandoned,
}

/// What a row's logits led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advance {
    /// A token waits to be sent.
    Ready,
    /// The request holds its slot for another replica.
    Held,
    /// The request is over and has had its last event.
    Over,
}

impl<M, E> Ticket<M, E> {
    /// Sends the last event.
    pub(super) fn fail(mut self, kind: FailureKind, message: &str)
    where
        E: EventSink,
    {
        // Nobody may listen any more; then nobody misses it.
        let _ = self.events.send(Event::Failed { kind, message: message.to_owned() });
    }
}

impl<M: Sample, E: EventSink> Running<M, E> {
    /// Starts a request in a slot that holds its first `cached` prompt tokens.
    pub(super) fn start(
        mut ticket: Ticket<M, E>,
        slot: SlotId,
        cached: usize,
        now: Duration,
    ) -> Result<Self, Closed> {
        assert!(cached < ticket.prompt.len(), "{}: a prompt token is left to compute", ticket.id);
        ticket.events.send(Event::Started { slot, cached: cached as u32 })?;
        let phase = match &ticket.hand_off {
            // What the slot holds is all that would be taken over.
            HandOff::From(from) if cached < from.tokens as usize => {
                Phase::TakingOver { cached, stage: TakeOver::Due }
            }
            HandOff::None | HandOff::Hold(_) | HandOff::From(_) => Phase::Prefill { sent: cached },
        };
        Ok(Self { ticket, slot, phase, generated: 0, started: now, first_token: None })
    }

    pub(super) fn key(&self) -> RequestKey {
        self.ticket.key
    }

    pub(super) fn id(&self) -> &RequestId {
        &self.ticket.id
    }

    pub(super) fn slot(&self) -> SlotId {
        self.slot
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Tokens drawn and reported.
    pub(super) fn generated(&self) -> u32 {
        self.generated
    }

    /// Whether it is past its prompt.
    pub(super) fn is_decoding(&self) -> bool {
        matches!(self.phase, Phase::Ready { .. } | Phase::InFlight)
    }

    /// Prompt tokens not yet sent.
    pub(super) fn unsent(&self) -> usize {
        match self.phase {
            Phase::Prefill { sent } => self.ticket.prompt.len() - sent,
            Phase::Ready { .. } | Phase::InFlight | Phase::TakingOver { .. } | Phase::Held { .. } => 0,
        }
    }

    /// Hands out the next `rows` prompt tokens, with the first one's position.
    pub(super) fn send_prompt(&mut self, rows: usize) -> (usize, &[Token]) {
        let Phase::Prefill { sent } = self.phase else {
            unreachable!("{} is in {:?}, not in prefill", self.ticket.id, self.phase)
        };
        let end = sent + rows;
        assert!(end <= self.ticket.prompt.len(), "{}: the prompt has {rows} more rows", self.id());
        self.phase = Phase::Prefill { sent: end };
        (sent, &self.ticket.prompt[sent..end])
    }

    /// Hands out the token that waits to be sent, with its position.
    pub(super) fn send_token(&mut self) -> (usize, Token) {
        let Phase::Ready { token } = self.phase else {
            unreachable!("{} is in {:?}, it has no token to send", self.ticket.id, self.phase)
        };
        self.phase = Phase::InFlight;
        (self.next_position() - 1, token)
    }

    /// Position of the token that is drawn next.
    fn next_position(&self) -> usize {
        self.ticket.prompt.len() + self.generated as usize
    }

    /// Draws the next token from the logits of the row that was waited for.
    pub(super) fn advance(
        &mut self,
        logits: Option<&[f32]>,
        ends_generation: impl FnOnce(Token) -> bool,
        limits: &EngineLimits,
        now: Duration,
    ) -> Advance {
        assert!(
            matches!(self.phase, Phase::InFlight | Phase::Prefill { .. }) && self.unsent() == 0,
            "{} is in {:?}, it waits for no logits",
            self.ticket.id,
            self.phase
        );
        let position = self.next_position() as u32;
        let sampled = match self.draw(logits, position, limits.n_vocab) {
            Ok(sampled) => sampled,
            Err(message) => return self.fail(message),
        };
        self.first_token.get_or_insert(now);
        let token = sampled.token;
        if !self.ticket.ignore_eos && ends_generation(token) {
            return self.finish(FinishReason::Stop, now);
        }
        self.generated += 1;
        let Sampled { token: id, logprob, top } = sampled;
        let news = Event::Token(GeneratedToken { id, position, logprob, top });
        if self.ticket.events.send(news).is_err() {
            return Advance::Over;
        }
        // The token at position n_ctx was drawn, but the slot has no place to send it to.
        if self.generated == self.ticket.max_tokens || position == limits.n_ctx {
            return self.finish(FinishReason::Length, now);
        }
        if let HandOff::Hold(time) = self.ticket.hand_off {
            return self.hold(now + time);
        }
        self.phase = Phase::Ready { token };
        Advance::Ready
    }

    /// Ends it for a reason outside it.
    pub(super) fn abort(self, kind: FailureKind, message: &str) {
        self.ticket.fail(kind, message);
    }

    fn draw(&mut self, logits: Option<&[f32]>, position: u32, n_vocab: u32) -> Result<Sampled, String> {
        let Some(logits) = logits else {
            return Err(format!("the last stage gave no logits for position {position}"));
        };
        match self.ticket.sampler.sample(logits, position) {
            Ok(sampled) if u32::try_from(sampled.token).is_ok_and(|id| id < n_vocab) => Ok(sampled),
            Ok(sampled) => Err(format!(
                "the sampler drew {} for position {position}, the vocabulary's ids are 0 to {}",
                sampled.token,
                n_vocab - 1
            )),
            Err(error) => Err(format!(
                "drawing the token at position {position} failed: {}",
                with_causes(error.as_ref())
            )),
        }
    }

    fn fail(&mut self, message: String) -> Advance {
        let failed = Event::Failed { kind: FailureKind::Internal, message };
        // Over either way.
        let _ = self.ticket.events.send(failed);
        Advance::Over
    }

    pub(super) fn finish(&mut self, reason: FinishReason, now: Duration) -> Advance {
        let first_token = self.first_token.unwrap_or(now);
        let finished = Finished {
            reason,
            prompt_tokens: self.ticket.prompt.len() as u32,
            generated_tokens: self.generated,
            prefill: first_token.saturating_sub(self.started),
            decode: now.saturating_sub(first_token),
        };
        // Over either way.
        let _ = self.ticket.events.send(Event::Finished(finished));
        Advance::Over
    }
}

/// An error and all it came from, since the wire carries one text.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
