//! Samplers whose draw depends on the logits, the position, the seed and all tokens drawn before.

use super::super::{Sample, Sampled, Sampling, SamplingError, Token};
use super::random::mix;

/// The token that ends an answer.
pub(in super::super) const END_OF_GENERATION: Token = 0;

/// How to draw.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in super::super) struct Draw {
    pub(in super::super) seed: u64,
    /// Refuse to draw for this position.
    pub(in super::super) fails_at: Option<u32>,
    /// Draw this instead, whatever the logits say.
    pub(in super::super) always: Option<Token>,
    /// Refuse to make a sampler.
    pub(in super::super) unfit: bool,
}

#[derive(Debug)]
pub(in super::super) struct FakeSampling {
    pub(in super::super) n_vocab: u32,
}

#[derive(Debug)]
pub(in super::super) struct FakeSampler {
    draw: Draw,
    n_vocab: u32,
    history: u64,
}

impl Sampling for FakeSampling {
    type Params = Draw;
    type Sampler = FakeSampler;

    fn sampler(
        &mut self,
        draw: &Draw,
        prompt: &[Token],
        replayed: u32,
    ) -> Result<FakeSampler, SamplingError> {
        if draw.unfit {
            return Err("the grammar has no root rule".into());
        }
        let mut sampler = FakeSampler { draw: draw.clone(), n_vocab: self.n_vocab, history: 0 };
        let replayed = &prompt[prompt.len() - replayed as usize..];
        replayed.iter().for_each(|token| sampler.accept(*token));
        Ok(sampler)
    }

    fn ends_generation(&self, token: Token) -> bool {
        token == END_OF_GENERATION
    }
}

impl FakeSampler {
    fn accept(&mut self, token: Token) {
        self.history = mix(self.history, token as u64);
    }
}

impl Sample for FakeSampler {
    fn sample(&mut self, logits: &[f32], position: u32) -> Result<Sampled, SamplingError> {
        if self.draw.fails_at == Some(position) {
            return Err("no token is left".into());
        }
        let hidden = logits.iter().fold(0, |word, part| (word << 16) | (*part as u64));
        let at = mix(u64::from(position), self.draw.seed);
        let drawn = mix(mix(hidden, at), self.history) % u64::from(self.n_vocab);
        let token = self.draw.always.unwrap_or(drawn as Token);
        self.accept(token);
        Ok(Sampled { token, logprob: None, top: Vec::new() })
    }
}

/// A hidden word as logits, all its bits kept.
pub(in super::super) fn logits_of(hidden: u64) -> [f32; 4] {
    [48, 32, 16, 0].map(|shift| f32::from((hidden >> shift) as u16))
}
