//! What is asked of a cluster: when requests come, how long they are, and how fast answers must be.

use serde::{Deserialize, Serialize};

use crate::{Millis, TokensPerSecond};

/// When requests come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// One every so often, the first at once.
    Every(Millis),
    /// At random, one every so often in the mean.
    Poisson(Millis),
    /// As recorded.
    Trace(Vec<TraceEntry>),
}

/// One recorded request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TraceEntry {
    /// Since the trace's start.
    pub at: Millis,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens generated for it.
    pub output: u32,
}

/// How long prompts or outputs are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Lengths {
    /// Mean, in tokens.
    pub mean: f64,
    /// Shape around the mean.
    pub spread: Spread,
}

/// The shape of a distribution of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// All the same.
    None,
    /// Log-normal with this standard deviation over mean.
    LogNormal(f64),
    /// Exponential; of no real workload, but queueing theory's.
    Exponential,
}

impl Lengths {
    /// Always `tokens`.
    pub const fn fixed(tokens: f64) -> Self {
        Self { mean: tokens, spread: Spread::None }
    }

    /// Log-normal around `mean` with coefficient of variation `cv`.
    pub const fn log_normal(mean: f64, cv: f64) -> Self {
        Self { mean, spread: Spread::LogNormal(cv) }
    }
}

/// What a cluster is planned for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// When requests come.
    pub arrivals: Arrivals,
    /// Tokens of prompts; where there is a trace, its own count.
    pub prompt: Lengths,
    /// Tokens generated; where there is a trace, its own count.
    pub output: Lengths,
    /// Requests to look ahead: a plan for a burst differs from one for a steady stream. A trace has its own number.
    pub requests: u32,
    /// The slowest generation a request may see.
    pub min_rate: TokensPerSecond,
    /// Tokens one slot has room for.
    pub slot_context: u32,
    /// Slots of one replica, at most.
    pub max_slots: u32,
}

impl Workload {
    /// The paper's floor of reading speed (E2LLM, section 3.5).
    pub const DEFAULT_MIN_RATE: TokensPerSecond = TokensPerSecond(7.0);

    /// Mean tokens of a prompt.
    pub fn mean_prompt(&self) -> f64 {
        self.mean_of(self.prompt, |entry| entry.prompt)
    }

    /// Mean tokens generated.
    pub fn mean_output(&self) -> f64 {
        self.mean_of(self.output, |entry| entry.output)
    }

    /// Requests to look ahead: those of the trace, if there is one.
    pub fn n_requests(&self) -> usize {
        match &self.arrivals {
            Arrivals::Trace(entries) => entries.len(),
            Arrivals::Every(_) | Arrivals::Poisson(_) => self.requests as usize,
        }
    }

    fn mean_of(&self, lengths: Lengths, tokens: impl Fn(&TraceEntry) -> u32) -> f64 {
        match &self.arrivals {
            Arrivals::Trace(entries) => {
                entries.iter().map(|entry| f64::from(tokens(entry))).sum::<f64>() / entries.len() as f64
            }
            Arrivals::Every(_) | Arrivals::Poisson(_) => lengths.mean,
        }
    }

    /// Mean time between requests.
    pub fn mean_interval(&self) -> Millis {
        match &self.arrivals {
            Arrivals::Every(interval) | Arrivals::Poisson(interval) => *interval,
            Arrivals::Trace(entries) => {
                let span = entries.last().map_or(0.0, |last| last.at.0);
                Millis(span / entries.len().saturating_sub(1).max(1) as f64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_speaks_for_itself() {
        let entry = |at, prompt, output| TraceEntry { at: Millis(at), prompt, output };
        let mut workload = Workload {
            arrivals: Arrivals::Every(Millis(100.0)),
            prompt: Lengths::fixed(7.0),
            output: Lengths::fixed(9.0),
            requests: 50,
            min_rate: Workload::DEFAULT_MIN_RATE,
            slot_context: 512,
            max_slots: 8,
        };
        let means = |of: &Workload| (of.mean_prompt(), of.mean_output(), of.n_requests(), of.mean_interval());
        assert_eq!(means(&workload), (7.0, 9.0, 50, Millis(100.0)));
        workload.arrivals = Arrivals::Trace(vec![entry(0.0, 10, 1), entry(40.0, 20, 2), entry(100.0, 30, 6)]);
        assert_eq!(means(&workload), (20.0, 3.0, 3, Millis(50.0)));
    }
}
