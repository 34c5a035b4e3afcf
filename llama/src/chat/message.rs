//! A chat message that was generated, and what is new in it since it was looked at last. Knows nothing of llama.cpp.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use serde::{Deserialize, Serialize};

/// What a model said, taken apart.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatMessage {
    /// The answer.
    pub content: String,
    /// What the model thought before it.
    pub reasoning_content: String,
    /// The calls it asks for.
    pub tool_calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ToolCall {
    /// The model's own id, or one of ours; see [`ChatMessage::fill_tool_call_ids`].
    pub id: String,
    /// The tool.
    pub name: String,
    /// Arguments: JSON text, cut off if the message is partial.
    pub arguments: String,
}

/// Something new in a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChatDelta {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A new tool call, whose name is complete.
    ToolCall {
        /// Its place among the message's calls.
        index: usize,
        /// Its id.
        id: String,
        /// The tool.
        name: String,
        /// The beginning of its arguments.
        arguments: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The call's place.
        index: usize,
        /// The text to append.
        arguments: String,
    },
}

/// A message is no continuation of the one before it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {part} no longer starts with what was sent of it")]
pub struct NotAContinuation {
    /// Which part of the message.
    pub part: &'static str,
}

impl ChatMessage {
    /// Gives calls without an id one of ours, or the one that the same call had in `before`.
    pub fn fill_tool_call_ids(&mut self, before: &Self) {
        for (index, call) in self.tool_calls.iter_mut().enumerate() {
            match before.tool_calls.get(index).map(|known| &known.id).filter(|id| !id.is_empty()) {
                Some(id) => call.id.clone_from(id),
                None if call.id.is_empty() => call.id = new_id(),
                None => {}
            }
        }
    }

    /// Takes the text that `prefill`, which the prompt holds, has in common with this message out of it.
    pub(super) fn without(mut self, prefill: &Self) -> Self {
        for (text, known) in
            [(&mut self.content, &prefill.content), (&mut self.reasoning_content, &prefill.reasoning_content)]
        {
            if let Some(rest) = text.strip_prefix(known.as_str()) {
                *text = rest.to_owned();
            }
        }
        self
    }
}

/// An id like OpenAI's. Random, since ids of one conversation must differ; RandomState is seeded by the system.
fn new_id() -> String {
    let random = || RandomState::new().hash_one(0u8);
    format!("call_{:016x}{:08x}", random(), random() >> 32)
}

/// What `new` has more than `old`, in the order reasoning, content, calls.
///
/// The name of a tool grows while it is generated. `sent` calls have been reported: a call is reported once its name
/// cannot grow any more, since its arguments or another call have begun or the message has `ended`.
pub(super) fn deltas(
    old: &ChatMessage,
    new: &ChatMessage,
    sent: &mut usize,
    ended: Ended,
) -> Result<Vec<ChatDelta>, NotAContinuation> {
    let mut deltas = Vec::new();
    let reasoning = added("reasoning", &old.reasoning_content, &new.reasoning_content)?;
    if !reasoning.is_empty() {
        deltas.push(ChatDelta::Reasoning(reasoning.to_owned()));
    }
    let content = added("content", &old.content, &new.content)?;
    if !content.is_empty() {
        deltas.push(ChatDelta::Content(content.to_owned()));
    }
    if new.tool_calls.len() < *sent {
        return Err(NotAContinuation { part: "list of tool calls" });
    }
    for (index, call) in new.tool_calls.iter().enumerate() {
        if index < *sent {
            let before = old.tool_calls.get(index).map_or("", |call| call.arguments.as_str());
            let arguments = added("arguments of a tool call", before, &call.arguments)?;
            if !arguments.is_empty() {
                deltas.push(ChatDelta::Arguments { index, arguments: arguments.to_owned() });
            }
            continue;
        }
        let is_last = index + 1 == new.tool_calls.len();
        if is_last && call.arguments.is_empty() && ended == Ended::No || call.name.is_empty() {
            break;
        }
        let ToolCall { id, name, arguments } = call.clone();
        deltas.push(ChatDelta::ToolCall { index, id, name, arguments });
        *sent = index + 1;
    }
    Ok(deltas)
}

