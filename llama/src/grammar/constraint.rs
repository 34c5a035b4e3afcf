//! A grammar, and when it counts: a lazy one does not while the model thinks, where a tool call is only talked about
//! (common/sampling.cpp, `grammar_should_apply`).

use llama_sys as sys;

use super::{Grammar, GrammarError, GrammarState};
use crate::shim::ShimError;
use crate::{AddSpecial, Special, Token, Vocab};

#[derive(Debug)]
pub(crate) struct Constraint {
    grammar: GrammarState,
    thinking: Option<Thinking>,
}

impl Constraint {
    pub(crate) fn new(vocab: &Vocab, grammar: &Grammar) -> Result<Self, GrammarError> {
        let thinking = match grammar.thinking.as_ref().filter(|_| grammar.lazy) {
            Some(tags) => {
                let ends = tags.ends.iter().map(|end| tokens_of(vocab, end)).collect::<Result<_, _>>()?;
                Thinking::new(tokens_of(vocab, &tags.start)?, ends)
            }
            None => None,
        };
        let mut constraint = Self { grammar: GrammarState::new(vocab, grammar)?, thinking };
        for token in prefill_tokens(vocab, &grammar.prefill)? {
            if grammar.lazy {
                constraint.thinking.as_mut().map(|thinking| thinking.accept(token));
            } else {
                constraint.grammar.accept(token).map_err(|error| GrammarError::Refused {
                    reason: format!("the grammar does not begin with what the prompt ends with: {error}"),
                })?;
            }
        }
        Ok(constraint)
    }

    fn counts(&self) -> bool {
        self.thinking.as_ref().is_none_or(|thinking| !thinking.is_inside)
    }

    pub(crate) fn allows(&self, token: Token) -> Result<bool, ShimError> {
        if self.counts() { self.grammar.allows(token) } else { Ok(true) }
    }

    pub(crate) fn mask(&self, candidates: &mut [sys::llama_token_data]) -> Result<(), ShimError> {
        if self.counts() { self.grammar.mask(candidates) } else { Ok(()) }
    }

    pub(crate) fn accept(&mut self, token: Token) -> Result<(), ShimError> {
        if self.counts() {
            self.grammar.accept(token)?;
            if let Some(thinking) = &mut self.thinking {
                thinking.accept(token);
            }
            return Ok(());
        }
        // What ends the thinking may also be what triggers: some models go from it straight to a tool call.
        let end = self.thinking.as_mut().and_then(|thinking| thinking.accept(token)).unwrap_or_default();
        end.into_iter().try_for_each(|token| self.grammar.accept(token))
    }
}

fn tokens_of(vocab: &Vocab, text: &str) -> Result<Vec<Token>, GrammarError> {
    vocab
        .tokenize(text, AddSpecial::No, Special::Control)
        .map_err(|error| GrammarError::Refused { reason: error.to_string() })
}

/// The tokens of the prompt's end. Some tokenisers put a space before the first, which the prompt has not.
fn prefill_tokens(vocab: &Vocab, prefill: &str) -> Result<Vec<Token>, GrammarError> {
    let mut tokens = tokens_of(vocab, prefill)?;
    let Some(first) = tokens.first() else { return Ok(tokens) };
    let bytes = vocab
        .token_bytes(*first, Special::Control)
        .map_err(|error| GrammarError::Refused { reason: error.to_string() })?;
    if bytes.first().is_some_and(u8::is_ascii_whitespace) && !prefill.starts_with(char::is_whitespace) {
        tokens.remove(0);
    }
    Ok(tokens)
}

/// Watches for the tags around a model's reasoning.
#[derive(Debug)]
struct Thinking {
    start: Vec<Token>,
    /// Longest first: "\n</think>" is to be found before "</think>".
    ends: Vec<Vec<Token>>,
    is_inside: bool,
    /// Tokens since the last tag, as many as the longest tag has.
    recent: Vec<Token>,
}

impl Thinking {
    /// `None` without tags to look for.
    fn new(start: Vec<Token>, mut ends: Vec<Vec<Token>>) -> Option<Self> {
        ends.retain(|end| !end.is_empty());
        ends.sort_by_key(|end| std::cmp::Reverse(end.len()));
        let has_tags = !start.is_empty() && !ends.is_empty();
        has_tags.then(|| Self { start, ends, is_inside: false, recent: Vec::new() })
    }

    /// Moves on by `token`; the tokens of the tag that it completed, if it ended the thinking.
    fn accept(&mut self, token: Token) -> Option<Vec<Token>> {
        let longest = self.ends[0].len().max(self.start.len());
        if self.recent.len() == longest {
            self.recent.remove(0);
        }
        self.recent.push(token);
        if self.is_inside {
            let end = self.ends.iter().find(|end| self.recent.ends_with(end))?.clone();
            self.is_inside = false;
            self.recent.clear();
            return Some(end);
        }
        if self.recent.ends_with(&self.start) {
            self.is_inside = true;
            self.recent.clear();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[i32]) -> Vec<Token> {
        ids.iter().map(|id| Token(*id)).collect()
    }

    #[test]
    fn thinking_is_between_its_tags() {
        let mut thinking = Thinking::new(tokens(&[1, 2]), vec![tokens(&[9]), tokens(&[8, 9])]).unwrap();
        let mut inside = Vec::new();
        for id in [2, 1, 1, 2, 2, 8, 3, 8, 9, 9, 1, 2, 9] {
            thinking.accept(Token(id));
            inside.push(u8::from(thinking.is_inside));
        }
        assert_eq!(inside, [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn the_longest_end_tag_is_reported() {
        let mut thinking = Thinking::new(tokens(&[1]), vec![tokens(&[9]), tokens(&[8, 9])]).unwrap();
        assert_eq!(thinking.accept(Token(1)), None);
        assert_eq!(thinking.accept(Token(8)), None);
        assert_eq!(thinking.accept(Token(9)), Some(tokens(&[8, 9])));
    }

    #[test]
    fn without_tags_nothing_is_watched() {
        assert!(Thinking::new(vec![], vec![tokens(&[9])]).is_none());
        assert!(Thinking::new(tokens(&[1]), vec![vec![]]).is_none());
    }
}
