//! A chat request in OpenAI's words, with llama-server's additions, checked and put into the form the shim takes.
//! Knows nothing of templates but their capabilities.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Capabilities, ChatError};
use crate::grammar;
use crate::nesting::json_depth;

/// Who may speak. llama.cpp takes any word, and templates then drop the message or put the word into the prompt.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Longest name of a tool, in bytes: OpenAI allows 64.
const MAX_TOOL_NAME: usize = 128;

/// Deepest nesting of a tool call's arguments in the history: as deep as serde_json reads.
const MAX_ARGUMENT_DEPTH: usize = 128;

/// What to say, and how. Field names are OpenAI's or llama-server's; absent fields mean what they mean there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// The conversation, in OpenAI's shape; only text.
    pub messages: Vec<Value>,
    /// Tools that may be called, in OpenAI's shape.
    pub tools: Option<Vec<Value>>,
    /// "auto", "none", "required", or `{"type": "function", "function": {"name": …}}`.
    pub tool_choice: Option<Value>,
    /// Whether an answer may hold several calls; else as the template can.
    pub parallel_tool_calls: Option<bool>,
    /// What the answer must look like.
    pub response_format: Option<ResponseFormat>,
    /// The answer must follow this schema.
    pub json_schema: Option<Value>,
    /// The answer must follow this GBNF grammar.
    pub grammar: Option<String>,
    /// How reasoning is reported.
    pub reasoning_format: Option<ReasoningFormat>,
    /// "none" turns thinking off; other words are given to the template.
    pub reasoning_effort: Option<String>,
    /// Variables for the template; `enable_thinking` (a boolean) is one.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the prompt ends where the assistant begins to speak; true unless an answer is continued.
    pub add_generation_prompt: Option<bool>,
    /// Continue the last message, the assistant's, instead of answering it; done anyway if the assistant spoke last.
    pub continue_final_message: Option<Continuation>,
}

/// OpenAI's `response_format`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponseFormat {
    /// Any text.
    Text,
    /// A JSON object, or what `schema` says.
    JsonObject {
        /// llama-server's addition.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        schema: Option<Value>,
    },
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema and its name.
        json_schema: NamedSchema,
    },
}

/// The `json_schema` of a [`ResponseFormat`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NamedSchema {
    /// A name, of no consequence here.
    pub name: Option<String>,
    /// The schema; any object if absent.
    pub schema: Option<Value>,
    /// Answers always follow the schema; of no consequence here.
    pub strict: Option<bool>,
}

/// How reasoning is told from the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReasoningFormat {
    /// It is put into `reasoning_content`.
    #[default]
    Auto,
    /// The same.
    Deepseek,
    /// It is left in the content, tags and all.
    None,
}

/// Which part of the last message is continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Continuation {
    /// The one that ends it.
    Auto,
    /// Its content.
    Content,
    /// Its reasoning.
    Reasoning,
}

impl TryFrom<Value> for Continuation {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match value {
            Value::Bool(true) => Ok(Self::Auto),
            Value::String(part) if part == "content" => Ok(Self::Content),
            Value::String(part) if part == "reasoning_content" => Ok(Self::Reasoning),
            other => Err(format!("expected true, \"content\" or \"reasoning_content\", not {other}")),
        }
    }
}

impl From<Continuation> for Value {
    fn from(continuation: Continuation) -> Self {
        match continuation {
            Continuation::Auto => Self::Bool(true),
            Continuation::Content => Self::from("content"),
            Continuation::Reasoning => Self::from("reasoning_content"),
        }
    }
}

/// A request that has been checked, in the form the shim takes.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) json: Value,
    pub(super) reasoning_format: ReasoningFormat,
    pub(super) is_continuation: bool,
    /// Tools may be called, or a schema is to be followed.
    pub(super) has_structure: bool,
    /// The tools' answers must be of this grammar, if the template has none of its own.
    pub(super) must_call: bool,
}

/// The tools that may be called, and what must be.
struct Tools {
    list: Vec<Value>,
    choice: &'static str,
}

