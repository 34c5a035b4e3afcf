//! Chat templates and parsing of answers, with SmolLM2's vocabulary and small templates of each kind.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may, as tests may"
)]

mod smollm;

use llama::chat::{
    ChatDelta, ChatError, ChatMessage, ChatPrompt, ChatRequest, ChatTemplates, Completeness, ToolCall,
};
use serde_json::{Value, json};

const TOOLS: &str = include_str!("templates/tools.jinja");
const THINKING: &str = include_str!("templates/thinking.jinja");
const THINKING_TOOLS: &str = include_str!("templates/thinking_tools.jinja");
const STRICT: &str = include_str!("templates/strict.jinja");
const DATED: &str = include_str!("templates/dated.jinja");
const UNKNOWN_FUNCTION: &str = include_str!("templates/unknown_function.jinja");

fn own_templates() -> ChatTemplates {
    ChatTemplates::new(smollm::model(), None).unwrap()
}

fn templates(source: &str) -> ChatTemplates {
    ChatTemplates::new(smollm::model(), Some(source)).unwrap()
}

fn request(value: Value) -> ChatRequest {
    serde_json::from_value(value).unwrap()
}

fn apply(templates: &ChatTemplates, value: Value) -> Result<ChatPrompt, ChatError> {
    templates.apply(&request(value))
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn weather_tool() -> Value {
    json!({
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    })
}

/// What a model says to call it.
fn weather_call(city: &str) -> String {
    let call = json!({"name": "get_weather", "arguments": {"city": city}});
    format!("<tool_call>\n{}\n</tool_call>", call.to_string().replace(':', ": ").replace(',', ", "))
}

#[track_caller]
fn refused(result: Result<ChatPrompt, ChatError>) -> (Option<String>, String) {
    match result {
        Err(ChatError::Request { param, reason }) => (param, reason),
        other => panic!("not refused: {other:?}"),
    }
}

/// Feeds `text` in pieces of `size` characters.
fn stream(prompt: &ChatPrompt, text: &str, size: usize) -> (ChatMessage, Vec<ChatDelta>) {
    let mut stream = prompt.parser.stream();
    let mut deltas = Vec::new();
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(size) {
        deltas.extend(stream.push(&piece.iter().collect::<String>()).unwrap());
    }
    deltas.extend(stream.finish(Completeness::Complete).unwrap());
    (stream.message().clone(), deltas)
}

/// The message a client puts together from deltas.
fn assemble(deltas: &[ChatDelta]) -> ChatMessage {
    let mut message = ChatMessage::default();
    for delta in deltas {
        match delta {
            ChatDelta::Reasoning(text) => message.reasoning_content += text,
            ChatDelta::Content(text) => message.content += text,
            ChatDelta::ToolCall { index, id, name, arguments } => {
                assert_eq!(*index, message.tool_calls.len());
                let call = ToolCall { id: id.clone(), name: name.clone(), arguments: arguments.clone() };
                message.tool_calls.push(call);
            }
            ChatDelta::Arguments { index, arguments } => message.tool_calls[*index].arguments += arguments,
        }
    }
    message
}

#[test]
fn the_models_own_template_renders() {
    let templates = own_templates();
    assert!(templates.is_explicit());
    assert!(templates.source().contains("<|im_start|>"));
    let prompt = apply(&templates, json!({"messages": user("Hi")})).unwrap();
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
                    Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt.prompt, expected);
    assert_eq!(prompt.grammar, None);
    assert!(prompt.parser.is_plain());
    assert_eq!(prompt.parser.parse("<think> [1", Completeness::Complete).unwrap().content, "<think> [1");
}

#[test]
fn case_21_content_may_be_an_array_of_parts() {
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    let prompt = apply(&own_templates(), json!({"messages": [{"role": "user", "content": parts}]})).unwrap();
    assert!(prompt.prompt.contains("user\none\ntwo<|im_end|>"), "{}", prompt.prompt);
    let image = json!([{"type": "image_url", "image_url": {"url": "data:"}}]);
    let (param, _) =
        refused(apply(&own_templates(), json!({"messages": [{"role": "user", "content": image}]})));
    assert_eq!(param.as_deref(), Some("messages[0].content[0]"));
}

