//! Incremental UTF-8: a token's bytes may end in the middle of a character, which then waits for the next token.
//!
//! Knows nothing of tokens, stops or requests.

/// Turns a stream of bytes into text. What no later byte can make valid becomes U+FFFD, one for each maximal invalid
/// part, as [`String::from_utf8_lossy`] does it for the whole.
#[derive(Debug, Default)]
pub(crate) struct Utf8Stream {
    /// The beginning of a character: three bytes at most.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Takes the next bytes and gives the characters that are complete now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        let mut all = std::mem::take(&mut self.pending);
        all.extend_from_slice(bytes);
        let mut text = String::with_capacity(all.len());
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let rest = chunk.invalid();
            if chunks.peek().is_none() && is_unfinished(rest) {
                self.pending = rest.to_vec();
            } else if !rest.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }

    /// Whether a character is waiting for its other bytes.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The end of the bytes: a character that never became whole is given as U+FFFD.
    pub(crate) fn finish(&mut self) -> &'static str {
        let was_waiting = self.is_waiting();
        self.pending.clear();
        if was_waiting { "\u{FFFD}" } else { "" }
    }
}

/// Whether more bytes could make this the encoding of a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(e) if e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn case_17_a_split_emoji_arrives_whole() {
        let mut stream = Utf8Stream::default();
        let (head, tail) = "🐟".as_bytes().split_at(2);
        assert_eq!(stream.push(head), "");
        assert!(stream.is_waiting());
        assert_eq!(stream.push(tail), "🐟");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn case_17_a_character_that_never_ends_becomes_a_replacement_character() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"a\xe6\xb5"), "a");
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.push(b"b"), "b", "nothing is left over");
    }

    #[test]
    fn invalid_bytes_do_not_wait() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"\xff"), "\u{FFFD}");
        assert_eq!(stream.push(b"\xe6"), "");
        assert_eq!(stream.push(b"x"), "\u{FFFD}x");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_text_of_the_whole(
            parts in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..5),
                    "[a-zé海🐟]{0,3}".prop_map(String::into_bytes),
                ],
                0..12,
            ),
            cut in 1usize..5,
        ) {
            let whole: Vec<u8> = parts.concat();
            let mut stream = Utf8Stream::default();
            let mut text: String = whole.chunks(cut).map(|part| stream.push(part)).collect();
            text.push_str(stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }
    }
}
