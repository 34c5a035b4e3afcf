//! How the engine gets tokens from logits: the seam behind which llama.cpp's samplers are plugged in.

use super::events::TokenProbability;
use super::request::Token;

/// Why a sampler could not be made or could not draw.
pub type SamplingError = Box<dyn std::error::Error + Send + Sync>;

/// Makes samplers, and knows which tokens end an answer.
pub trait Sampling {
    /// What a request says about sampling.
    type Params;
    /// Draws the tokens of one request.
    type Sampler: Sample;

    /// Makes the sampler of a request, before the request is admitted. The last `replayed` tokens of `prompt` were
    /// drawn by an earlier attempt: penalties and grammar continue from them.
    ///
    /// # Errors
    /// When the parameters cannot be served; the request is refused.
    fn sampler(
        &mut self,
        params: &Self::Params,
        prompt: &[Token],
        replayed: u32,
    ) -> Result<Self::Sampler, SamplingError>;

    /// Whether the token ends an answer.
    fn ends_generation(&self, token: Token) -> bool;
}

/// Draws the tokens of one request, one after the other.
pub trait Sample {
    /// Draws from `logits` (`[n_vocab]`, f32) the token at `position` and takes note of it for the next draw.
    ///
    /// # Errors
    /// When nothing can be drawn; the request fails, no other is touched.
    fn sample(&mut self, logits: &[f32], position: u32) -> Result<Sampled, SamplingError>;
}

/// What was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: Token,
    /// The natural logarithm of the model's own probability, where it was asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens, where they were asked for.
    pub top: Vec<TokenProbability>,
}

/// The last stage's output for one step.
pub trait Logits {
    /// The logits (`[n_vocab]`, f32) of the step's row with this index, counted over all its runs; `None` if they
    /// were not computed.
    fn row(&self, row: usize) -> Option<&[f32]>;
}
