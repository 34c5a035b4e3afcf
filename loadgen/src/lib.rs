//! Load for OpenAI-compatible servers, and what their clients saw of it: time to first token, time per token, gaps
//! between tokens, errors.
//!
//! A server is measured from outside, over its API alone, so that one server's figures can be set beside another's. This crate
//! knows no other crate of ours, prints nothing, and runs on one thread: what it costs is part of the result ([`Client`]).
//!
//! In an open loop a request is due when its schedule says, whatever became of those before it, and its latencies
//! count from then, not from when it was sent: a server that stalls is not forgiven the requests that it kept
//! waiting (coordinated omission).
#![forbid(unsafe_code)]

mod arrivals;
mod client;
mod clock;
mod exchange;
mod prompts;
mod run;
mod summary;
mod tally;
mod target;
mod trace;

pub use arrivals::{Arrivals, Rate, RateError};
pub use client::{Client, allow_many_connections};
pub use exchange::Failure;
pub use prompts::{
    Content, CountTokens, Lengths, LengthsError, Prompt, PromptFileError, Prompts, Requests, Synthetic,
};
pub use run::{Ending, Load, Run, warm_up};
pub use summary::{Distribution, Goodput, Limits, Summary};
pub use tally::{Bucket, Curve, Tally};
pub use target::{ApiKey, Endpoint, Target, TargetConfig, TargetError};
pub use trace::{Trace, TraceError};
