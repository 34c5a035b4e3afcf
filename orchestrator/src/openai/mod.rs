//! OpenAI's API: what requests may say, what answers look like, and what goes wrong.

mod answer;
mod assembler;
mod chat;
mod completions;
mod error;
mod fields;
mod logprobs;
mod messages;
mod params;
mod prompt;
mod types;

pub(crate) use chat::create as create_chat;
pub(crate) use completions::create as create_completion;
pub(crate) use error::ApiError;
pub(crate) use fields::quoted;
pub(crate) use logprobs::{Candidate, TokenLogprob};
pub(crate) use types::{Spent, Timings, Usage};
