//! What is asked: prompts out of a file, or made up with a given number of tokens. A prompt depends on its index and
//! the seed alone, so that two servers are asked the same, and no two requests of a run share more than a chat template.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use crate::trace::Trace;

/// Longer than any model's context.
const MOST_TOKENS: u32 = 4_000_000;

/// How often a text's length is corrected.
const ROUNDS: u32 = 6;

/// Words that are one token, with the space before them, in most vocabularies.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job",
    "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power",
    "hour", "game", "line", "end", "member", "law", "car",
];

/// Counts a text's tokens as some model would.
pub trait CountTokens: Send + Sync {
    /// How many it has.
    fn count(&self, text: &str) -> usize;
}

/// One question.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// What it says.
    pub content: Content,
    /// How long the answer may be.
    pub max_tokens: u32,
}

/// What a question says.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// A user's message, or a text to complete.
    Text(String),
    /// A whole conversation, in OpenAI's form.
    Messages(serde_json::Value),
}

/// A number of tokens, or a range out of which each request draws its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    least: u32,
    most: u32,
}

/// What is not a length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a number of tokens from 1 to {MOST_TOKENS}, nor a range like 50-200")]
pub struct LengthsError(String);

impl FromStr for Lengths {
    type Err = LengthsError;

    fn from_str(text: &str) -> Result<Self, LengthsError> {
        let number = |text: &str| text.trim().parse().ok().filter(|n| (1..=MOST_TOKENS).contains(n));
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            _ => Err(LengthsError(text.to_owned())),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.least == self.most {
            write!(f, "{}", self.least)
        } else {
            write!(f, "{}-{}", self.least, self.most)
        }
    }
}

impl Lengths {
    fn draw(self, rng: &mut StdRng) -> u32 {
        rng.random_range(self.least..=self.most)
    }
}

/// Where prompts come from.
#[derive(Debug, Clone)]
pub enum Prompts {
    /// In this order, then from the start again. Not empty.
    Listed(Arc<[Listed]>),
    /// Made up.
    Synthetic(Synthetic),
}

/// A prompt out of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    content: Content,
    max_tokens: Option<u32>,
}

/// Why a file has no prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptFileError {
    /// Nothing in it.
    #[error(
        "the prompts file has no prompt: a line is expected for each, of text or of JSON with \"prompt\" or \"messages\""
    )]
    Empty,
    /// A line of JSON cannot be read.
    #[error("line {line} of the prompts file")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

#[derive(Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "\"prompt\" or \"messages\" is expected, and at most \"max_tokens\" beside it"
)]
enum Line {
    Prompt { prompt: String, max_tokens: Option<u32> },
    Messages { messages: Vec<serde_json::Value>, max_tokens: Option<u32> },
}

impl Prompts {
    /// Reads a prompt a line: text, or objects if the first line is one.
    pub fn parse(text: &str) -> Result<Self, PromptFileError> {
        let lines: Vec<(usize, &str)> =
            (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()).collect();
        let is_json = lines.first().is_some_and(|(_, line)| line.trim_start().starts_with('{'));
        let read = |(line, text): (usize, &str)| {
            if !is_json {
                return Ok(Listed { content: Content::Text(text.to_owned()), max_tokens: None });
            }
            let read = serde_json::from_str(text).map_err(|source| PromptFileError::Line { line, source })?;
            Ok(match read {
                Line::Prompt { prompt, max_tokens } => Listed { content: Content::Text(prompt), max_tokens },
                Line::Messages { messages, max_tokens } => {
                    Listed { content: Content::Messages(messages.into()), max_tokens }
                }
            })
        };
        let prompts: Arc<[Listed]> = lines.into_iter().map(read).collect::<Result<_, PromptFileError>>()?;
        if prompts.is_empty() { Err(PromptFileError::Empty) } else { Ok(Self::Listed(prompts)) }
    }
}

