//! The assistant's message as it grows: what of it is answer, reasoning and tool calls, in the shape of OpenAI's chunks.
//!
//! Telling these apart is `llama`'s; here is what happens when an answer does not keep to its format: what was
//! understood is sent, and an answer of which nothing was understood is sent as it is.

use llama::chat::{ChatDelta, ChatMessage, ChatParser, ChatStream, Completeness, ToolCall};

use super::types::{AssistantMessage, CalledFunction, CalledTool, Delta, FunctionDelta, ToolCallDelta};

/// Grows a message from text.
pub(crate) struct Assembler {
    parser: ChatParser,
    stream: ChatStream,
    /// The beginning of the answer, until it was given to the stream.
    begun: String,
    text: String,
    /// Whether something was told of the message.
    has_told: bool,
    has_called: bool,
}

impl Assembler {
    /// With the parser of the model's format, and what the prompt holds of the answer.
    pub(crate) fn new(parser: ChatParser, begun: String) -> Self {
        let stream = parser.stream();
        Self { parser, stream, begun, text: String::new(), has_told: false, has_called: false }
    }

    /// Takes text and gives what can be told of the message since the last time.
    pub(crate) fn push(&mut self, text: &str) -> Option<Delta> {
        let text = std::mem::take(&mut self.begun) + text;
        self.text.push_str(&text);
        let deltas = self.stream.push(&text);
        // Text that is not in the format yet may be so with the next token.
        self.tell(deltas.unwrap_or_default())
    }

    /// Takes text that nobody waits for: the message is given by [`Self::finish`].
    pub(crate) fn collect(&mut self, text: &str) {
        self.text.push_str(&std::mem::take(&mut self.begun));
        self.text.push_str(text);
    }

    /// The end of a streamed message: what is left to tell. An answer that was cut off is partial.
    pub(crate) fn end(&mut self, completeness: Completeness) -> Option<Delta> {
        let ended = self.stream.finish(completeness);
        let deltas = ended.or_else(|_| self.stream.finish(Completeness::Partial)).unwrap_or_default();
        let delta = self.tell(deltas);
        if self.has_told {
            return delta;
        }
        (!self.text.is_empty())
            .then(|| Delta { content: Some(std::mem::take(&mut self.text)), ..Delta::default() })
    }

    /// Whether the streamed message calls tools.
    pub(crate) fn has_called(&self) -> bool {
        self.has_called
    }

    /// The whole message of collected text.
    pub(crate) fn finish(self, completeness: Completeness) -> ChatMessage {
        let parsed = self.parser.parse(&self.text, completeness);
        let parsed = parsed.or_else(|_| self.parser.parse(&self.text, Completeness::Partial));
        let mut message = parsed.unwrap_or_default();
        if message == ChatMessage::default() {
            message.content = self.text;
        }
        message.fill_tool_call_ids(&ChatMessage::default());
        message
    }

    fn tell(&mut self, deltas: Vec<ChatDelta>) -> Option<Delta> {
        if deltas.is_empty() {
            return None;
        }
        self.has_told = true;
        let mut joined = Delta::default();
        for delta in deltas {
            match delta {
                ChatDelta::Reasoning(text) => joined.reasoning_content = Some(text),
                ChatDelta::Content(text) => joined.content = Some(text),
                ChatDelta::ToolCall { index, id, name, arguments } => {
                    self.has_called = true;
                    let function = FunctionDelta { name: Some(name), arguments };
                    let call = ToolCallDelta { index, id: Some(id), kind: Some("function"), function };
                    joined.tool_calls.push(call);
                }
                ChatDelta::Arguments { index, arguments } => {
                    let function = FunctionDelta { name: None, arguments };
                    joined.tool_calls.push(ToolCallDelta { index, id: None, kind: None, function });
                }
            }
        }
        Some(joined)
    }
}

impl From<ChatMessage> for AssistantMessage {
    fn from(message: ChatMessage) -> Self {
        let ChatMessage { content, reasoning_content, tool_calls } = message;
        let tool_calls: Vec<_> = tool_calls.into_iter().map(CalledTool::from).collect();
        let content = (!content.is_empty() || tool_calls.is_empty()).then_some(content);
        let reasoning_content = (!reasoning_content.is_empty()).then_some(reasoning_content);
        Self { role: "assistant", content, reasoning_content, tool_calls, refusal: None }
    }
}

impl From<ToolCall> for CalledTool {
    fn from(call: ToolCall) -> Self {
        let ToolCall { id, name, arguments } = call;
        Self { id, kind: "function", function: CalledFunction { name, arguments } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_only_calls_tools_has_no_content() {
        let call = ToolCall { name: "f".into(), ..ToolCall::default() };
        let message = ChatMessage { tool_calls: vec![call], ..ChatMessage::default() };
        assert_eq!(AssistantMessage::from(message).content, None);
        assert_eq!(AssistantMessage::from(ChatMessage::default()).content.as_deref(), Some(""));
    }
}
