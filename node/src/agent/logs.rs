//! What workers print on stderr becomes events of this process's log, and the last lines are kept to tell why a
//! worker died: a failed assertion in native code leaves nothing else.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use cluster::StageIndex;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio_util::sync::CancellationToken;
use tracing::Level;

/// Lines kept.
const TAIL: usize = 12;

/// A longer line is cut into pieces, so that a worker that prints no line ends cannot fill memory.
const LONGEST_LINE: u64 = 4096;

/// The last unusual lines of a worker.
#[derive(Debug, Clone, Default)]
pub(super) struct LastWords(Arc<Mutex<VecDeque<String>>>);

impl LastWords {
    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    /// The line that most likely tells why the worker died: the first of those that did not come from its logger,
    /// else the last error.
    pub(super) fn likely_cause(&self) -> Option<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = lines.iter().find(|line| split_level(line).is_none());
        raw.or_else(|| lines.back())
            .map(|line| split_level(line).map_or(line.as_str(), |(_, text)| text).to_owned())
    }
}

/// Reads `stderr` to its end. What a worker says of the end of others, or of its own, is no news to anyone once all are
/// being stopped.
pub(super) async fn pump(
    stage: StageIndex,
    stderr: impl AsyncRead + Unpin,
    last_words: LastWords,
    stopping: CancellationToken,
) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        if !text.is_empty() {
            let (level, text) = classify(text, &last_words);
            log(stage, if stopping.is_cancelled() { level.max(Level::DEBUG) } else { level }, text);
        }
    }
}

fn classify<'a>(line: &'a str, last_words: &LastWords) -> (Level, &'a str) {
    // Raw output is what a runtime or native code prints when it dies.
    let (level, text) = split_level(line).unwrap_or((Level::WARN, line));
    if level <= Level::WARN {
        last_words.push(line);
    }
    (level, text)
}

fn log(stage: StageIndex, level: Level, text: &str) {
    let stage = stage.0;
    match level {
        Level::ERROR => tracing::error!(target: "worker", stage, "{text}"),
        Level::WARN => tracing::warn!(target: "worker", stage, "{text}"),
        Level::INFO => tracing::info!(target: "worker", stage, "{text}"),
        Level::DEBUG => tracing::debug!(target: "worker", stage, "{text}"),
        Level::TRACE => tracing::trace!(target: "worker", stage, "{text}"),
    }
}

/// Splits `INFO text`, as a worker's logger writes it.
fn split_level(line: &str) -> Option<(Level, &str)> {
    let (level, text) = line.split_once(' ')?;
    let level = match level {
        "ERROR" => Level::ERROR,
        "WARN" => Level::WARN,
        "INFO" => Level::INFO,
        "DEBUG" => Level::DEBUG,
        "TRACE" => Level::TRACE,
        _ => return None,
    };
    Some((level, text.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn words_of(text: &str) -> Option<String> {
        let words = LastWords::default();
        pump(StageIndex(0), text.as_bytes(), words.clone(), CancellationToken::new()).await;
        words.likely_cause()
    }

    #[tokio::test]
    async fn a_failed_assertion_is_the_likely_cause() {
        let text =
            "WARN llama.cpp: odd\nINFO stage: fine\nggml.c:12: GGML_ASSERT(x) failed\nbacktrace follows\n";
        assert_eq!(words_of(text).await.as_deref(), Some("ggml.c:12: GGML_ASSERT(x) failed"));
    }

    #[tokio::test]
    async fn without_raw_output_the_last_error_is() {
        let text = "ERROR stage: first\nERROR stage: second\nINFO stage: bye\n";
        assert_eq!(words_of(text).await.as_deref(), Some("stage: second"));
    }

    #[tokio::test]
    async fn endless_lines_and_bad_utf8_do_no_harm() {
        let mut bytes = vec![b'x'; 100_000];
        bytes.extend([0xff, 0xfe, b'\n']);
        let words = LastWords::default();
        pump(StageIndex(0), bytes.as_slice(), words.clone(), CancellationToken::new()).await;
        assert!(words.likely_cause().is_some_and(|line| line.len() <= LONGEST_LINE as usize));
    }
}
