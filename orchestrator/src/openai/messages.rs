//! Chat messages and tools: checked, and reduced to the fields a chat template may see.
//!
//! Knows nothing of templates.

use std::collections::HashSet;

use llama::chat::ChatRequest;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, Inert, items, quoted};

/// As many tools as OpenAI accepts; each makes the prompt and the grammar longer.
const MAX_TOOLS: usize = 128;

/// Who may speak.
const ROLES: &str = "system, developer, user, assistant, tool";

/// Fields that OpenAI's clients send back with an assistant message they received, all empty.
const ECHOED: &[Inert] = &[
    Inert {
        name: "refusal",
        is_neutral: is_empty,
        reason: "a refusal cannot be rendered; send it as content",
    },
    Inert { name: "annotations", is_neutral: is_empty, reason: "annotations cannot be rendered" },
    Inert { name: "audio", is_neutral: is_empty, reason: "only text is supported" },
    Inert { name: "function_call", is_neutral: is_empty, reason: "use `tool_calls`" },
];

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Checks the `messages` of a request.
pub(crate) fn parse_messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let value: Value = fields.require("messages")?;
    let messages =
        items(value, "messages")?.map(|(path, value)| message(path, value)).collect::<Result<Vec<_>, _>>()?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "at least one message is needed"));
    }
    Ok(messages)
}

fn message(path: String, value: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role: String = fields.require("role")?;
    if !ROLES.split(", ").any(|known| known == role) {
        let reason = format!("unknown role \"{}\"; known are {ROLES}", quoted(&role));
        return Err(ApiError::invalid(fields.param("role"), reason));
    }
    let mut message = json!({ "role": role });
    if let Some(content) = fields.take_value("content") {
        message["content"] = text_content(content, &fields.param("content"))?;
    }
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.take::<String>(name)? {
            message[name] = text.into();
        }
    }
    if let Some(calls) = fields.take_value("tool_calls").filter(|calls| !is_empty(calls)) {
        let param = fields.param("tool_calls");
        if role != "assistant" {
            return Err(ApiError::invalid(param, "only an assistant message has tool calls"));
        }
        message["tool_calls"] =
            items(calls, &param)?.map(|(path, call)| tool_call(path, call)).collect::<Result<_, _>>()?;
    }
    if message.get("content").is_none() {
        if message.get("tool_calls").is_none() {
            return Err(ApiError::Missing { param: fields.param("content") });
        }
        message["content"] = Value::Null;
    }
    fields.take_inert(ECHOED)?;
    fields.finish()?;
    Ok(message)
}

/// A string, or parts that are all text.
fn text_content(content: Value, path: &str) -> Result<Value, ApiError> {
    if content.is_string() {
        return Ok(content);
    }
    if !content.is_array() {
        return Err(ApiError::invalid(path, "a string or an array of text parts is expected"));
    }
    items(content, path)?
        .map(|(path, part)| {
            let mut part = Fields::of(part, path.clone())?;
            let kind: String = part.require("type")?;
            if kind != "text" {
                let reason = format!("only parts of type \"text\" are, not \"{}\"", quoted(&kind));
                return Err(ApiError::unsupported(path, reason));
            }
            let text: String = part.require("text")?;
            part.finish()?;
            Ok(json!({ "type": "text", "text": text }))
        })
        .collect()
}

fn tool_call(path: String, value: Value) -> Result<Value, ApiError> {
    let mut call = Fields::of(value, path)?;
    let id: Option<String> = call.take("id")?;
    function_type(&mut call)?;
    // Clients that join streamed deltas send their index back.
    call.pass_over(&["index"]);
    let mut function = Fields::of(call.require("function")?, call.param("function"))?;
    let name: String = function.require("name")?;
    let arguments = match function.take_value("arguments") {
        Some(Value::String(text)) => text,
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => {
            return Err(ApiError::invalid(function.param("arguments"), "a string of JSON is expected"));
        }
        None => return Err(ApiError::Missing { param: function.param("arguments") }),
    };
    function.finish()?;
    call.finish()?;
    let mut checked = json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
    if let Some(id) = id {
        checked["id"] = id.into();
    }
    Ok(checked)
}