impl ChatRequest {
    pub(super) fn check(&self, capabilities: &Capabilities) -> Result<Checked, ChatError> {
        check_messages(&self.messages)?;
        let tools = self.tools(capabilities)?;
        let schema = self.schema(&tools)?;
        let continuation = self.continuation()?;
        let (enable_thinking, kwargs) = self.template_variables(capabilities)?;
        let reasoning_format = self.reasoning_format.unwrap_or_default();
        let can_call = !tools.list.is_empty() && tools.choice != "none";
        let mut json = json!({
            "messages": self.messages,
            "tool_choice": tools.choice,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(capabilities.parallel_tool_calls),
            "add_generation_prompt": self.add_generation_prompt.unwrap_or(continuation.is_none()),
            "reasoning_format": reasoning_format,
            "enable_thinking": enable_thinking,
            "chat_template_kwargs": kwargs,
        });
        let has_structure = can_call || schema.is_some();
        if !tools.list.is_empty() {
            json["tools"] = tools.list.into();
        }
        if let Some(schema) = schema {
            json["json_schema"] = schema;
        }
        if let Some(continuation) = continuation {
            json["continue_final_message"] = continuation.into();
        }
        Ok(Checked {
            json,
            reasoning_format,
            is_continuation: continuation.is_some(),
            has_structure,
            must_call: can_call && tools.choice == "required",
        })
    }

    fn tools(&self, capabilities: &Capabilities) -> Result<Tools, ChatError> {
        let mut list = self.tools.clone().unwrap_or_default();
        for (index, tool) in list.iter_mut().enumerate() {
            check_tool(tool, index)?;
        }
        let choice = match &self.tool_choice {
            None | Some(Value::Null) => "auto",
            Some(Value::String(word)) => ["auto", "none", "required"]
                .into_iter()
                .find(|known| known == word)
                .ok_or_else(|| refuse("tool_choice", format!("unknown choice \"{word}\"")))?,
            Some(choice) => {
                keep_chosen(&mut list, choice)?;
                "required"
            }
        };
        if choice == "required" && list.is_empty() {
            return Err(refuse("tool_choice", "a tool is required, but no tools are given"));
        }
        if !list.is_empty() && choice != "none" && !capabilities.tools && !capabilities.tool_calls {
            return Err(refuse("tools", "the chat template of this model has no tool calls"));
        }
        Ok(Tools { list, choice })
    }

    /// The schema the answer must follow.
    fn schema(&self, tools: &Tools) -> Result<Option<Value>, ChatError> {
        let (param, schema) = match (&self.response_format, &self.json_schema) {
            (Some(ResponseFormat::JsonObject { schema }), None) => ("response_format", schema.clone()),
            (Some(ResponseFormat::JsonSchema { json_schema }), None) => {
                ("response_format", json_schema.schema.clone())
            }
            (None | Some(ResponseFormat::Text), Some(schema)) => ("json_schema", Some(schema.clone())),
            (None | Some(ResponseFormat::Text), None) => return self.check_grammar(tools).map(|()| None),
            (Some(_), Some(_)) => return Err(refuse("json_schema", "response_format asks for JSON, too")),
        };
        if self.grammar.is_some() {
            return Err(refuse("grammar", format!("{param} constrains the answer, too")));
        }
        if !tools.list.is_empty() && tools.choice != "none" {
            return Err(refuse(param, "tools cannot be called in an answer that follows a schema"));
        }
        let mut schema = schema.unwrap_or_else(|| json!({}));
        if schema.as_object().is_some_and(Map::is_empty) {
            // As in llama-server: any object.
            schema["type"] = "object".into();
        }
        if !schema.is_object() {
            return Err(refuse(param, "the schema is not an object"));
        }
        grammar::prepare_schema(schema).map(Some).map_err(|error| refuse(param, error.to_string()))
    }

    fn check_grammar(&self, tools: &Tools) -> Result<(), ChatError> {
        if self.grammar.is_some() && !tools.list.is_empty() && tools.choice != "none" {
            return Err(refuse("grammar", "tools constrain the answer, too"));
        }
        Ok(())
    }

