//! What idling costs the next call: the controlled idle-gap experiment of DySCo (section V-B).
//!
//! A stage of a pipeline waits between its calls: for the other stages, for the network. Waiting lets clocks drop, caches
//! cool and threads sleep, so the next call takes longer than it does back to back. To see that alone, hidden rows are
//! recorded once where the model is cut, and replayed one by one into the slice `[c, L)` with nothing but
//! a gap `d` between the calls. With `L(c, d)` the time per token, gap included, what idling adds is
//! `ΔL(c, d) = L(c, d) − d − L(c, 0)`.
//!
//! Cuts and gaps take turns in an order drawn anew for each round, so that whatever else the host does meets all of
//! them. As in the paper, `L(c, 0)` is smoothed (over neighbouring rounds) and the others are not. No gap at all is also
//! measured a second time, as a control: its ΔL is what noise looks like. `d` is the gap as it was, not as it was
//! wished. Knows nothing of profiles and plans; [`cold_call`] is the short form whose result a profile keeps.

mod cold_call;
mod experiment;
mod gaps;
mod plot;
mod recording;
mod replay;

use cluster::{Bytes, ColdCallError, Millis};
use thiserror::Error;

use crate::statistics::Quartiles;

pub use cold_call::{COLD_CALL_ROWS, cold_call};
pub use experiment::{Experiment, Observer, Setup, slices_for};
pub use gaps::Gaps;
pub use plot::svg;
pub use recording::{HiddenRows, text_tokens};

/// Tokens in the slot before the replay begins: the short inputs of the paper have 16 to 128.
pub(crate) const PROMPT: u32 = 32;

/// Why idling could not be measured.
#[derive(Debug, Error)]
pub enum IdleGapError {
    /// llama.cpp could not load or run a slice.
    #[error(transparent)]
    Llama(#[from] llama::Error),
    /// A gap that is none.
    #[error("an idle gap of {gap_ms} ms: gaps must be between 0 and {} ms", Gaps::LONGEST.0)]
    Gap {
        /// The offending gap, in milliseconds.
        gap_ms: f64,
    },
    /// Cuts that make no slice.
    #[error("cuts at {cuts:?} of {n_layer} blocks: at least one is needed, each from 1 to {}, rising", n_layer.saturating_sub(1))]
    Cuts {
        /// The cuts.
        cuts: Vec<u32>,
        /// Blocks of the model.
        n_layer: u32,
    },
    /// More tokens than the model takes.
    #[error(
        "replaying {tokens} tokens after a prompt of {PROMPT} needs a context of {needed}, but the model's is {n_ctx}"
    )]
    Context {
        /// Tokens to replay.
        tokens: u32,
        /// Tokens in all.
        needed: u32,
        /// What the model was trained for.
        n_ctx: u32,
    },
    /// Slices that do not fit.
    #[error(
        "the slices to replay into have {needed} and {available} of memory are available: measure fewer cuts, or \
         later ones"
    )]
    Memory {
        /// Bytes of all slices.
        needed: Bytes,
        /// Bytes that can be had.
        available: Bytes,
    },
    /// Hidden rows of another width or too few.
    #[error("{got} numbers of hidden rows of width {n_embd}: {needed} are needed, in whole rows")]
    Rows {
        /// Numbers given.
        got: usize,
        /// Width of a row.
        n_embd: usize,
        /// Numbers needed.
        needed: usize,
    },
    /// What was measured is no correction.
    #[error(transparent)]
    ColdCall(#[from] ColdCallError),
    /// The observer asked to stop.
    #[error("measuring idle gaps was stopped")]
    Stopped,
}

/// What was measured at one cut with one gap.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// First block of the slice.
    pub cut: u32,
    /// The gap that was wished for.
    pub gap: Millis,
    /// The gap as it was: the median over the rounds.
    pub actual_gap: Millis,
    /// L(c, d): milliseconds per token, gap included.
    pub per_token: Quartiles,
    /// ΔL(c, d): milliseconds per token that the gap adds beside itself. Of gap 0, the noise.
    pub extra: Quartiles,
}
