//! `workload.toml`: what is asked of the cluster.

use cluster::{Arrivals, Lengths, Millis, Spread, TokensPerSecond, TraceEntry, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{PlannerFile, current};

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkloadFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// Requests to look ahead.
    #[serde(default = "hundred")]
    pub requests: u32,
    /// The slowest generation a request may see.
    #[serde(default = "reading_speed")]
    pub min_tokens_per_second: f64,
    /// Tokens one slot has room for.
    #[serde(default = "context")]
    pub slot_context: u32,
    /// Slots of one replica, at most.
    #[serde(default = "slots")]
    pub max_slots: u32,
    /// When requests come.
    pub arrivals: ArrivalsEntry,
    /// Tokens of prompts.
    pub prompt: LengthsEntry,
    /// Tokens generated.
    pub output: LengthsEntry,
}

/// The paper's evaluation fits about a hundred requests.
const fn hundred() -> u32 {
    100
}

/// E2LLM, section 3.5.
const fn reading_speed() -> f64 {
    7.0
}

/// E2LLM, section 4.1.
const fn context() -> u32 {
    8192
}

/// The largest batch that profiles measure.
const fn slots() -> u32 {
    32
}

/// When requests come; exactly one of these.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum ArrivalsEntry {
    /// One every so many milliseconds.
    EveryMs(f64),
    /// At random, so many milliseconds apart in the mean.
    PoissonMs(f64),
    /// As recorded.
    Trace(Vec<RequestEntry>),
}

/// A recorded request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestEntry {
    /// Since the start.
    pub at_ms: f64,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens generated for it.
    pub output: u32,
}

/// Lengths.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LengthsEntry {
    /// Mean, in tokens.
    pub mean: f64,
    /// Shape around the mean.
    #[serde(default, skip_serializing_if = "SpreadEntry::is_none")]
    pub spread: SpreadEntry,
}

/// The shape of lengths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum SpreadEntry {
    /// All the same.
    #[default]
    None,
    /// Log-normal with this standard deviation over mean.
    LogNormal(f64),
    /// Exponential.
    Exponential,
}

impl SpreadEntry {
    const fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }
}

impl PlannerFile for WorkloadFile {
    const WHAT: &'static str = "the workload file";

    fn version(&self) -> u32 {
        self.version
    }
}

impl From<&WorkloadFile> for Workload {
    fn from(file: &WorkloadFile) -> Self {
        let entry =
            |of: &RequestEntry| TraceEntry { at: Millis(of.at_ms), prompt: of.prompt, output: of.output };
        Self {
            arrivals: match &file.arrivals {
                ArrivalsEntry::EveryMs(ms) => Arrivals::Every(Millis(*ms)),
                ArrivalsEntry::PoissonMs(ms) => Arrivals::Poisson(Millis(*ms)),
                ArrivalsEntry::Trace(entries) => Arrivals::Trace(entries.iter().map(entry).collect()),
            },
            prompt: file.prompt.into(),
            output: file.output.into(),
            requests: file.requests,
            min_rate: TokensPerSecond(file.min_tokens_per_second),
            slot_context: file.slot_context,
            max_slots: file.max_slots,
        }
    }
}

impl From<&Workload> for WorkloadFile {
    fn from(workload: &Workload) -> Self {
        let entry = |of: &TraceEntry| RequestEntry { at_ms: of.at.0, prompt: of.prompt, output: of.output };
        Self {
            version: current(),
            requests: workload.requests,
            min_tokens_per_second: workload.min_rate.0,
            slot_context: workload.slot_context,
            max_slots: workload.max_slots,
            arrivals: match &workload.arrivals {
                Arrivals::Every(ms) => ArrivalsEntry::EveryMs(ms.0),
                Arrivals::Poisson(ms) => ArrivalsEntry::PoissonMs(ms.0),
                Arrivals::Trace(entries) => ArrivalsEntry::Trace(entries.iter().map(entry).collect()),
            },
            prompt: workload.prompt.into(),
            output: workload.output.into(),
        }
    }
}

impl From<LengthsEntry> for Lengths {
    fn from(entry: LengthsEntry) -> Self {
        let spread = match entry.spread {
            SpreadEntry::None => Spread::None,
            SpreadEntry::LogNormal(cv) => Spread::LogNormal(cv),
            SpreadEntry::Exponential => Spread::Exponential,
        };
        Self { mean: entry.mean, spread }
    }
}

impl From<Lengths> for LengthsEntry {
    fn from(lengths: Lengths) -> Self {
        let spread = match lengths.spread {
            Spread::None => SpreadEntry::None,
            Spread::LogNormal(cv) => SpreadEntry::LogNormal(cv),
            Spread::Exponential => SpreadEntry::Exponential,
        };
        Self { mean: lengths.mean, spread }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"
        requests = 200
        arrivals = { poisson_ms = 800 }
        prompt = { mean = 576, spread = { log_normal = 0.35 } }
        output = { mean = 746 }
    "#;

    #[test]
    fn a_workload_survives_the_way_into_nouns_and_back() {
        let file = WorkloadFile::from_toml(EXAMPLE).unwrap();
        let workload = Workload::from(&file);
        assert_eq!(workload.arrivals, Arrivals::Poisson(Millis(800.0)));
        assert_eq!(workload.min_rate, Workload::DEFAULT_MIN_RATE);
        assert_eq!(WorkloadFile::from(&workload), file);
    }

    #[test]
    fn two_kinds_of_arrivals_are_refused() {
        let both = EXAMPLE.replace("poisson_ms = 800", "poisson_ms = 800, every_ms = 5");
        assert!(WorkloadFile::from_toml(&both).is_err());
    }
}