/// Whether a message has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    No,
    Yes,
}

/// What has been sent once `new` was, after `old`: nothing is unsent, even if `new` is shorter.
pub(super) fn keep_longer(old: &ChatMessage, mut new: ChatMessage) -> ChatMessage {
    let keep = |new: &mut String, old: &str| {
        if old.len() > new.len() {
            old.clone_into(new);
        }
    };
    keep(&mut new.content, &old.content);
    keep(&mut new.reasoning_content, &old.reasoning_content);
    for (new, old) in new.tool_calls.iter_mut().zip(&old.tool_calls) {
        keep(&mut new.arguments, &old.arguments);
    }
    new
}

/// A text may also shrink: its end looked like text and turned out to begin a tag. What was sent stays sent.
fn added<'a>(part: &'static str, old: &str, new: &'a str) -> Result<&'a str, NotAContinuation> {
    match new.strip_prefix(old) {
        Some(rest) => Ok(rest),
        None if old.starts_with(new) => Ok(""),
        None => Err(NotAContinuation { part }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() }
    }

    fn message(content: &str, tool_calls: &[ToolCall]) -> ChatMessage {
        ChatMessage { content: content.into(), tool_calls: tool_calls.to_vec(), ..ChatMessage::default() }
    }

    #[test]
    fn a_call_is_reported_once_its_name_is_complete() {
        let mut sent = 0;
        let named = message("Hm.", &[call("c1", "get_wea", "")]);
        let deltas_ = deltas(&message("", &[]), &named, &mut sent, Ended::No).unwrap();
        assert_eq!(deltas_, [ChatDelta::Content("Hm.".into())]);
        let begun = message("Hm.", &[call("c1", "get_weather", "{\"a\"")]);
        let deltas_ = deltas(&named, &begun, &mut sent, Ended::No).unwrap();
        let expected = ChatDelta::ToolCall {
            index: 0,
            id: "c1".into(),
            name: "get_weather".into(),
            arguments: "{\"a\"".into(),
        };
        assert_eq!(deltas_, [expected]);
        let more = message("Hm.", &[call("c1", "get_weather", "{\"a\":1}")]);
        let deltas_ = deltas(&begun, &more, &mut sent, Ended::No).unwrap();
        assert_eq!(deltas_, [ChatDelta::Arguments { index: 0, arguments: ":1}".into() }]);
    }

    #[test]
    fn a_call_without_arguments_is_reported_at_the_end() {
        let mut sent = 0;
        let new = message("", &[call("c1", "now", "")]);
        assert_eq!(deltas(&new, &new, &mut sent, Ended::No), Ok(vec![]));
        assert_eq!(deltas(&new, &new, &mut sent, Ended::Yes).unwrap().len(), 1);
        assert_eq!(deltas(&new, &new, &mut sent, Ended::Yes), Ok(vec![]));
    }

    #[test]
    fn text_that_changes_is_an_error_and_text_that_shrinks_is_not() {
        let mut sent = 0;
        let old = message("abc", &[]);
        let shorter = message("ab", &[]);
        assert_eq!(deltas(&old, &shorter, &mut sent, Ended::No), Ok(vec![]));
        assert_eq!(keep_longer(&old, shorter), old);
        let error = deltas(&old, &message("axc", &[]), &mut sent, Ended::No).unwrap_err();
        assert_eq!(error.part, "content");
    }

    #[test]
    fn ids_are_kept_and_differ() {
        let mut first = message("", &[call("", "a", ""), call("own", "b", "")]);
        first.fill_tool_call_ids(&ChatMessage::default());
        assert!(first.tool_calls[0].id.starts_with("call_"));
        assert_eq!(first.tool_calls[1].id, "own");
        let mut second = message("", &[call("", "a", "{}"), call("own", "b", ""), call("", "c", "")]);
        second.fill_tool_call_ids(&first);
        assert_eq!(second.tool_calls[0].id, first.tool_calls[0].id);
        assert_ne!(second.tool_calls[2].id, second.tool_calls[0].id);
    }
}