/// Texts of common words in no order: prompts that no prefix cache knows, of a given length.
#[derive(Clone)]
pub struct Synthetic {
    lengths: Lengths,
    count: Option<Arc<dyn CountTokens>>,
    words: Vec<&'static str>,
}

impl fmt::Debug for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Synthetic").field("lengths", &self.lengths).finish_non_exhaustive()
    }
}

impl Synthetic {
    /// Prompts of `lengths` tokens: exactly, as far as the vocabulary allows it, if `count` counts them; else so many words.
    pub fn new(lengths: Lengths, count: Option<Arc<dyn CountTokens>>) -> Self {
        let is_one_token = |word: &&str| match &count {
            Some(count) => count.count(&format!("a {word}")) == count.count("a") + 1,
            None => true,
        };
        let mut words: Vec<&str> = WORDS.into_iter().filter(is_one_token).collect();
        if words.is_empty() {
            words = WORDS.to_vec();
        }
        Self { lengths, count, words }
    }

    fn text(&self, tokens: u32, rng: &mut StdRng) -> String {
        let mut chosen: Vec<&str> = Vec::new();
        let mut push = |chosen: &mut Vec<&str>, n: usize| {
            chosen.extend((0..n).filter_map(|_| self.words.choose(rng).copied()));
        };
        push(&mut chosen, tokens as usize);
        let Some(count) = &self.count else { return chosen.join(" ") };
        // Where every word is one token this ends at once or after a correction; where words are several tokens, or merge,
        // each round comes nearer.
        for _ in 0..ROUNDS {
            let (is, wanted) = (count.count(&chosen.join(" ")).max(1), tokens as usize);
            let so_far = chosen.len();
            let words = |tokens: usize| (tokens * so_far / is).max(1);
            match is.cmp(&wanted) {
                Ordering::Equal => break,
                Ordering::Less => push(&mut chosen, words(wanted - is)),
                Ordering::Greater => chosen.truncate(so_far.saturating_sub(words(is - wanted)).max(1)),
            }
        }
        chosen.join(" ")
    }
}

/// The requests of a run, by index.
#[derive(Debug, Clone)]
pub struct Requests {
    /// What is asked, where the trace does not say.
    pub prompts: Prompts,
    /// How long answers may be, where neither prompt nor trace say.
    pub max_tokens: Lengths,
    /// Overrides lengths and prompts of the requests, in order.
    pub trace: Option<Trace>,
    /// The same seed gives the same requests.
    pub seed: u64,
}

