//! Stop strings in streamed text: nothing of a stop string is released, however the text is split.
//!
//! Knows nothing of tokens or UTF-8 decoding.

/// What one piece of text released.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Released {
    /// Text that no stop string can claim any more.
    pub(crate) text: String,
    /// The stop string that was completed; the text ends before it, and nothing may follow.
    pub(crate) stopped_by: Option<String>,
}

/// Looks for stop strings and holds back what may become one.
///
/// The stop string that is completed first ends the text, since the model would have been stopped there; of several
/// completed by the same character the longest counts, so that none of its characters is released.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far, where it may be the beginning of a stop string.
    held: String,
}

impl StopMatcher {
    /// Empty stop strings never match.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Takes the next text.
    pub(crate) fn push(&mut self, text: &str) -> Released {
        let known = self.held.len();
        self.held.push_str(text);
        if let Some((start, stop)) = first_completed(&self.held, known, &self.stops) {
            let stopped_by = Some(stop.to_owned());
            self.held.truncate(start);
            return Released { text: std::mem::take(&mut self.held), stopped_by };
        }
        let kept = self.held.split_off(hold_from(&self.held, &self.stops));
        Released { text: std::mem::replace(&mut self.held, kept), stopped_by: None }
    }

    /// The end of the text: what was held back is no stop string after all.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The match that ends first, after the first `known` bytes, and where it begins.
fn first_completed<'a>(text: &str, known: usize, stops: &'a [String]) -> Option<(usize, &'a str)> {
    let ends = (known + 1..=text.len()).filter(|&end| text.is_char_boundary(end));
    ends.filter_map(|end| {
        let matches = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        matches.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), stop.as_str()))
    })
    .next()
}

/// Where the longest end of the text begins that could grow into a stop string.
fn hold_from(text: &str, stops: &[String]) -> usize {
    let longest = stops.iter().map(String::len).max().unwrap_or(0);
    let earliest = (text.len() + 1).saturating_sub(longest);
    (earliest..text.len())
        .filter(|&start| text.is_char_boundary(start))
        .find(|&start| stops.iter().any(|stop| stop.starts_with(&text[start..])))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(ToString::to_string).collect())
    }

    fn stream<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<String>) {
        let mut matcher = matcher(stops);
        let mut text = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            text.push_str(&released.text);
            if released.stopped_by.is_some() {
                return (text, released.stopped_by);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    #[test]
    fn case_18_a_stop_string_may_span_tokens() {
        let mut matcher = matcher(&["</end>"]);
        assert_eq!(matcher.push("fin</").text, "fin");
        assert_eq!(matcher.push("en").text, "");
        let last = matcher.push("d> more");
        assert_eq!(last.text, "");
        assert_eq!(last.stopped_by.as_deref(), Some("</end>"));
    }

    #[test]
    fn case_18_a_stop_string_may_be_a_prefix_of_another() {
        assert_eq!(stream(&["ab", "abc"], ["xab", "c"]), ("x".into(), Some("ab".into())));
        assert_eq!(stream(&["abcd", "abce"], ["xabc", "e"]), ("x".into(), Some("abce".into())));
        assert_eq!(stream(&["abc", "bcd"], ["xab", "xbcd"]), ("xabx".into(), Some("bcd".into())));
    }

    #[test]
    fn of_stop_strings_that_end_together_the_longest_counts() {
        assert_eq!(stream(&["OP", "STOP"], ["a ST", "OP"]), ("a ".into(), Some("STOP".into())));
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_is_released() {
        let mut matcher = matcher(&["\n\nUser:"]);
        assert_eq!(matcher.push("a\n\n").text, "a");
        assert_eq!(matcher.push("Used").text, "\n\nUsed");
        assert_eq!(matcher.push("\n").text, "");
        assert_eq!(matcher.finish(), "\n");
    }

    #[test]
    fn a_repetitive_beginning_does_not_hide_a_match() {
        assert_eq!(stream(&["aab"], ["a", "a", "a", "b"]), ("a".into(), Some("aab".into())));
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        assert_eq!(matcher(&[]).push("text").text, "text");
        assert_eq!(matcher(&[""]).push("text").text, "text");
    }

    /// The same, by looking at every beginning of the whole text.
    fn naive(text: &str, stops: &[String]) -> (String, Option<String>) {
        let boundaries = text.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in boundaries {
            let seen = &text[..end];
            let hit = stops.iter().filter(|stop| seen.ends_with(*stop)).max_by_key(|stop| stop.len());
            if let Some(stop) = hit {
                return (seen[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn any_split_gives_what_a_search_of_the_whole_text_gives(
            pieces in prop::collection::vec("[ab海]{0,4}", 0..10),
            stops in prop::collection::vec("[ab海]{1,4}", 0..4),
        ) {
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let streamed = stream(&refs, pieces.iter().map(String::as_str));
            prop_assert_eq!(streamed, naive(&pieces.concat(), &stops));
        }

        #[test]
        fn released_text_never_waits_longer_than_it_must(
            text in "[ab]{0,12}",
            stops in prop::collection::vec("[ab]{1,4}", 0..4),
        ) {
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut matcher = matcher(&refs);
            let released = matcher.push(&text);
            if released.stopped_by.is_none() {
                let held = &text[released.text.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
            }
        }
    }
}
