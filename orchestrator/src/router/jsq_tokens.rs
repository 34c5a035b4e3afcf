//! `jsq-tokens`: join the shortest queue, by tokens.
//!
//! **What.** The replica whose requests, waiting and running, have the fewest tokens: those of prompts, and those that
//! answers are expected to have. Among equals the one that would be the quickest with this prompt.
//!
//! **Why.** Between counting and predicting: it knows long prompts from short ones without believing anything of speeds. The
//! choice where replicas are alike and their rates cannot be trusted, such as hosts that others use too.
//!
//! **When it errs.** A token of an answer takes a hundred times as long as one of a prompt, and a slow replica gets as many
//! as a fast one.

use super::{Policy, ReplicaView, least};

/// The fewest tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestTokens;

impl Policy for ShortestTokens {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        least(views, |view| (view.tokens, view.service))
    }
}