impl Requests {
    /// The request at `index`.
    pub fn prompt(&self, index: u64) -> Prompt {
        // Odd, so that every index has a seed of its own.
        let mut rng = StdRng::seed_from_u64(self.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let recorded = self.trace.as_ref().map(|trace| trace.entry(index));
        let drawn = self.max_tokens.draw(&mut rng);
        let (content, own) = match (recorded.and_then(|entry| entry.prompt.clone()), &self.prompts) {
            (Some(content), _) => (content, None),
            (None, Prompts::Listed(listed)) => {
                let Listed { content, max_tokens } = &listed[(index % listed.len() as u64) as usize];
                (content.clone(), *max_tokens)
            }
            (None, Prompts::Synthetic(synthetic)) => {
                let tokens = recorded.and_then(|entry| entry.prompt_tokens);
                let tokens = tokens.unwrap_or_else(|| synthetic.lengths.draw(&mut rng)).min(MOST_TOKENS);
                (Content::Text(synthetic.text(tokens, &mut rng)), None)
            }
        };
        let max_tokens = recorded.and_then(|entry| entry.max_tokens).or(own).unwrap_or(drawn);
        Prompt { content, max_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two letters are a token: a vocabulary in which no word is one.
    struct Pairs;

    impl CountTokens for Pairs {
        fn count(&self, text: &str) -> usize {
            text.len().div_ceil(2)
        }
    }

    /// Words are tokens, and so is the text's beginning.
    struct Words;

    impl CountTokens for Words {
        fn count(&self, text: &str) -> usize {
            text.split_whitespace().count() + 1
        }
    }

    fn lengths(text: &str) -> Lengths {
        text.parse().unwrap()
    }

    fn requests(prompts: Prompts) -> Requests {
        Requests { prompts, max_tokens: lengths("16"), trace: None, seed: 3 }
    }

    fn synthetic(of: &str, count: Option<Arc<dyn CountTokens>>) -> Requests {
        requests(Prompts::Synthetic(Synthetic::new(lengths(of), count)))
    }

    fn text(requests: &Requests, index: u64) -> String {
        match requests.prompt(index).content {
            Content::Text(text) => text,
            Content::Messages(messages) => panic!("{messages}"),
        }
    }

    #[test]
    fn lengths_are_numbers_or_ranges() {
        assert_eq!(lengths("50 - 200"), Lengths { least: 50, most: 200 });
        assert_eq!(lengths("7").to_string(), "7");
        for bad in ["0", "5-", "-5", "9-3", "1e3", "", "4000001"] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_has_a_prompt_a_line() {
        let requests = requests(Prompts::parse("one\n\n two \n").unwrap());
        assert_eq!([0, 1, 2].map(|index| text(&requests, index)), ["one", " two ", "one"]);
        assert!(matches!(Prompts::parse("\n  \n"), Err(PromptFileError::Empty)));
    }

    #[test]
    fn a_file_of_objects_has_conversations_and_lengths() {
        let file = "{\"prompt\": \"hi\", \"max_tokens\": 3}\n{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}";
        let requests = requests(Prompts::parse(file).unwrap());
        assert_eq!(requests.prompt(0), Prompt { content: Content::Text("hi".to_owned()), max_tokens: 3 });
        let Prompt { content: Content::Messages(messages), max_tokens: 16 } = requests.prompt(1) else {
            panic!()
        };
        assert_eq!(messages[0]["content"], "x");
        let error = Prompts::parse("{\"prompt\": \"hi\"}\n{\"promt\": \"hi\"}").unwrap_err();
        assert_eq!(error.to_string(), "line 2 of the prompts file");
    }

    #[test]
    fn a_prompt_depends_on_seed_and_index_alone() {
        let requests = synthetic("20-40", None);
        assert_eq!(requests.prompt(5), requests.prompt(5));
        assert_ne!(requests.prompt(5), requests.prompt(6));
        assert_ne!(requests.prompt(5), Requests { seed: 4, ..requests.clone() }.prompt(5));
    }

    #[test]
    fn synthetic_prompts_have_the_length_asked_for() {
        assert_eq!(text(&synthetic("30", None), 0).split(' ').count(), 30);
        for tokens in ["1", "2", "30", "1000"] {
            let exact = synthetic(tokens, Some(Arc::new(Words)));
            let counted = Words.count(&text(&exact, 1));
            assert_eq!(counted, tokens.parse::<usize>().unwrap().max(2), "{tokens}");
        }
        let near = Pairs.count(&text(&synthetic("100", Some(Arc::new(Pairs))), 0));
        assert!((90..=100).contains(&near), "{near}");
        let drawn: Vec<usize> =
            (0..50).map(|index| text(&synthetic("5-9", None), index).split(' ').count()).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&5), Some(&9)));
    }

    #[test]
    fn a_trace_overrides_lengths_and_prompts() {
        let trace = Trace::parse(
            "{\"at\": 0, \"prompt_tokens\": 4, \"max_tokens\": 2}\n{\"at\": 1, \"prompt\": \"hi\"}",
        );
        let requests = Requests { trace: Some(trace.unwrap()), ..synthetic("30", None) };
        assert_eq!((text(&requests, 0).split(' ').count(), requests.prompt(0).max_tokens), (4, 2));
        assert_eq!((text(&requests, 1).as_str(), requests.prompt(1).max_tokens), ("hi", 16));
    }
}
