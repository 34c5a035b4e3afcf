//! One request and its answer: a stream of server-sent events, and when each token of it came.

use std::fmt;
use std::time::Duration;

use eventsource_stream::{EventStreamError, Eventsource};
use futures::{Stream, StreamExt};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

use crate::clock::Clock;
use crate::prompts::Prompt;
use crate::target::Target;

/// How much of a server's own name for an error is kept.
const CODE_LENGTH: usize = 60;

/// What became of a request. Times count from the start of the run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Exchange {
    /// When it should have been sent; latencies count from here.
    pub(crate) due: Duration,
    /// When the answer was complete, or not to be had.
    pub(crate) ended: Duration,
    pub(crate) outcome: Result<Answer, Failure>,
}

/// A complete answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Answer {
    /// When the first token came.
    pub(crate) first: Duration,
    /// When the last did.
    pub(crate) last: Duration,
    /// Between the events that carried tokens, in microseconds.
    pub(crate) gaps: Vec<u32>,
    /// As the server counts them, or the events that carried any.
    pub(crate) tokens: u32,
    /// As the server counts them.
    pub(crate) prompt_tokens: Option<u32>,
    /// Of the prompt's tokens, those that the server had computed before.
    pub(crate) cached_tokens: Option<u32>,
    /// How long the server says that the request waited for its turn.
    pub(crate) queue_wait: Option<Duration>,
}

/// Why there was no complete answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// No connection.
    Connect,
    /// Not complete in time.
    Timeout,
    /// Refused with this HTTP status.
    Status(u16),
    /// The stream told of an error, by this code.
    ErrorEvent(String),
    /// The stream had something else than JSON in it.
    Malformed,
    /// The stream ended, or the connection, before the answer did.
    Dropped,
    /// The answer ended without a token.
    Empty,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Timeout => f.write_str("timed out"),
            Self::Status(status) => write!(f, "HTTP {status}"),
            Self::ErrorEvent(code) => write!(f, "error event {code}"),
            Self::Malformed => f.write_str("malformed stream"),
            Self::Dropped => f.write_str("stream dropped"),
            Self::Empty => f.write_str("no token"),
        }
    }
}

/// Sends a request and reads its answer to the end.
pub(crate) async fn exchange(target: &Target, prompt: &Prompt, clock: Clock, due: Duration) -> Exchange {
    let answer = async {
        let response = match target.request(prompt).send().await {
            // A server may close a connection that idled just as it is used again; any client sends once more then.
            Err(error) if is_stale(&error) => target.request_afresh(prompt).send().await,
            sent => sent,
        };
        let response = response.map_err(|error| of_request(&error))?;
        if !response.status().is_success() {
            return Err(Failure::Status(response.status().as_u16()));
        }
        read(response.bytes_stream(), clock).await
    };
    let outcome = tokio::time::timeout(target.timeout(), answer).await.unwrap_or(Err(Failure::Timeout));
    Exchange { due, ended: clock.now(), outcome }
}

/// Whether the connection ended before there was any answer.
fn is_stale(error: &reqwest::Error) -> bool {
    error.is_request() && !error.is_connect() && !error.is_timeout()
}

fn of_request(error: &reqwest::Error) -> Failure {
    if error.is_connect() { Failure::Connect } else { Failure::Dropped }
}

/// Reads a stream to its end, also past the answer's: a connection is used again only then.
async fn read<B, E>(bytes: impl Stream<Item = Result<B, E>>, clock: Clock) -> Result<Answer, Failure>
where
    B: AsRef<[u8]>,
{
    let mut events = std::pin::pin!(bytes.eventsource());
    let mut reading = Reading::default();
    while let Some(event) = events.next().await {
        let now = clock.now();
        match event {
            Ok(event) => reading.event(&event.data, now)?,
            // What follows a complete answer does not matter any more.
            Err(EventStreamError::Transport(_)) if reading.is_complete => break,
            Err(EventStreamError::Transport(_)) => return Err(Failure::Dropped),
            Err(EventStreamError::Utf8(_) | EventStreamError::Parser(_)) => return Err(Failure::Malformed),
        }
    }
    reading.finish()
}

/// An answer as far as it has come.
#[derive(Debug, Default)]
struct Reading {
    answer: Answer,
    events: u32,
    counted: Option<u32>,
    is_complete: bool,
}

impl Reading {
    fn event(&mut self, data: &str, now: Duration) -> Result<(), Failure> {
        if data == "[DONE]" {
            self.is_complete = true;
            return Ok(());
        }
        let Chunk { choices, usage, timings, error } =
            serde_json::from_str(data).map_err(|_| Failure::Malformed)?;
        if let Some(error) = error {
            return Err(Failure::ErrorEvent(error.name()));
        }
        for choice in &choices {
            self.is_complete |= choice.finish_reason.0;
            if choice.has_token() {
                self.token(now);
            }
        }
        if let Some(usage) = usage {
            self.counted = usage.completion_tokens;
            self.answer.prompt_tokens = usage.prompt_tokens;
            self.answer.cached_tokens = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.queued(usage.queue_time.map(|seconds| seconds * 1e3));
        }
        self.queued(timings.and_then(|timings| timings.queue_ms));
        Ok(())
    }

    fn queued(&mut self, ms: Option<f64>) {
        let wait = ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
        self.answer.queue_wait = wait.or(self.answer.queue_wait);
    }

    fn token(&mut self, now: Duration) {
        if self.events == 0 {
            self.answer.first = now;
        } else {
            let gap = now.saturating_sub(self.answer.last).as_micros();
            self.answer.gaps.push(u32::try_from(gap).unwrap_or(u32::MAX));
        }
        self.answer.last = now;
        self.events = self.events.saturating_add(1);
    }