fn function_type(fields: &mut Fields) -> Result<(), ApiError> {
    let kind: String = fields.require("type")?;
    if kind == "function" {
        return Ok(());
    }
    let reason = format!("only \"function\" is, not \"{}\"", quoted(&kind));
    Err(ApiError::unsupported(fields.param("type"), reason))
}

/// Takes `tools`, `tool_choice` and `parallel_tool_calls`.
pub(crate) fn take_tools(fields: &mut Fields, chat: &mut ChatRequest) -> Result<(), ApiError> {
    chat.parallel_tool_calls = fields.take("parallel_tool_calls")?;
    let tools: Vec<Value> = match fields.take_value("tools") {
        Some(list) => {
            items(list, "tools")?.map(|(path, tool)| check_tool(path, tool)).collect::<Result<_, _>>()?
        }
        None => Vec::new(),
    };
    if tools.len() > MAX_TOOLS {
        let reason = format!("{} tools are more than the limit of {MAX_TOOLS}", tools.len());
        return Err(ApiError::invalid("tools", reason));
    }
    let mut seen = HashSet::new();
    if let Some(twice) = tools.iter().map(tool_name).find(|name| !seen.insert(*name)) {
        let reason = format!("the function \"{}\" is given twice", quoted(twice));
        return Err(ApiError::invalid("tools", reason));
    }
    chat.tool_choice = fields.take_value("tool_choice").map(check_choice).transpose()?;
    chat.tools = (!tools.is_empty()).then_some(tools);
    Ok(())
}

fn tool_name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// The form of a choice; whether it names one of the tools is checked with them, in `llama`.
fn check_choice(choice: Value) -> Result<Value, ApiError> {
    if let Some(word) = choice.as_str() {
        return if ["auto", "none", "required"].contains(&word) {
            Ok(choice)
        } else {
            let reason = format!("\"{}\" is none of auto, none, required", quoted(word));
            Err(ApiError::invalid("tool_choice", reason))
        };
    }
    let mut fields = Fields::of(choice, "tool_choice")?;
    function_type(&mut fields)?;
    let mut function = Fields::of(fields.require("function")?, "tool_choice.function")?;
    let name: String = function.require("name")?;
    function.finish()?;
    fields.finish()?;
    Ok(json!({ "type": "function", "function": { "name": name } }))
}

