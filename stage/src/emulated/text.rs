//! The text of an emulated replica: a function of the position alone, so that it is the same however requests are batched, cut
//! short and replayed.

use protocol::sampling::Sampling;

use crate::engine::{Sampled, SamplingError, Token, TokenProbability};

/// Tokens before the text repeats itself; a prime, so that it does not fall in step with anything.
const TOKENS: u32 = 89;

/// Which token stands at which position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TextRule {
    n_vocab: u32,
}

/// Draws a request's tokens by the rule.
#[derive(Debug)]
pub(crate) struct RuleSampler {
    rule: TextRule,
    top_logprobs: Option<u32>,
}

impl TextRule {
    /// Special tokens and single bytes stand at either end of a vocabulary; a quarter of the way in are ordinary pieces of words.
    pub(super) fn new(n_vocab: u32) -> Self {
        Self { n_vocab }
    }

    pub(crate) fn n_vocab(self) -> u32 {
        self.n_vocab
    }

    /// The token at a position.
    fn token(self, position: u32) -> Token {
        let first = self.n_vocab / 4;
        let n = TOKENS.min(self.n_vocab - first).max(1);
        // A vocabulary of 2^31 tokens is refused by the engine.
        (first + position % n) as Token
    }

    /// A sampler for a request, unless it asks for text that no rule can give.
    pub(crate) fn sampler(
        self,
        sampling: &Sampling,
        top_logprobs: Option<u32>,
    ) -> Result<RuleSampler, SamplingError> {
        if sampling.grammar.is_some() {
            return Err("an emulated replica writes by a fixed rule and can follow no grammar".into());
        }
        Ok(RuleSampler { rule: self, top_logprobs })
    }
}

impl RuleSampler {
    /// The token at a position: certain, where probabilities are asked for.
    pub(crate) fn sample(&self, position: u32) -> Sampled {
        let token = self.rule.token(position);
        let certain = TokenProbability { id: token, logprob: 0.0 };
        Sampled {
            token,
            logprob: self.top_logprobs.map(|_| certain.logprob),
            top: self.top_logprobs.filter(|n| *n > 0).map(|_| certain).into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_depend_on_the_position_and_lie_in_the_vocabulary() {
        let rule = TextRule::new(49_152);
        assert_eq!(rule.token(5), 12_288 + 5);
        assert_eq!(rule.token(5), rule.token(5 + TOKENS));
        for n_vocab in [1, 2, 3, 50, 400, 262_144] {
            let tokens = (0..1000).map(|position| TextRule::new(n_vocab).token(position));
            assert!(tokens.into_iter().all(|token| (0..n_vocab as Token).contains(&token)), "{n_vocab}");
        }
    }

    #[test]
    fn probabilities_are_given_where_they_are_asked_for() {
        let sampled = |top| TextRule::new(100).sampler(&Sampling::greedy(), top).unwrap().sample(0);
        assert_eq!((sampled(None).logprob, sampled(None).top.len()), (None, 0));
        assert_eq!((sampled(Some(0)).logprob, sampled(Some(0)).top.len()), (Some(0.0), 0));
        assert_eq!(sampled(Some(3)).top.len(), 1);
    }
}
