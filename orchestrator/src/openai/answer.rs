//! Sends an answer, whole or as a stream, in the shape of its route.
//!
//! Knows nothing of what a route's choices hold, only when they are due.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream, TryStreamExt};
use serde::Serialize;
use uuid::Uuid;

use super::error::ApiError;
use super::params::{Delivery, UsageChunk};
use super::types::{Chunk, Envelope, Timings, Usage, Whole};
use crate::app::{App, unix_seconds};
use crate::dispatch::Expected;
use crate::generation::{Generation, Outcome, Piece, Progress};
use crate::sse;

/// The shape of a route's answer: either parts and an end, or pieces that are collected into a whole.
pub(crate) trait Answer: Send + 'static {
    /// `object` of a whole answer.
    const WHOLE: &'static str;
    /// `object` of a chunk.
    const CHUNK: &'static str;
    /// The choice of a chunk.
    type Part: Serialize + Send + 'static;
    /// The choice of a whole answer.
    type Whole: Serialize;

    /// What can be told of a piece now.
    fn part(&mut self, piece: Piece) -> Vec<Self::Part>;
    /// What is left to tell, with the reason of the end.
    fn end(&mut self, piece: Piece, outcome: &Outcome) -> Vec<Self::Part>;
    /// Keeps a piece for the whole.
    fn collect(&mut self, piece: Piece);
    /// The whole of what was collected.
    fn whole(self, outcome: &Outcome) -> Self::Whole;
}

/// What all chunks of an answer have in common.
#[derive(Debug)]
pub(crate) struct Head {
    id: String,
    created: u64,
    model: Arc<str>,
}

impl Head {
    /// A new answer, whose id begins with `kind`.
    pub(crate) fn new(kind: &str, app: &App) -> Self {
        let id = format!("{kind}-{}", Uuid::new_v4().simple());
        Self { id, created: unix_seconds(), model: Arc::clone(&app.model_name) }
    }

    /// The answer's id, which is the request's in logs and at the master.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    fn envelope(&self, object: &'static str) -> Envelope<'_> {
        Envelope::new(object, &self.id, self.created, &self.model)
    }
}

/// Runs work that would keep a thread from serving sockets: rendering and tokenising a long prompt takes
/// milliseconds to seconds.
pub(crate) async fn off_the_sockets<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ApiError::Internal { reason: "preparing the prompt failed unexpectedly" })?
}

/// How an answer is sent.
pub(crate) struct Sending {
    pub(crate) head: Head,
    pub(crate) delivery: Delivery,
    /// How often a silent stream sends a comment.
    pub(crate) keep_alive: Duration,
}

/// Tells how long the request was predicted to wait for a slot when it came, in milliseconds.
const PREDICTED_WAIT: HeaderName = HeaderName::from_static("x-shoal-predicted-wait-ms");

/// Tells its place in the line for a slot when it came: 1 was the next to get one, 0 had one at once.
const QUEUE_POSITION: HeaderName = HeaderName::from_static("x-shoal-queue-position");

/// Sends the answer of `generation`.
pub(crate) async fn respond<A: Answer>(
    generation: Generation,
    answer: A,
    sending: Sending,
) -> Result<Response, ApiError> {
    let Sending { head, delivery, keep_alive } = sending;
    let Expected { wait, position } = generation.expected();
    let wait = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let mut response = match delivery {
        Delivery::Whole => whole(generation, answer, &head).await?,
        Delivery::Stream(usage) => {
            let chunks = Chunks { generation, answer, head, usage, has_ended: false };
            sse::respond(chunks.into_stream(), keep_alive)
        }
    };
    let headers = response.headers_mut();
    headers.insert(PREDICTED_WAIT, HeaderValue::from(wait));
    headers.insert(QUEUE_POSITION, HeaderValue::from(position));
    Ok(response)
}

async fn whole<A: Answer>(
    mut generation: Generation,
    mut answer: A,
    head: &Head,
) -> Result<Response, ApiError> {
    let outcome = loop {
        match generation.next().await? {
            Progress::Piece(piece) => answer.collect(piece),
            Progress::Last(piece, outcome) => {
                answer.collect(piece);
                break outcome;
            }
        }
    };
    let Outcome { usage, timings, .. } = outcome;
    let body = Whole { envelope: head.envelope(A::WHOLE), choices: [answer.whole(&outcome)], usage, timings };
    Ok(Json(body).into_response())
}

/// A streamed answer.
struct Chunks<A> {
    generation: Generation,
    answer: A,
    head: Head,
    usage: UsageChunk,
    has_ended: bool,
}

impl<A: Answer> Chunks<A> {
    /// One JSON text per chunk; an error is the last item.
    fn into_stream(self) -> impl Stream<Item = Result<String, ApiError>> + Send {
        let batches = stream::try_unfold(self, |mut chunks| async {
            if chunks.has_ended {
                return Ok(None);
            }
            let batch = chunks.next_batch().await?;
            Ok(Some((stream::iter(batch.into_iter().map(Ok)), chunks)))
        });
        batches.try_flatten()
    }

    /// The chunks of the generation's next step, perhaps none.
    async fn next_batch(&mut self) -> Result<Vec<String>, ApiError> {
        match self.generation.next().await? {
            Progress::Piece(piece) => {
                let parts = self.answer.part(piece);
                parts.into_iter().map(|part| self.chunk(vec![part], Sums::default())).collect()
            }
            Progress::Last(piece, outcome) => {
                self.has_ended = true;
                let parts = self.answer.end(piece, &outcome);
                self.last_batch(parts, outcome)
            }
        }
    }

    /// The sums go with the last chunk, which is one of their own where usage was asked for.
    fn last_batch(&self, mut parts: Vec<A::Part>, outcome: Outcome) -> Result<Vec<String>, ApiError> {
        let timings = Some(outcome.timings);
        let (last, sums) = match self.usage {
            UsageChunk::Sent => (Vec::new(), Sums { usage: Some(outcome.usage), timings }),
            UsageChunk::Omitted => (parts.pop().into_iter().collect(), Sums { usage: None, timings }),
        };
        let parts = parts.into_iter().map(|part| self.chunk(vec![part], Sums::default()));
        parts.chain([self.chunk(last, sums)]).collect()
    }

    fn chunk(&self, choices: Vec<A::Part>, sums: Sums) -> Result<String, ApiError> {
        let Sums { usage, timings } = sums;
        let usage = match self.usage {
            UsageChunk::Sent => Some(usage),
            UsageChunk::Omitted => None,
        };
        let chunk = Chunk { envelope: self.head.envelope(A::CHUNK), choices, usage, timings };
        serde_json::to_string(&chunk)
            .map_err(|_| ApiError::Internal { reason: "a chunk cannot be written as JSON" })
    }
}

/// What only the last chunk carries.
#[derive(Default)]
struct Sums {
    usage: Option<Usage>,
    timings: Option<Timings>,
}