#[test]
fn case_21_a_system_message_that_is_not_first_is_rendered_or_refused_as_the_template_says() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
    let prompt = apply(&own_templates(), json!({"messages": messages})).unwrap();
    assert!(prompt.prompt.contains("<|im_start|>system\nb<|im_end|>"));
    let (_, reason) = refused(apply(&templates(STRICT), json!({"messages": messages})));
    assert_eq!(reason, "the chat template refuses this: the system message must come first");
}

#[test]
fn case_21_wrong_messages_are_refused_by_name() {
    let templates = own_templates();
    for (messages, param) in [
        (json!([]), "messages"),
        (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": null}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!(["hello"]), "messages[0].role"),
    ] {
        let (found, reason) = refused(apply(&templates, json!({"messages": messages})));
        assert_eq!(found.as_deref(), Some(param), "{reason}");
    }
}

#[test]
fn case_22_a_template_may_ask_for_the_date() {
    let prompt = apply(&templates(DATED), json!({"messages": user("Hi")})).unwrap().prompt;
    let date = prompt.split_once("Today is ").unwrap().1.split_once('.').unwrap().0;
    let shape: String = date.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(shape, "0000-00-00");
}

#[test]
fn case_22_a_function_that_is_not_there_is_the_requests_fault_only_when_it_is_called() {
    let templates = templates(UNKNOWN_FUNCTION);
    apply(&templates, json!({"messages": user("Hi")})).unwrap();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    let (_, reason) = refused(apply(&templates, json!({"messages": messages})));
    assert!(reason.contains("cannot render this") && reason.contains("weather_now"), "{reason}");
}

#[test]
fn a_template_that_cannot_be_parsed_is_reported_with_its_fault() {
    for source in ["{% if %}", "{{ messages[0].content", "{% for m in messages %}"] {
        let error = ChatTemplates::new(smollm::model(), Some(source)).unwrap_err();
        let ChatError::Template { reason } = error else { panic!("{error}") };
        assert!(reason != "std::exception" && !reason.is_empty(), "{reason}");
    }
}

#[test]
fn nested_arguments_in_the_history_do_not_overflow_the_stack() {
    // llama.cpp copies parsed JSON by recursion: 20,000 levels ended the process.
    let arguments = "[".repeat(100_000) + &"]".repeat(100_000);
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]);
    let (param, _) =
        refused(apply(&templates(TOOLS), json!({"messages": messages, "tools": [weather_tool()]})));
    assert_eq!(param.as_deref(), Some("messages[1].tool_calls"));
}

#[test]
fn a_conversation_with_tool_calls_renders() {
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\":\"Bern\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]);
    let prompt = apply(&templates(TOOLS), json!({"messages": messages, "tools": [weather_tool()]})).unwrap();
    assert!(
        prompt.prompt.contains(r#"{"name": "get_weather", "arguments": {"city": "Bern"}}"#),
        "{}",
        prompt.prompt
    );
    assert!(prompt.prompt.contains("<tool_response>\nsunny\n</tool_response>"));
}

#[test]
fn tools_bring_a_grammar_that_waits_for_a_call() {
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let prompt = apply(&templates(TOOLS), value).unwrap();
    let grammar = prompt.grammar.unwrap();
    assert!(grammar.lazy);
    assert_eq!(grammar.trigger_patterns, ["<tool_call>\n"]);
    assert!(!prompt.parser.is_plain());
}

#[test]
fn a_required_call_brings_a_grammar_that_binds_at_once() {
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "get_weather"}})] {
        let value = json!({"messages": user("Hi"), "tools": [weather_tool()], "tool_choice": choice});
        let grammar = apply(&templates(TOOLS), value).unwrap().grammar.unwrap();
        assert!(!grammar.lazy);
        assert_eq!(grammar.prefill, "<|im_start|>assistant\n");
    }
}

#[test]
fn a_named_function_is_the_only_one_that_can_be_called() {
    let mut other = weather_tool();
    other["function"]["name"] = "get_time".into();
    let choice = json!({"type": "function", "function": {"name": "get_time"}});
    let value = json!({"messages": user("Hi"), "tools": [weather_tool(), other], "tool_choice": choice});
    let grammar = apply(&templates(TOOLS), value).unwrap().grammar.unwrap();
    assert!(grammar.gbnf.contains("get_time") && !grammar.gbnf.contains("get_weather"));
}