fn check_tool(path: String, value: Value) -> Result<Value, ApiError> {
    let mut tool = Fields::of(value, path)?;
    function_type(&mut tool)?;
    let mut function = Fields::of(tool.require("function")?, tool.param("function"))?;
    let name: String = function.require("name")?;
    if name.is_empty() {
        return Err(ApiError::invalid(function.param("name"), "a function needs a name"));
    }
    let mut checked = json!({ "name": name });
    if let Some(description) = function.take::<String>("description")? {
        checked["description"] = description.into();
    }
    if let Some(parameters) = function.take_value("parameters") {
        if !parameters.is_object() {
            return Err(ApiError::invalid(function.param("parameters"), "a JSON schema is expected"));
        }
        checked["parameters"] = parameters;
    }
    // Arguments always follow the schema: they are generated under its grammar.
    function.take::<bool>("strict")?;
    function.finish()?;
    tool.finish()?;
    Ok(json!({ "type": "function", "function": checked }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(value: Value) -> Result<Vec<Value>, ApiError> {
        parse_messages(&mut Fields::of(json!({ "messages": value }), "").unwrap())
    }

    fn tools(value: Value) -> Result<ChatRequest, ApiError> {
        let mut fields = Fields::of(value, "").unwrap();
        let mut chat = ChatRequest::default();
        take_tools(&mut fields, &mut chat)?;
        fields.finish()?;
        Ok(chat)
    }

    fn weather(name: &str) -> Value {
        json!({ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } })
    }

    #[test]
    fn case_21_messages_that_make_no_sense_are_refused_by_name() {
        for (value, param) in [
            (json!([]), "messages"),
            (json!("hi"), "messages"),
            (json!(["hi"]), "messages[0]"),
            (json!([{ "content": "hi" }]), "messages[0].role"),
            (json!([{ "role": "wizard", "content": "hi" }]), "messages[0].role"),
            (json!([{ "role": "user" }]), "messages[0].content"),
            (json!([{ "role": "user", "content": null }]), "messages[0].content"),
            (json!([{ "role": "user", "content": 7 }]), "messages[0].content"),
            (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
            (json!([{ "role": "user", "content": "a", "mood": 1 }]), "messages[0].mood"),
            (json!([{ "role": "user", "content": "a", "tool_calls": [1] }]), "messages[0].tool_calls"),
            (json!([{ "role": "assistant", "tool_calls": [1] }]), "messages[0].tool_calls[0]"),
            (
                json!([{ "role": "assistant", "tool_calls": [{ "type": "function", "function": { "name": "f" } }] }]),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = messages(value.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{value}: {error}");
            assert_eq!(error.status_and_code().0, 400);
        }
    }

    #[test]
    fn case_21_content_may_be_an_array_of_text_parts() {
        let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
        assert_eq!(json!(messages(parts.clone()).unwrap()), parts);
    }

    #[test]
    fn images_are_refused() {
        let image =
            json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]);
        let error = messages(image).unwrap_err();
        assert_eq!(error.param(), Some("messages[0].content[0]"));
        assert_eq!(error.status_and_code().1, "unsupported_parameter");
    }

    #[test]
    fn what_openais_client_echoes_of_an_answer_is_accepted() {
        let echoed = json!([{ "role": "assistant", "content": "hi", "refusal": null, "annotations": [], "audio": null,
            "function_call": null, "tool_calls": null }]);
        assert_eq!(messages(echoed).unwrap(), [json!({ "role": "assistant", "content": "hi" })]);
    }

    #[test]
    fn a_tool_call_and_its_answer_are_kept() {
        let call = json!({ "type": "function", "function": { "name": "f", "arguments": "{}" }, "id": "c1" });
        let history = json!([
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "content": "7", "tool_call_id": "c1" },
        ]);
        let kept = messages(history).unwrap();
        assert_eq!(kept[0]["tool_calls"][0], call);
        assert_eq!(kept[1]["tool_call_id"], "c1");
    }

    #[test]
    fn tools_and_the_choice_among_them_reach_the_template() {
        let choice = json!({ "type": "function", "function": { "name": "b" } });
        let body = json!({ "tools": [weather("a"), weather("b")], "tool_choice": choice, "parallel_tool_calls": false });
        let chat = tools(body).unwrap();
        assert_eq!(chat.tools, Some(vec![weather("a"), weather("b")]));
        assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (Some(choice), Some(false)));
        assert_eq!(tools(json!({ "tools": [] })).unwrap(), ChatRequest::default());
    }

    #[test]
    fn tools_that_make_no_sense_are_refused_by_name() {
        for (value, param) in [
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "function", "function": {} }] }), "tools[0].function.name"),
            (json!({ "tools": [weather("a"), weather("a")] }), "tools"),
            (json!({ "tools": vec![weather("a"); 129] }), "tools"),
            (json!({ "tool_choice": "perhaps" }), "tool_choice"),
            (json!({ "tool_choice": { "type": "function" } }), "tool_choice.function"),
            (json!({ "tool_choice": { "type": "allowed_tools" } }), "tool_choice.type"),
        ] {
            let error = tools(value.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{value}: {error}");
        }
    }
}
