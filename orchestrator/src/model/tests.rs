//! Against SmolLM2's own vocabulary and template.

use llama::chat::ChatRequest;
use serde_json::json;

use super::*;
use crate::testing::smollm2;

fn model(template: Option<&str>) -> TextModel {
    TextModel::load(&smollm2(), template).unwrap()
}

fn text_of(model: &TextModel, tokens: &[i32]) -> String {
    let bytes = tokens.iter().flat_map(|&id| model.token_bytes(id, Control::Shown).unwrap());
    String::from_utf8(bytes.collect()).unwrap()
}

fn chat(messages: Value) -> ChatRequest {
    ChatRequest { messages: messages.as_array().unwrap().clone(), ..ChatRequest::default() }
}

#[test]
fn text_survives_its_tokens() {
    let model = model(None);
    let text = "Grüße, 🐟 and 你好 <|im_end|>";
    let tokens = model.tokenize(text).unwrap();
    assert_eq!(text_of(&model, &tokens), text);
    let end = *tokens.last().unwrap();
    assert_eq!(model.token_bytes(end, Control::Hidden).unwrap(), b"");
}

#[test]
fn a_token_that_does_not_exist_is_an_error() {
    let model = model(None);
    assert!(matches!(model.token_bytes(-1, Control::Hidden), Err(ApiError::Engine { .. })));
    assert!(matches!(model.token_bytes(1 << 30, Control::Hidden), Err(ApiError::Engine { .. })));
}

#[test]
fn a_chat_is_written_by_the_models_template() {
    let model = model(None);
    let rendered = model.render(chat(json!([{ "role": "user", "content": "Hi 🐟" }]))).unwrap();
    let text = text_of(&model, &rendered.tokens);
    assert!(text.ends_with("<|im_start|>user\nHi 🐟<|im_end|>\n<|im_start|>assistant\n"), "{text}");
    assert!(rendered.grammar.is_none() && rendered.parser.is_plain());
}

#[test]
fn tools_are_written_even_if_the_models_template_has_none() {
    let model = model(None);
    let mut request = chat(json!([
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "content": null, "tool_calls": [
            { "type": "function", "id": "c1", "function": { "name": "f", "arguments": "{\"city\":\"Oslo\"}" } },
        ] },
        { "role": "tool", "tool_call_id": "c1", "content": "rain" },
    ]));
    request.tools = Some(vec![
        json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }),
    ]);
    let rendered = model.render(request).unwrap();
    let text = text_of(&model, &rendered.tokens);
    for part in
        ["\"name\": \"f\"", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"}}", "rain"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    let grammar = rendered.grammar.unwrap();
    assert!(matches!(grammar.binding, GrammarBinding::After { .. }), "a tool may be called, but need not be");
}

#[test]
fn a_required_call_is_begun_for_the_model() {
    let model = model(None);
    let mut request = chat(json!([{ "role": "user", "content": "Weather?" }]));
    request.tools = Some(vec![
        json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }),
    ]);
    request.tool_choice = Some("required".into());
    let rendered = model.render(request).unwrap();
    assert!(rendered.begun.starts_with("<tool_call>"), "{}", rendered.begun);
    let text = text_of(&model, &rendered.tokens);
    assert!(text.ends_with(&format!("<|im_start|>assistant\n{}", rendered.begun)), "{text}");
    let grammar = rendered.grammar.unwrap();
    assert!(grammar.prefill.ends_with(&rendered.begun), "{}", grammar.prefill);
}

#[test]
fn case_22_what_a_template_refuses_is_the_clients_to_know() {
    let model = model(Some("{{ raise_exception('only one message, please') }}"));
    let error = model.render(chat(json!([{ "role": "user", "content": "Hi" }]))).err().unwrap();
    assert_eq!(error.status_and_code().0, 400);
    assert!(error.to_string().contains("only one message, please"), "{error}");
}

#[test]
fn a_template_that_is_none_is_refused_at_the_start() {
    assert!(matches!(TextModel::load(&smollm2(), Some("{% if %}")), Err(TextModelError::Template(_))));
}