#[test]
fn tools_that_cannot_be_called_are_refused() {
    let tools = json!([weather_tool()]);
    let with = |extra: Value| {
        let mut value = json!({"messages": user("Hi"), "tools": tools});
        value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        value
    };
    let templates = templates(TOOLS);
    let named = json!({"type": "function", "function": {"name": "none_such"}});
    for (value, param) in [
        (with(json!({"tool_choice": "sometimes"})), "tool_choice"),
        (with(json!({"tool_choice": named})), "tool_choice"),
        (json!({"messages": user("Hi"), "tool_choice": "required"}), "tool_choice"),
        (with(json!({"response_format": {"type": "json_object"}})), "response_format"),
        (with(json!({"grammar": "root ::= \"a\""})), "grammar"),
        (json!({"messages": user("Hi"), "tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (
            json!({"messages": user("Hi"), "tools": [{"type": "function", "function": {}}]}),
            "tools[0].function.name",
        ),
    ] {
        assert_eq!(refused(apply(&templates, value)).0.as_deref(), Some(param));
    }
    // SmolLM2's own template drops tools without a word.
    assert_eq!(refused(apply(&own_templates(), with(json!({})))).0.as_deref(), Some("tools"));
    let none = apply(&templates, with(json!({"tool_choice": "none"}))).unwrap();
    assert!(none.grammar.is_none() && none.parser.is_plain());
}

#[test]
fn schemas_that_would_crash_or_stall_llama_cpp_are_refused() {
    let templates = templates(TOOLS);
    let part = json!({"$ref": "#/$defs/A"});
    let endless = json!({
        "$defs": {"A": {"type": "object", "properties": {"p": {"allOf": [part, part]}}}},
        "type": "object",
        "properties": {"a": {"allOf": [part, part]}},
    });
    let long = json!({"type": "object", "properties": {"_".repeat(100_000): {"type": "string"}}});
    let wrong = json!({"type": "object", "properties": {"a": {"type": "strin"}}});
    let mut definitions = serde_json::Map::new();
    for level in 0..40 {
        let next = json!({"$ref": format!("#/$defs/A{}", level + 1)});
        definitions.insert(format!("A{level}"), json!({"anyOf": [next, next]}));
    }
    definitions.insert("A40".to_owned(), json!({"type": "string"}));
    let doubling =
        json!({"$defs": definitions, "type": "object", "properties": {"a": {"$ref": "#/$defs/A0"}}});
    for schema in [endless, long, wrong, doubling] {
        let mut tool = weather_tool();
        tool["function"]["parameters"] = schema.clone();
        let value = json!({"messages": user("Hi"), "tools": [tool], "tool_choice": "required"});
        refused(apply(&templates, value));
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        refused(apply(&templates, json!({"messages": user("Hi"), "response_format": format})));
    }
}

#[test]
fn a_tool_call_is_parsed_at_every_length() {
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let prompt = apply(&templates(TOOLS), value).unwrap();
    let text = format!("Let me see.\n{}", weather_call("Zürich"));
    let text = text.as_str();
    let (whole, _) = stream(&prompt, text, 1000);
    assert_eq!(whole.content.trim_end(), "Let me see.");
    assert_eq!(whole.tool_calls.len(), 1);
    assert_eq!(whole.tool_calls[0].name, "get_weather");
    assert_eq!(whole.tool_calls[0].arguments, "{\"city\": \"Zürich\"}");
    for size in [1, 2, 3, 7] {
        let (message, deltas) = stream(&prompt, text, size);
        assert_eq!(assemble(&deltas), message, "{deltas:?}");
        assert_eq!((message.content, message.tool_calls.len()), (whole.content.clone(), 1));
        assert_eq!(message.tool_calls[0].arguments, whole.tool_calls[0].arguments);
        assert!(message.tool_calls[0].id.starts_with("call_"));
    }
}

#[test]
fn several_calls_have_different_ids() {
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let prompt = apply(&templates(TOOLS), value).unwrap();
    let text = format!("{}\n{}", weather_call("Bern"), weather_call("Rome"));
    let (message, deltas) = stream(&prompt, &text, 4);
    assert_eq!(assemble(&deltas), message);
    assert_eq!(message.tool_calls.len(), 2);
    assert_ne!(message.tool_calls[0].id, message.tool_calls[1].id);
}

#[test]
fn text_that_only_looks_like_a_call_stays_content() {
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let prompt = apply(&templates(TOOLS), value).unwrap();
    let text = "In XML, <tool_call> is a tag and [1, 2] is not; 3 < 4.";
    let (message, deltas) = stream(&prompt, text, 1);
    assert_eq!(message.content, text);
    assert_eq!(assemble(&deltas).content, text);
}

#[test]
fn deeply_nested_output_is_an_error_not_a_crash() {
    // 1,000 levels ended the process on a stack of 2 MiB.
    let format = json!({"type": "json_object"});
    let prompt = apply(&own_templates(), json!({"messages": user("Hi"), "response_format": format})).unwrap();
    let text = "{\"a\": ".to_owned() + &"[".repeat(50_000);
    let error = prompt.parser.parse(&text, Completeness::Partial).unwrap_err();
    assert!(matches!(error, ChatError::Output { .. }), "{error}");
    // Without JSON there is no recursion, and brackets are just text.
    let prompt = apply(&templates(THINKING), json!({"messages": user("Hi")})).unwrap();
    let text = "[".repeat(50_000);
    assert_eq!(prompt.parser.parse(&text, Completeness::Complete).unwrap().content, text);
}

#[test]
fn nested_output_within_the_limit_is_parsed_on_a_small_stack() {
    let format = json!({"type": "json_object"});
    let prompt = apply(&own_templates(), json!({"messages": user("Hi"), "response_format": format})).unwrap();
    let text = "{\"a\": ".to_owned() + &"[".repeat(190) + &"]".repeat(190) + "}";
    let parse = || prompt.parser.parse(&text, Completeness::Complete).unwrap().content;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(2 << 20).spawn_scoped(scope, parse).unwrap();
        assert_eq!(thread.join().unwrap(), text);
    });
}

