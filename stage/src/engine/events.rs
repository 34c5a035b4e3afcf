//! What the engine tells the one who asked.
//!
//! An admitted request gets `Queued` any number of times, then `Started`, `HandedOver` if it takes a prompt over, then tokens,
//! `Held` if it hands off, and last exactly one of
//! `Finished` and `Failed`; a cancelled one just stops getting any.

use std::time::Duration;

use cluster::SlotId;

use super::request::{RequestKey, Token};

/// News of one request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It waits for a slot; sent again whenever the position changes.
    Queued {
        /// Requests ahead of it.
        position: u32,
    },
    /// It has a slot.
    Started {
        /// The slot.
        slot: SlotId,
        /// Prompt tokens that the slot's KV already covers.
        cached: u32,
    },
    /// A token was drawn.
    Token(GeneratedToken),
    /// Its slot is held, after the first token.
    Held {
        /// The slot.
        slot: SlotId,
        /// Tells this hold from later ones.
        hold: RequestKey,
        /// Tokens that the slot holds.
        tokens: u32,
    },
    /// The beginning of its prompt was to be taken over, and was or was not.
    HandedOver(HandedOver),
    /// It is over, as asked.
    Finished(Finished),
    /// It is over before its end.
    Failed {
        /// Whose fault it is.
        kind: FailureKind,
        /// What happened.
        message: String,
    },
}

/// How a request came by the keys and values of its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct HandedOver {
    /// Prompt tokens that need no computing.
    pub tokens: u32,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Since the request had its slot.
    pub took: Duration,
    /// Why nothing was taken over.
    pub failure: Option<String>,
}

/// One drawn token. The end-of-generation token that ends an answer is not reported.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// Its id.
    pub id: Token,
    /// Its position in the sequence, from 0 at the prompt's first token.
    pub position: u32,
    /// The natural logarithm of the model's own probability, where it was asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens, where they were asked for.
    pub top: Vec<TokenProbability>,
}

/// A token and its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenProbability {
    /// Its id.
    pub id: Token,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// A finished request's sums.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// [`Event::Token`]s sent.
    pub generated_tokens: u32,
    /// From the start to the first drawn token.
    pub prefill: Duration,
    /// From the first drawn token to the end.
    pub decode: Duration,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its answer.
    Stop,
    /// `max_tokens` or the slot's end was reached.
    Length,
    /// Another replica has its sequence now.
    HandedOff,
    /// None has taken it, for as long as it was to be held.
    HoldExpired,
}

/// Whose fault a failure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The request itself cannot be served.
    Invalid,
    /// A stage was lost; the same request may succeed later or elsewhere.
    ReplicaLost,
    /// Ours.
    Internal,
}

/// Nobody listens any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed;

/// Where one request's events go. Dropped when the request is over.
pub trait EventSink {
    /// Passes an event on without blocking.
    ///
    /// # Errors
    /// [`Closed`] when the receiver is gone, or so far behind that it must be given up: the request is cancelled.
    fn send(&mut self, event: Event) -> Result<(), Closed>;
}
