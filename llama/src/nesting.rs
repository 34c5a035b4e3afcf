//! How deep text nests, measured without recursion.
//!
//! llama.cpp parses, copies and prints JSON by recursion. A thread of tokio or of std has 2 MiB of stack, on which
//! some 1,000 levels of the PEG parser, or 20,000 of a JSON copy, end the process; so everything that comes from
//! outside is measured here first.

/// Deepest nesting of objects and arrays in the JSON text `json`; brackets inside of strings do not count.
pub(crate) fn json_depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0usize);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Deepest nesting of `[` and `{` in `text`, which need not be JSON: an upper bound for every way to read it.
pub(crate) fn bracket_depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0usize);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_strings_do_not_nest() {
        assert_eq!(json_depth(r#"{"a": ["[[[", "\"[[", 1], "b": {}}"#), 2);
    }

    #[test]
    fn unbalanced_text_is_measured_by_its_open_brackets() {
        assert_eq!(bracket_depth("a] [b {c ] :("), 2);
        assert_eq!(json_depth(&"[".repeat(5000)), 5000);
    }
}