#[test]
fn reasoning_is_told_from_the_answer() {
    let templates = templates(THINKING);
    assert!(templates.capabilities().thinking);
    let prompt = apply(&templates, json!({"messages": user("Hi")})).unwrap();
    let text = "<think>\nHm, a greeting.\n</think>\n\nHello!";
    for size in [1, 3, 100] {
        let (message, deltas) = stream(&prompt, text, size);
        assert_eq!(message.reasoning_content.trim(), "Hm, a greeting.");
        assert_eq!(message.content, "Hello!");
        assert_eq!(assemble(&deltas), message);
    }
    let (message, _) = stream(&prompt, "Hello!", 1);
    assert_eq!((message.content.as_str(), message.reasoning_content.as_str()), ("Hello!", ""));
}

#[test]
fn reasoning_stays_in_the_content_when_asked_to() {
    let value = json!({"messages": user("Hi"), "reasoning_format": "none"});
    let prompt = apply(&templates(THINKING), value).unwrap();
    let text = "<think>\nHm.\n</think>\n\nHello!";
    assert_eq!(stream(&prompt, text, 1).0.content, text);
}

#[test]
fn thinking_can_be_turned_off() {
    let templates = templates(THINKING);
    for extra in
        [json!({"chat_template_kwargs": {"enable_thinking": false}}), json!({"reasoning_effort": "none"})]
    {
        let mut value = json!({"messages": user("Hi")});
        value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let prompt = apply(&templates, value).unwrap();
        assert!(prompt.prompt.ends_with("<think>\n\n</think>\n\n"), "{}", prompt.prompt);
        assert_eq!(stream(&prompt, "Hello!", 2).0.content, "Hello!");
    }
    let value = json!({"messages": user("Hi"), "chat_template_kwargs": {"enable_thinking": "no"}});
    assert_eq!(refused(apply(&templates, value)).0.as_deref(), Some("chat_template_kwargs"));
}

