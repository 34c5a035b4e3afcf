//! How people see long work: a bar on a terminal, a plain line now and then elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use node::{Progress, Work};

use crate::output;

/// Between two plain lines about the same work.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows one piece of work after the other.
pub(crate) struct ProgressView {
    bar: Option<ProgressBar>,
    current: Option<Current>,
}

struct Current {
    what: String,
    last_line: Instant,
}

impl ProgressView {
    /// A bar if stderr is a terminal.
    pub(crate) fn new() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            // The template is a constant; were it wrong, the default would do.
            if let Ok(style) = ProgressStyle::with_template("{msg:<40} {wide_bar} {percent:>3} %") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, current: None }
    }

    /// Shows progress on a host's own work.
    pub(crate) fn show(&mut self, progress: &Progress) {
        let what = match progress.work {
            Work::Waiting => progress.work.to_string(),
            work => format!("{work} ({})", progress.total),
        };
        self.show_share(&what, progress.done.0, progress.total.0);
    }

    /// Shows `done` of `total` of `what`.
    pub(crate) fn show_share(&mut self, what: &str, done: u64, total: u64) {
        let is_new = self.current.as_ref().is_none_or(|current| current.what != what);
        if let Some(bar) = &self.bar {
            if is_new {
                bar.set_message(what.to_owned());
            }
            bar.set_length(total);
            bar.set_position(done);
        } else if is_new || self.current.as_ref().is_some_and(|c| c.last_line.elapsed() >= LINE_INTERVAL) {
            let percent = done.saturating_mul(100).checked_div(total).unwrap_or(0);
            // Progress that cannot be written is not worth a failure.
            let _ = output::note(&if is_new { what.to_owned() } else { format!("{what}: {percent} %") });
            self.current = Some(Current { what: what.to_owned(), last_line: Instant::now() });
            return;
        }
        if is_new {
            self.current = Some(Current { what: what.to_owned(), last_line: Instant::now() });
        }
    }

    /// Shows what work of the kind `what` is at in words that change, where there is no share of it to show.
    pub(crate) fn show_words(&mut self, what: &str, words: &str) {
        let current = self.current.as_ref().filter(|current| current.what == what);
        let is_due = current.is_none_or(|current| current.last_line.elapsed() >= LINE_INTERVAL);
        if let Some(bar) = &self.bar {
            bar.set_message(words.to_owned());
        } else if is_due {
            // Progress that cannot be written is not worth a failure.
            let _ = output::note(words);
        }
        if is_due {
            self.current = Some(Current { what: what.to_owned(), last_line: Instant::now() });
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for ProgressView {
    fn drop(&mut self) {
        self.finish();
    }
}
