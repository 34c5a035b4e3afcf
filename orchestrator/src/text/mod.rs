//! From tokens' bytes to the text a client may see: whole characters only, and nothing of a stop string.
//!
//! Knows nothing of vocabularies, requests or HTTP: it is handed bytes.

mod stop;
mod utf8;

use std::collections::VecDeque;

use stop::StopMatcher;
use utf8::Utf8Stream;

/// Text that may be sent now, and what was attached to the tokens it came from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece<T> {
    /// The text; often empty, while a character or a stop string may be in the making.
    pub(crate) text: String,
    /// What was attached to the tokens whose text is now sent to the end.
    pub(crate) tokens: Vec<T>,
    /// The stop string that ended the text. Nothing may be pushed after it.
    pub(crate) stopped_by: Option<String>,
}

/// The text of one generation. `T` is whatever travels with a token, such as its log probability.
#[derive(Debug)]
pub(crate) struct TextStream<T> {
    utf8: Utf8Stream,
    stops: StopMatcher,
    /// Bytes of text decoded so far.
    decoded: usize,
    /// Bytes of text released so far.
    released: usize,
    waiting: VecDeque<Waiting<T>>,
}

#[derive(Debug)]
struct Waiting<T> {
    /// Where the token's text begins.
    start: usize,
    /// Text that must have been released before the token is.
    end: usize,
    token: T,
}

impl<T> TextStream<T> {
    /// A stream that ends at the first of `stops`.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self {
            utf8: Utf8Stream::default(),
            stops: StopMatcher::new(stops),
            decoded: 0,
            released: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Takes one token's bytes.
    pub(crate) fn push(&mut self, bytes: &[u8], token: Option<T>) -> Piece<T> {
        let start = self.decoded;
        let text = self.utf8.push(bytes);
        self.decoded += text.len();
        if let Some(token) = token {
            // A token that ends inside a character is sent with the rest of that character.
            let end = self.decoded + usize::from(self.utf8.is_waiting());
            self.waiting.push_back(Waiting { start, end, token });
        }
        self.release(&text)
    }

    /// The end of the generation: what was held back is released.
    pub(crate) fn finish(&mut self) -> Piece<T> {
        let rest = self.utf8.finish();
        let mut last = self.release(rest);
        if last.stopped_by.is_none() {
            last.text.push_str(&self.stops.finish());
            last.tokens.extend(self.waiting.drain(..).map(|waiting| waiting.token));
        }
        last
    }

    fn release(&mut self, text: &str) -> Piece<T> {
        let found = self.stops.push(text);
        self.released += found.text.len();
        let mut tokens = Vec::new();
        while let Some(next) = self.waiting.pop_front() {
            // Of the tokens that a stop string cut, those that still have text before it count as sent.
            let cut = found.stopped_by.is_some() && next.start < self.released;
            if next.end <= self.released && found.stopped_by.is_none() || cut {
                tokens.push(next.token);
            } else {
                self.waiting.push_front(next);
                break;
            }
        }
        Piece { text: found.text, tokens, stopped_by: found.stopped_by }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str]) -> TextStream<u32> {
        TextStream::new(stops.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn tokens_are_released_with_their_last_byte_of_text() {
        let mut stream = stream(&[]);
        let (head, tail) = "🐟".as_bytes().split_at(2);
        assert_eq!(stream.push(b"a", Some(1)).tokens, [1]);
        assert_eq!(
            stream.push(head, Some(2)),
            Piece { text: String::new(), tokens: vec![], stopped_by: None }
        );
        assert_eq!(
            stream.push(tail, Some(3)),
            Piece { text: "🐟".into(), tokens: vec![2, 3], stopped_by: None }
        );
    }

    #[test]
    fn tokens_of_held_text_wait_with_it() {
        let mut stream = stream(&["END"]);
        assert_eq!(
            stream.push(b"a E", Some(1)),
            Piece { text: "a ".into(), tokens: vec![], stopped_by: None }
        );
        assert_eq!(stream.push(b"N", Some(2)).tokens, [] as [u32; 0]);
        assert_eq!(
            stream.push(b"e", Some(3)),
            Piece { text: "ENe".into(), tokens: vec![1, 2, 3], stopped_by: None }
        );
    }

    #[test]
    fn case_18_tokens_of_a_stop_string_are_not_sent() {
        let mut stream = stream(&["END"]);
        stream.push(b"a E", Some(1));
        stream.push(b"N", Some(2));
        let last = stream.push(b"D and more", Some(3));
        assert_eq!(last.text, "");
        assert_eq!(last.tokens, [1], "its text was sent in part");
        assert_eq!(last.stopped_by.as_deref(), Some("END"));
    }

    #[test]
    fn the_end_releases_everything() {
        let mut stream = stream(&["END"]);
        stream.push(b"EN", Some(1));
        stream.push(b"\xf0\x9f", Some(2));
        assert_eq!(
            stream.finish(),
            Piece { text: "EN\u{FFFD}".into(), tokens: vec![1, 2], stopped_by: None }
        );
    }

    #[test]
    fn tokens_without_text_are_released_in_their_order() {
        let mut stream = stream(&[]);
        assert_eq!(stream.push(b"", Some(1)).tokens, [1]);
        assert_eq!(stream.push(b"x", None).text, "x");
    }
}