    fn finish(mut self) -> Result<Answer, Failure> {
        if !self.is_complete {
            return Err(Failure::Dropped);
        }
        if self.events == 0 {
            return Err(Failure::Empty);
        }
        self.answer.tokens = self.counted.unwrap_or(0).max(self.events);
        Ok(self.answer)
    }
}

/// What is read of an event.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    timings: Option<Timings>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    finish_reason: Filled,
}

impl Choice {
    fn has_token(&self) -> bool {
        let in_delta = |delta: &Delta| delta.content.0 || delta.reasoning_content.0 || delta.tool_calls.0;
        self.text.0 || self.delta.as_ref().is_some_and(in_delta)
    }
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Filled,
    #[serde(default)]
    reasoning_content: Filled,
    #[serde(default)]
    tool_calls: Filled,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<PromptTokens>,
    /// Seconds; Groq's name.
    queue_time: Option<f64>,
}

#[derive(Deserialize)]
struct PromptTokens {
    cached_tokens: Option<u32>,
}

/// llama-server's place for times, and Shoal's name in it.
#[derive(Deserialize)]
struct Timings {
    queue_ms: Option<f64>,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    code: serde_json::Value,
    #[serde(default, rename = "type")]
    kind: serde_json::Value,
}

impl ErrorBody {
    /// Its code, or else its type.
    fn name(&self) -> String {
        let name = [&self.code, &self.kind].into_iter().find(|name| !name.is_null());
        let name = name.map_or_else(
            || "without a code".to_owned(),
            |name| name.as_str().map_or_else(|| name.to_string(), str::to_owned),
        );
        name.chars().filter(|c| !c.is_control()).take(CODE_LENGTH).collect()
    }
}

/// Whether there is anything in a text or a list: all that is asked of it, so nothing is kept.
#[derive(Debug, Default, Clone, Copy)]
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Filled;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list or null")
            }

            fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
                Ok(Filled(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Filled, A::Error> {
                let mut filled = false;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(Filled(filled))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use proptest::prelude::*;

    use super::*;

    const CHAT: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n\
        : a comment\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"zwölf 🐟\"}}]}\r\n\r\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n\
        data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":5,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}},\"timings\":{\"queue_ms\":1.5}}\n\n\
        data: [DONE]\n\n";

    /// What is made of a stream that comes in pieces, and then breaks or ends.
    fn read_pieces(pieces: &[&[u8]], then_breaks: bool) -> Result<Answer, Failure> {
        let pieces = pieces.iter().map(|piece| Ok(piece.to_vec()));
        let end = then_breaks.then_some(Err(std::io::Error::other("reset")));
        let bytes = stream::iter(pieces.chain(end).collect::<Vec<_>>());
        futures::executor::block_on(read(bytes, Clock::start()))
    }

    fn read_text(text: &str) -> Result<Answer, Failure> {
        read_pieces(&[text.as_bytes()], false)
    }

    #[test]
    fn a_stream_gives_its_tokens_and_what_the_server_counted() {
        let answer = read_text(CHAT).unwrap();
        assert_eq!((answer.tokens, answer.gaps.len()), (5, 1));
        assert_eq!((answer.prompt_tokens, answer.cached_tokens), (Some(9), Some(4)));
        assert_eq!(answer.queue_wait, Some(Duration::from_micros(1500)));
        assert!(answer.first <= answer.last);
    }

    #[test]
    fn completions_and_servers_that_count_nothing_are_understood() {
        let text = "data:{\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\n\n\
            data:{\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n";
        let answer = read_text(text).unwrap();
        assert_eq!((answer.tokens, answer.prompt_tokens, answer.queue_wait), (2, None, None));
        let groq = "data:{\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}],\"usage\":{\"queue_time\":0.25}}\n\n";
        assert_eq!(read_text(groq).unwrap().queue_wait, Some(Duration::from_millis(250)));
    }

    #[test]
    fn every_way_to_fail_has_its_own_kind() {
        let token = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        assert_eq!(read_text(token), Err(Failure::Dropped));
        assert_eq!(read_pieces(&[token.as_bytes()], true), Err(Failure::Dropped));
        assert_eq!(read_text("data: <html>\n\n"), Err(Failure::Malformed));
        assert_eq!(read_pieces(&[b"data: \xff\n\n"], false), Err(Failure::Malformed));
        assert_eq!(read_text("data: [DONE]\n\n"), Err(Failure::Empty));
        let error = |body: &str| read_text(&format!("data: {{\"error\":{body}}}\n\n"));
        assert_eq!(error("{\"code\":\"engine_error\"}"), Err(Failure::ErrorEvent("engine_error".to_owned())));
        assert_eq!(error("{\"code\":500,\"type\":\"x\"}"), Err(Failure::ErrorEvent("500".to_owned())));
        assert_eq!(error("{}"), Err(Failure::ErrorEvent("without a code".to_owned())));
    }

    #[test]
    fn an_answer_that_was_complete_before_its_connection_broke_is_an_answer() {
        assert_eq!(read_pieces(&[CHAT.as_bytes()], true).unwrap().tokens, 5);
    }

    proptest! {
        #[test]
        fn a_stream_may_come_in_any_pieces(mut cuts in prop::collection::vec(0..CHAT.len(), 0..20)) {
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for to in cuts.into_iter().chain([CHAT.len()]) {
                pieces.push(&CHAT.as_bytes()[from..to]);
                from = to;
            }
            let answer = read_pieces(&pieces, false).unwrap();
            prop_assert_eq!((answer.tokens, answer.gaps.len(), answer.prompt_tokens), (5, 1, Some(9)));
        }
    }
}