#[test]
fn a_lazy_grammar_knows_the_tags_of_the_thinking_it_must_not_bind_in() {
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let prompt = apply(&templates(THINKING_TOOLS), value).unwrap();
    let grammar = prompt.grammar.clone().unwrap();
    assert!(grammar.lazy);
    let thinking = grammar.thinking.unwrap();
    assert_eq!((thinking.start.as_str(), thinking.ends[0].as_str()), ("<think>", "</think>"));
    let text = format!("<think>\nI call it.\n</think>\n\n{}", weather_call("Rome"));
    let (message, deltas) = stream(&prompt, &text, 3);
    assert_eq!(assemble(&deltas), message);
    assert_eq!(message.reasoning_content.trim(), "I call it.");
    assert_eq!(message.tool_calls[0].arguments, "{\"city\": \"Rome\"}");
}

#[test]
fn a_response_format_brings_a_grammar() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
    let prompt = apply(&own_templates(), json!({"messages": user("Hi"), "response_format": format})).unwrap();
    let grammar = prompt.grammar.clone().unwrap();
    assert!(!grammar.lazy && grammar.gbnf.contains("root ::="));
    assert_eq!(stream(&prompt, "{\"a\": 5}", 1).0.content, "{\"a\": 5}");
    let prompt =
        apply(&own_templates(), json!({"messages": user("Hi"), "response_format": {"type": "text"}}))
            .unwrap();
    assert!(prompt.grammar.is_none());
}

#[test]
fn a_grammar_of_the_client_is_taken_as_it_is_or_refused_with_its_fault() {
    let value = json!({"messages": user("Hi"), "grammar": "root ::= \"yes\" | \"no\""});
    let grammar = apply(&own_templates(), value).unwrap().grammar.unwrap();
    assert_eq!((grammar.lazy, grammar.prefill.as_str()), (false, ""));
    let (param, reason) =
        refused(apply(&own_templates(), json!({"messages": user("Hi"), "grammar": "root ::= oops"})));
    assert_eq!(param.as_deref(), Some("grammar"));
    assert!(reason.contains("oops"), "{reason}");
}

#[test]
fn an_assistant_that_spoke_last_goes_on() {
    let messages =
        json!([{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Once upon"}]);
    let prompt = apply(&own_templates(), json!({"messages": messages})).unwrap();
    assert!(prompt.prompt.ends_with("<|im_start|>assistant\nOnce upon"), "{}", prompt.prompt);
    assert_eq!(stream(&prompt, " a time", 1).0.content, " a time");

    let messages = json!([
        {"role": "user", "content": "Tell."},
        {"role": "assistant", "reasoning_content": "Short.", "content": "Once upon"},
    ]);
    let prompt = apply(&templates(THINKING), json!({"messages": messages})).unwrap();
    assert!(prompt.prompt.ends_with("</think>\n\nOnce upon"), "{}", prompt.prompt);
    let (message, deltas) = stream(&prompt, " a time", 1);
    assert_eq!((message.content.as_str(), message.reasoning_content.as_str()), (" a time", ""));
    assert_eq!(assemble(&deltas), message);

    let twice = json!([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]);
    refused(apply(&own_templates(), json!({"messages": twice})));
    let both = json!({"messages": messages, "add_generation_prompt": true});
    assert_eq!(refused(apply(&own_templates(), both)).0.as_deref(), Some("add_generation_prompt"));
}

#[test]
fn templates_and_parsers_are_shared_between_threads() {
    let templates = templates(TOOLS);
    let value = json!({"messages": user("Hi"), "tools": [weather_tool()]});
    let expected = apply(&templates, value.clone()).unwrap();
    let text = weather_call("Rome");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let prompt = apply(&templates, value.clone()).unwrap();
                    assert_eq!((&prompt.prompt, &prompt.grammar), (&expected.prompt, &expected.grammar));
                    let message = expected.parser.parse(&text, Completeness::Complete).unwrap();
                    assert_eq!(message.tool_calls[0].arguments, "{\"city\": \"Rome\"}");
                }
            });
        }
    });
}

#[test]
fn zero_bytes_and_any_unicode_pass_through() {
    let text = "a\0b 🦀 漢字 \u{202e}";
    let prompt = apply(&own_templates(), json!({"messages": user(text)})).unwrap();
    assert!(prompt.prompt.contains(text));
    let prompt = apply(&templates(THINKING), json!({"messages": user("Hi")})).unwrap();
    assert_eq!(stream(&prompt, text, 1).0.content, text);
}