    /// As llama-server: an assistant that spoke last goes on.
    fn continuation(&self) -> Result<Option<Continuation>, ChatError> {
        let last = self.messages.last().filter(|last| last["role"] == "assistant");
        let continuation = self.continue_final_message.or(last.map(|_| Continuation::Auto));
        if continuation.is_none() {
            return Ok(None);
        }
        let Some(last) = last else {
            return Err(refuse("continue_final_message", "the last message is not the assistant's"));
        };
        if last.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty()) {
            return Err(refuse(
                "messages",
                "a message that calls tools cannot be continued: tools must answer first",
            ));
        }
        if self.messages.iter().rev().nth(1).is_some_and(|before| before["role"] == "assistant") {
            return Err(refuse("messages", "the assistant speaks twice at the end"));
        }
        if self.add_generation_prompt == Some(true) {
            return Err(refuse("add_generation_prompt", "the last message is to be continued, not answered"));
        }
        Ok(continuation)
    }

    fn template_variables(
        &self,
        capabilities: &Capabilities,
    ) -> Result<(bool, Map<String, Value>), ChatError> {
        let mut kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        let mut enable_thinking = match kwargs.get("enable_thinking") {
            None => capabilities.thinking,
            Some(Value::Bool(enabled)) => *enabled,
            Some(_) => return Err(refuse("chat_template_kwargs", "`enable_thinking` is not a boolean")),
        };
        match self.reasoning_effort.as_deref() {
            Some("none") => {
                enable_thinking = false;
                kwargs.remove("reasoning_effort");
                kwargs.remove("enable_thinking");
            }
            Some(effort) if !effort.is_empty() => {
                kwargs.insert("reasoning_effort".to_owned(), effort.into());
            }
            _ => {}
        }
        Ok((enable_thinking, kwargs))
    }
}

fn refuse(param: impl Into<String>, reason: impl Into<String>) -> ChatError {
    ChatError::Request { param: Some(param.into()), reason: reason.into() }
}

fn check_messages(messages: &[Value]) -> Result<(), ChatError> {
    if messages.is_empty() {
        return Err(refuse("messages", "at least one message is needed"));
    }
    messages.iter().enumerate().try_for_each(|(index, message)| check_message(message, index))
}

fn check_message(message: &Value, index: usize) -> Result<(), ChatError> {
    let param = |field: &str| format!("messages[{index}].{field}");
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        return Err(refuse(param("role"), "a role is needed"));
    };
    if !ROLES.contains(&role) {
        return Err(refuse(
            param("role"),
            format!("unknown role \"{role}\"; known are {}", ROLES.join(", ")),
        ));
    }
    match message.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            for (at, part) in parts.iter().enumerate() {
                if part.get("type").and_then(Value::as_str) != Some("text") || !part["text"].is_string() {
                    return Err(refuse(
                        format!("{}[{at}]", param("content")),
                        "only text parts are supported",
                    ));
                }
            }
        }
        None | Some(Value::Null) if role == "assistant" => {}
        _ => return Err(refuse(param("content"), "a string or an array of text parts is needed")),
    }
    for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let arguments = call.pointer("/function/arguments").and_then(Value::as_str);
        if arguments.is_some_and(|arguments| json_depth(arguments) > MAX_ARGUMENT_DEPTH) {
            let reason = format!("the arguments nest deeper than {MAX_ARGUMENT_DEPTH} levels");
            return Err(refuse(param("tool_calls"), reason));
        }
    }
    Ok(())
}

/// Checks a tool, and makes its parameters fit for conversion.
fn check_tool(tool: &mut Value, index: usize) -> Result<(), ChatError> {
    let param = |field: &str| format!("tools[{index}].{field}");
    if tool.get("type").and_then(Value::as_str) != Some("function") {
        return Err(refuse(param("type"), "only tools of type \"function\" are supported"));
    }
    let Some(name) = tool.pointer("/function/name").and_then(Value::as_str) else {
        return Err(refuse(param("function.name"), "a name is needed"));
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    if name.is_empty() || name.len() > MAX_TOOL_NAME || !name.bytes().all(is_name) {
        let reason = format!("a name has 1 to {MAX_TOOL_NAME} letters, digits or characters of _-.:/");
        return Err(refuse(param("function.name"), reason));
    }
    let Some(parameters) = tool.pointer_mut("/function/parameters") else { return Ok(()) };
    if !parameters.is_null() && !parameters.is_object() {
        return Err(refuse(param("function.parameters"), "the schema is not an object"));
    }
    *parameters = grammar::prepare_schema(parameters.take())
        .map_err(|error| refuse(param("function.parameters"), error.to_string()))?;
    Ok(())
}

/// Keeps only the tool that `{"type": "function", "function": {"name": …}}` names.
fn keep_chosen(tools: &mut Vec<Value>, choice: &Value) -> Result<(), ChatError> {
    let Some(name) = choice.pointer("/function/name").and_then(Value::as_str) else {
        return Err(refuse("tool_choice", "expected \"auto\", \"none\", \"required\" or a function's name"));
    };
    tools.retain(|tool| tool.pointer("/function/name").and_then(Value::as_str) == Some(name));
    if tools.is_empty() {
        return Err(refuse("tool_choice", format!("no tool is named \"{name}\"")));
    }
    Ok(())
}
