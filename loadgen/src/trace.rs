//! A recorded load: a line of JSON for each request, with when it came and how long it was.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use crate::arrivals::Arrivals;
use crate::prompts::Content;

/// Later than this no trace reaches: what is longer is a mistake in the unit.
const LONGEST: f64 = 30.0 * 86_400.0;

/// Requests in the order in which they came.
#[derive(Debug, Clone)]
pub struct Trace(Arc<[Entry]>);

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) at: Duration,
    pub(crate) prompt: Option<Content>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) max_tokens: Option<u32>,
}

/// Why a text is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Nothing in it.
    #[error(
        "the trace has no request: a line of JSON is expected for each, such as {{\"at\": 1.5, \"prompt_tokens\": 200}}"
    )]
    Empty,
    /// A line cannot be read.
    #[error("line {line} of the trace")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A time that cannot be.
    #[error("line {line} of the trace: \"at\" is {at}, but seconds from 0 to {LONGEST} are expected")]
    Time {
        /// From 1.
        line: usize,
        /// As read.
        at: f64,
    },
    /// A time before the one in the line before.
    #[error("line {line} of the trace: \"at\" is {at}, before the line above; a trace is sorted by time")]
    Order {
        /// From 1.
        line: usize,
        /// As read.
        at: f64,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    at: f64,
    prompt: Option<String>,
    messages: Option<serde_json::Value>,
    prompt_tokens: Option<u32>,
    max_tokens: Option<u32>,
}

impl Trace {
    /// Reads a line of JSON for each request: `at` in seconds, and optionally `prompt` or `messages`, `prompt_tokens` (for a
    /// synthetic prompt) and `max_tokens`.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let mut entries: Vec<Entry> = Vec::new();
        let lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
        for (line, text) in lines {
            let read: Line =
                serde_json::from_str(text).map_err(|source| TraceError::Line { line, source })?;
            let at = read.at;
            if !(0.0..=LONGEST).contains(&at) {
                return Err(TraceError::Time { line, at });
            }
            let entry = Entry {
                at: Duration::from_secs_f64(at),
                prompt: read.messages.map(Content::Messages).or(read.prompt.map(Content::Text)),
                prompt_tokens: read.prompt_tokens,
                max_tokens: read.max_tokens,
            };
            if entries.last().is_some_and(|last| last.at > entry.at) {
                return Err(TraceError::Order { line, at });
            }
            entries.push(entry);
        }
        if entries.is_empty() { Err(TraceError::Empty) } else { Ok(Self(entries.into())) }
    }

    /// When its requests come.
    pub fn arrivals(&self) -> Arrivals {
        Arrivals::At(self.0.iter().map(|entry| entry.at).collect())
    }

    /// How many requests it has.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Whether it has none, which cannot be.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The request at `index`, from the start again after the last.
    pub(crate) fn entry(&self, index: u64) -> &Entry {
        &self.0[(index % self.len()) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_has_times_lengths_and_prompts() {
        let text =
            "{\"at\": 0.5, \"prompt_tokens\": 20, \"max_tokens\": 7}\n\n{\"at\": 2, \"prompt\": \"hi\"}\n";
        let trace = Trace::parse(text).unwrap();
        assert_eq!(trace.len(), 2);
        let times: Vec<Duration> = trace.arrivals().times().collect();
        assert_eq!(times, [Duration::from_millis(500), Duration::from_secs(2)]);
        assert_eq!((trace.entry(0).prompt_tokens, trace.entry(0).max_tokens), (Some(20), Some(7)));
        assert!(matches!(&trace.entry(3).prompt, Some(Content::Text(text)) if text == "hi"));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let error = |text: &str| Trace::parse(text).unwrap_err().to_string();
        assert!(error("\n \n").contains("no request"));
        assert!(error("{\"at\": 1}\nnonsense").contains("line 2"));
        assert!(error("{\"at\": 1, \"promt\": \"x\"}").contains("line 1"));
        assert!(error("{\"at\": -1}").contains("\"at\" is -1"));
        assert!(error("{\"at\": 1e300}").contains("seconds from 0"));
        assert!(error("{\"at\": 2}\n{\"at\": 1}").contains("sorted by time"));
    }
}
