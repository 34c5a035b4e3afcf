//! The chat and completion routes, as their clients see them.

use reqwest::StatusCode;
use serde_json::json;
use tests::chat::{EventStream, chat_text, greedy};
use tests::server::Server;

async fn server() -> Server {
    Server::start("SmolLM2", &["--stages", "2", "--slots", "4", "--ctx", "1024"]).await.unwrap()
}

#[tokio::test]
async fn a_stream_carries_the_text_of_the_whole_answer_and_usage_when_asked() {
    let server = server().await;
    let whole = chat_text(&server, "Name three colours.", 40).await.unwrap();
    let mut body = greedy("Name three colours.", 40);
    body["stream_options"] = json!({ "include_usage": true });
    let mut stream = EventStream::open(&server, "/v1/chat/completions", body).await.unwrap();
    let (mut text, mut usage) = (String::new(), None);
    while let Some(event) = stream.next_json().await.unwrap() {
        text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        if !event["usage"].is_null() {
            usage = Some(event["usage"].clone());
        }
    }
    assert_eq!(text, whole);
    let usage = usage.expect("a usage event");
    assert!(usage["prompt_tokens"].as_u64().unwrap() > 5);
    assert!(usage["completion_tokens"].as_u64().unwrap() > 3);
}

#[tokio::test]
async fn the_served_model_is_listed_and_another_is_not_found() {
    let server = server().await;
    let list: serde_json::Value =
        server.client().get(server.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    let id = list["data"][0]["id"].as_str().unwrap().to_owned();
    let mut body = greedy("hi", 2);
    body["model"] = id.into();
    assert_eq!(server.post("/v1/chat/completions", &body).await.unwrap().0, StatusCode::OK);
    body["model"] = "some-other-model".into();
    let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(answer["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn case_18_nothing_of_a_stop_string_is_sent() {
    let server = server().await;
    let whole = chat_text(&server, "Count: one, two, three, four, five, six, seven.", 60).await.unwrap();
    let words: Vec<&str> = whole.split_inclusive(' ').collect();
    assert!(words.len() > 6, "{whole:?}");
    // Spans several tokens, and shares a prefix with the other stop string.
    let stop = words[3..5].concat();
    let mut body = greedy("Count: one, two, three, four, five, six, seven.", 60);
    body["stop"] = json!([stop, format!("{stop}xyz")]);
    let (text, reason) =
        EventStream::open(&server, "/v1/chat/completions", body).await.unwrap().text().await.unwrap();
    assert_eq!(text, whole[..whole.find(&stop).unwrap()]);
    assert_eq!(reason, "stop");
}

#[tokio::test]
async fn case_17_characters_that_span_tokens_arrive_whole() {
    let server = server().await;
    // Only byte-level pieces of an emoji and two Chinese characters are allowed by the grammar.
    let mut body = greedy("Answer with symbols only.", 40);
    body["grammar"] = json!(r#"root ::= "🐟🐠 你好 🦈""#);
    let (text, _) =
        EventStream::open(&server, "/v1/chat/completions", body).await.unwrap().text().await.unwrap();
    assert_eq!(text, "🐟🐠 你好 🦈");
}

#[tokio::test]
async fn log_probabilities_are_sorted_and_the_greedy_token_is_the_likeliest() {
    let server = server().await;
    let mut body = greedy("Say hello.", 8);
    body["logprobs"] = true.into();
    body["top_logprobs"] = 3.into();
    let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(!content.is_empty());
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(entry["token"], top[0]["token"]);
        let values: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(values.is_sorted_by(|a, b| a >= b) && values.iter().all(|&p| p <= 0.0), "{values:?}");
    }
}

#[tokio::test]
async fn a_json_schema_answer_is_json_of_that_schema() {
    let server = server().await;
    let mut body = greedy("Describe a person.", 120);
    body["response_format"] = json!({
        "type": "json_schema",
        "json_schema": { "name": "person", "schema": {
            "type": "object",
            "properties": { "name": { "type": "string", "maxLength": 20 }, "age": { "type": "integer" } },
            "required": ["name", "age"],
            "additionalProperties": false,
        } },
    });
    let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let person: serde_json::Value = serde_json::from_str(text).unwrap();
    assert!(person["name"].is_string() && person["age"].is_i64(), "{person}");
}

#[tokio::test]
async fn a_required_tool_is_called_with_arguments_of_its_schema() {
    let server = server().await;
    let mut body = greedy("What is the weather in Paris?", 200);
    body["tools"] = json!([{ "type": "function", "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": { "city": { "type": "string", "maxLength": 30 } },
            "required": ["city"],
        },
    } }]);
    body["tool_choice"] = "required".into();
    let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "get_weather", "{answer}");
    let arguments: serde_json::Value =
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["city"].is_string(), "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn case_21_content_parts_and_a_late_system_message_are_accepted() {
    let server = server().await;
    let body = json!({
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "Say " }, { "type": "text", "text": "hello." }] },
            { "role": "system", "content": "Be brief." },
        ],
        "temperature": 0,
        "max_tokens": 8,
    });
    let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
}
