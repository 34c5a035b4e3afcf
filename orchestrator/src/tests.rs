//! The whole server over TCP, with a real vocabulary and a master whose every word the test chooses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cluster::{
    Bytes, Correction, Epoch, ForetoldHops, Millis, ObservedSteps, Phase, ReplicaState, StageIndex,
    StageObservation, StepBucket, StepTotals, Tally,
};
use futures::StreamExt;
use protocol::tls::{ClusterCa, TlsIdentity};
use protocol::v1::generate_event::Event;
use protocol::v1::{self, FinishReason};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::Status;

use super::*;
use crate::model::TextModel;
use crate::testing::{Master, fleet, smollm2};

mod several;

const CHAT: &str = "/v1/chat/completions";
const N_CTX: u32 = 256;

/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(20);

struct Bench {
    url: String,
    client: reqwest::Client,
    identity: TlsIdentity,
    fleet: Fleet,
    /// Of replica 0.
    master: Master,
    agent: watch::Sender<ReplicaState>,
    stages: watch::Sender<Vec<StageObservation>>,
    hops: watch::Sender<Option<ForetoldHops>>,
    /// Replicas 1 and on: their masters and agents.
    others: Vec<(Master, watch::Sender<ReplicaState>)>,
    shutdown: CancellationToken,
    server: JoinHandle<Result<(), ServeError>>,
    /// To make tokens of text.
    model: TextModel,
}

impl Bench {
    /// One replica of four slots, and no patience for lost ones.
    async fn start() -> Self {
        Self::with(1, impatient()).await
    }

    async fn with(replicas: usize, limits: Limits) -> Self {
        let identity = ClusterCa::new().unwrap().issue("test").unwrap();
        let (master, agent, mut feed) = replica(&identity).await;
        let (stages, observations) = watch::channel(Vec::new());
        let (hops, foretold) = watch::channel(None);
        (feed.observations, feed.hops) = (observations, foretold);
        let (mut feeds, mut others) = (vec![feed], Vec::new());
        for _ in 1..replicas {
            let (master, agent, feed) = replica(&identity).await;
            feeds.push(feed);
            others.push((master, agent));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fleet = fleet(feeds, &identity, &limits);
        let config = OrchestratorConfig {
            model_name: "smollm2".into(),
            aliases: Vec::new(),
            model_path: smollm2(),
            chat_template: None,
            fleet: fleet.clone(),
            cluster: None,
            deployment: None,
            n_ctx: N_CTX,
            limits,
        };
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(serve(listener, config, shutdown.clone()));
        let model = TextModel::load(&smollm2(), None).unwrap();
        let client = reqwest::Client::new();
        let bench = Self {
            url,
            client,
            identity,
            fleet,
            master,
            agent,
            stages,
            hops,
            others,
            shutdown,
            server,
            model,
        };
        let ready = async {
            while bench.get("/ready").await.0 != StatusCode::OK {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, ready).await.expect("the server becomes ready");
        bench
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let reply = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (reply.status(), reply.json().await.unwrap())
    }

    fn send(&self, path: &str, body: Value) -> JoinHandle<reqwest::Response> {
        let request = self.client.post(format!("{}{path}", self.url)).json(&body);
        tokio::spawn(async move { request.send().await.unwrap() })
    }

    fn tokens(&self, text: &str) -> Vec<i32> {
        self.model.tokenize(text).unwrap()
    }

    fn text_of(&self, tokens: &[i32]) -> String {
        let bytes = tokens.iter().flat_map(|&id| self.model.token_bytes(id, model::Control::Shown).unwrap());
        String::from_utf8(bytes.collect()).unwrap()
    }
}

/// A replica whose master and agent are the test's.
async fn replica(identity: &TlsIdentity) -> (Master, watch::Sender<ReplicaState>, ReplicaFeed) {
    let master = Master::start(identity).await;
    let (agent, state) = watch::channel(ReplicaState::Ready { master: master.address, epoch: Epoch(1) });
    let (observations, hops) = (watch::channel(Vec::new()).1, watch::channel(None).1);
    (master, agent, ReplicaFeed { state, observations, hops, slots: 4, predicted: None })
}

fn impatient() -> Limits {
    Limits {
        drain: Duration::from_millis(100),
        replay_timeout: Duration::from_millis(200),
        ..Limits::default()
    }
}

/// All events of a stream, `[DONE]` left as a string.
async fn events(response: reqwest::Response) -> Vec<Value> {
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = tokio::time::timeout(DEADLINE, response.text()).await.expect("the stream ends").unwrap();
    let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into())).collect()
}

fn content(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

fn finish_reason(events: &[Value]) -> &str {
    events.iter().filter_map(|event| event["choices"][0]["finish_reason"].as_str()).next_back().unwrap()
}

fn chat(more: Value) -> Value {
    let mut body = json!({ "model": "smollm2", "messages": [{ "role": "user", "content": "Say hello." }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn stream(more: Value) -> Value {
    let mut body = chat(more);
    body["stream"] = true.into();
    body
}

#[tokio::test]
async fn a_streamed_chat_has_openais_chunks_from_role_to_done() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({ "stream_options": { "include_usage": true }, "seed": 7 })));
    let call = bench.master.call().await;
    let prompt = bench.text_of(&call.request.prompt);
    assert!(prompt.contains("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"), "{prompt}");
    assert_eq!(call.request.sampling.as_ref().unwrap().seed, 7);
    let (prompt_tokens, answer) = (call.request.prompt.len(), bench.tokens("Hello, 🐟 你好!"));
    assert!(answer.len() > 6, "the fish spans tokens");
    let accepted = call.accept();
    accepted.start(3).await;
    accepted.tokens(&answer).await;
    accepted.finish(FinishReason::Stop, answer.len() as u32).await;
    let events = events(reply.await.unwrap()).await;
    assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert!(events[0]["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(content(&events), "Hello, 🐟 你好!", "case 17");
    assert_eq!(finish_reason(&events), "stop");
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(last["timings"]["predicted_ms"], 20.0);
    assert!(last["timings"]["queue_ms"].as_f64().unwrap() > 0.0);
    assert!(events[1]["usage"].is_null() && events[1].get("usage").is_some());
}

#[tokio::test]
async fn a_whole_chat_is_one_object() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, chat(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("Hello")).await;
    accepted.finish(FinishReason::Length, 1).await;
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    let body: Value = reply.json().await.unwrap();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(
        body["choices"][0]["message"],
        json!({ "role": "assistant", "content": "Hello", "refusal": null })
    );
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["logprobs"], json!(null));
    assert_eq!(body["usage"]["completion_tokens"], 1);
}

#[tokio::test]
async fn case_18_a_stop_string_ends_the_answer_and_cancels_the_request() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({ "stop": ["four five", "four five six"] })));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one two three four five")).await;
    tokio::time::timeout(DEADLINE, accepted.cancelled()).await.expect("the request is cancelled");
    let events = events(reply.await.unwrap()).await;
    assert_eq!(content(&events), "one two three ");
    assert_eq!(finish_reason(&events), "stop");
}

#[tokio::test]
async fn case_19_a_client_that_goes_away_cancels_its_request_wherever_it_is() {
    for streamed in [true, false] {
        for is_queued in [true, false] {
            let mut bench = Bench::start().await;
            let body = if streamed { stream(json!({})) } else { chat(json!({})) };
            let reply = bench.send(CHAT, body);
            let accepted = bench.master.call().await.accept();
            accepted.queue(1).await;
            if !is_queued {
                accepted.start(0).await;
                accepted.tokens(&bench.tokens("one two")).await;
            }
            if streamed {
                drop(reply.await.unwrap());
            } else {
                reply.abort();
            }
            let cancelled = tokio::time::timeout(DEADLINE, accepted.cancelled()).await;
            assert!(cancelled.is_ok(), "streamed: {streamed}, queued: {is_queued}");
            assert_eq!(bench.get("/health").await.0, StatusCode::OK);
        }
    }
}

#[tokio::test]
async fn case_1_a_lost_replica_ends_a_stream_with_an_error_event() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one two")).await;
    let mut stream = reply.await.unwrap().bytes_stream();
    // The master itself is silent, as a frozen one would be: the agent's word must do.
    stream.next().await.unwrap().unwrap();
    bench.agent.send_replace(ReplicaState::Down { reason: "stage 1 was killed".into() });
    let rest: Vec<u8> = stream.map(|chunk| chunk.unwrap().to_vec()).collect::<Vec<_>>().await.concat();
    let rest = String::from_utf8(rest).unwrap();
    let last = rest.trim_end().lines().last().unwrap().strip_prefix("data: ").unwrap().to_owned();
    let error: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(error["error"]["code"], "replica_lost");
    assert!(error["error"]["message"].as_str().unwrap().contains("stage 1 was killed"));
    assert_eq!(bench.get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn case_1_a_lost_replica_fails_a_whole_answer_with_503() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, chat(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    // A connection that just ends.
    drop(accepted);
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(reply.headers().contains_key("retry-after"));
    assert_eq!(reply.json::<Value>().await.unwrap()["error"]["code"], "replica_lost");
}

#[tokio::test]
async fn case_6_a_restarted_replica_is_another_and_gets_its_own_connection() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, chat(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    let mut successor = Master::start(&bench.identity).await;
    bench.agent.send_replace(ReplicaState::Ready { master: successor.address, epoch: Epoch(2) });
    // The one that was lost, and then a new one.
    successor.call().await.accept().finish(FinishReason::Stop, 0).await;
    assert_eq!(reply.await.unwrap().status(), StatusCode::OK);
    let _reply = bench.send(CHAT, chat(json!({})));
    successor.call().await;
    assert!(bench.master.is_idle());
}

#[tokio::test]
async fn case_25_a_full_queue_is_503_with_retry_after_even_for_a_stream() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({})));
    bench.master.call().await.refuse(Status::resource_exhausted("4 requests wait"));
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(reply.headers().contains_key("retry-after"));
    let body: Value = reply.json().await.unwrap();
    assert_eq!(body["error"]["code"], "queue_full");
    assert!(body["error"]["message"].as_str().unwrap().contains("4 requests wait"));
}

#[tokio::test]
async fn what_the_engine_calls_invalid_is_400_even_for_a_stream() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    let kind = v1::FailureKind::Invalid.into();
    accepted.tell(Event::Failed(v1::Failed { kind, message: "no such thing".into() })).await;
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), StatusCode::BAD_REQUEST);
    assert!(reply.text().await.unwrap().contains("no such thing"));
}

#[tokio::test]
async fn case_20_a_prompt_longer_than_the_slot_never_reaches_the_engine() {
    let mut bench = Bench::start().await;
    let long = json!([{ "role": "user", "content": "word ".repeat(400) }]);
    for (path, body) in [
        (CHAT, stream(json!({ "messages": long }))),
        ("/v1/completions", json!({ "prompt": "word ".repeat(400) })),
        ("/v1/completions", json!({ "prompt": vec![1; 257] })),
    ] {
        let reply = bench.send(path, body).await.unwrap();
        assert_eq!(reply.status(), StatusCode::BAD_REQUEST);
        let body: Value = reply.json().await.unwrap();
        assert_eq!(body["error"]["code"], "context_length_exceeded");
        assert!(body["error"]["message"].as_str().unwrap().contains("256"), "{body}");
    }
    assert!(bench.master.is_idle());
}

#[tokio::test]
async fn logprobs_follow_their_text() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, chat(json!({ "logprobs": true, "top_logprobs": 1, "stop": "five" })));
    let call = bench.master.call().await;
    assert!(call.request.logprobs && call.request.top_logprobs == 1);
    let accepted = call.accept();
    accepted.start(0).await;
    for id in bench.tokens("four five") {
        let top = vec![v1::TokenProbability { id, logprob: -0.5 }];
        accepted.tell(Event::Token(v1::GeneratedToken { id, position: 0, logprob: Some(-0.5), top })).await;
    }
    let body: Value = reply.await.unwrap().json().await.unwrap();
    let tokens: String = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    let text = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(text, "four ");
    assert!(tokens.starts_with("four") && !tokens.contains("five "), "{tokens}");
}

#[tokio::test]
async fn a_tool_call_is_streamed_even_if_the_models_own_template_has_no_tools() {
    let mut bench = Bench::start().await;
    let parameters =
        json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let tool = json!({ "type": "function", "function": { "name": "get_weather", "parameters": parameters } });
    let reply = bench.send(CHAT, stream(json!({ "tools": [tool], "tool_choice": "required" })));
    let call = bench.master.call().await;
    let prompt = bench.text_of(&call.request.prompt);
    assert!(prompt.contains("get_weather"));
    let grammar = call.request.sampling.as_ref().unwrap().grammar.clone().unwrap();
    assert!(!grammar.lazy && grammar.gbnf.contains("get_weather"), "{}", grammar.gbnf);
    let accepted = call.accept();
    accepted.start(0).await;
    let answer =
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    // A required call is begun in the prompt.
    let begun = prompt.rsplit("assistant\n").next().unwrap();
    assert!(begun.starts_with("<tool_call>"), "{prompt}");
    accepted.tokens(&bench.tokens(answer.strip_prefix(begun).unwrap())).await;
    accepted.finish(FinishReason::Stop, 30).await;
    let events = events(reply.await.unwrap()).await;
    let calls: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(calls[0]["function"]["name"], "get_weather");
    assert_eq!((&calls[0]["type"], &calls[0]["index"]), (&json!("function"), &json!(0)));
    assert!(!calls[0]["id"].as_str().unwrap().is_empty());
    assert!(calls[1..].iter().all(|call| call["function"].get("name").is_none()));
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({ "city": "Oslo" }));
    assert_eq!(finish_reason(&events), "tool_calls");
    assert_eq!(content(&events), "");
}

#[tokio::test]
async fn a_schema_becomes_a_grammar_and_a_bad_one_is_refused_by_parameter() {
    let mut bench = Bench::start().await;
    let format =
        |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let schema =
        json!({ "type": "object", "properties": { "age": { "type": "integer" } }, "required": ["age"] });
    let _reply = bench.send(CHAT, chat(json!({ "response_format": format(schema) })));
    let call = bench.master.call().await;
    let grammar = call.request.sampling.as_ref().unwrap().grammar.as_ref().unwrap();
    assert!(grammar.gbnf.contains("age") && !grammar.lazy);
    call.accept().finish(FinishReason::Stop, 0).await;
    let parameters = json!({ "type": "object", "properties": { "a": { "type": "nonsense" } } });
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": parameters } });
    for (body, param) in [
        (chat(json!({ "response_format": format(json!({ "type": "nonsense" })) })), "response_format"),
        (chat(json!({ "json_schema": { "type": "nonsense" } })), "json_schema"),
        (chat(json!({ "tools": [tool] })), "tools[0].function.parameters"),
        (chat(json!({ "grammar": "root ::= nothing" })), "grammar"),
        (chat(json!({ "logit_bias": { "49152": 1 } })), "logit_bias"),
    ] {
        let reply = bench.send(CHAT, body).await.unwrap();
        assert_eq!(reply.status(), StatusCode::BAD_REQUEST);
        let body: Value = reply.json().await.unwrap();
        assert_eq!(body["error"]["param"], param, "{body}");
    }
    assert!(bench.master.is_idle());
}

#[tokio::test]
async fn a_json_answer_is_streamed_as_it_is() {
    let mut bench = Bench::start().await;
    let schema =
        json!({ "type": "object", "properties": { "name": { "type": "string" } }, "required": ["name"] });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let reply = bench.send(CHAT, stream(json!({ "response_format": format })));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    let answer = r#"{"name": "a [fish] 🐟, said \"you\""}"#;
    accepted.tokens(&bench.tokens(answer)).await;
    accepted.finish(FinishReason::Stop, 12).await;
    let events = events(reply.await.unwrap()).await;
    assert_eq!(content(&events), answer);
    assert!(events.len() > 6, "piece by piece: {events:?}");
}

#[tokio::test]
async fn a_master_that_dies_before_it_accepts_is_a_lost_replica() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, chat(json!({})));
    let _never_answered = bench.master.call().await;
    bench.agent.send_replace(ReplicaState::Down { reason: "stage 0 was killed".into() });
    let reply = tokio::time::timeout(DEADLINE, reply).await.expect("an answer").unwrap();
    assert_eq!(reply.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(reply.text().await.unwrap().contains("stage 0 was killed"));
}

#[tokio::test]
async fn a_completion_continues_text_or_tokens() {
    let mut bench = Bench::start().await;
    let words = "Once upon a time";
    for (prompt, is_streamed) in [(json!(words), false), (json!(bench.tokens(words)), true)] {
        let body = json!({ "prompt": prompt, "max_tokens": 5, "logprobs": 0, "stream": is_streamed });
        let reply = bench.send("/v1/completions", body);
        let call = bench.master.call().await;
        assert_eq!(call.request.prompt, bench.tokens(words));
        assert_eq!(call.request.max_tokens, 5);
        let accepted = call.accept();
        accepted.start(0).await;
        let answer = bench.tokens(" there was");
        for &id in &answer {
            let token = v1::GeneratedToken { id, position: 0, logprob: Some(-1.0), top: vec![] };
            accepted.tell(Event::Token(token)).await;
        }
        accepted.finish(FinishReason::Length, answer.len() as u32).await;
        let reply = reply.await.unwrap();
        let parts = if is_streamed { events(reply).await } else { vec![reply.json().await.unwrap()] };
        let text: String = parts.iter().filter_map(|part| part["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, " there was");
        assert_eq!(parts[0]["object"], "text_completion");
        assert_eq!(parts[0]["choices"][0]["logprobs"]["token_logprobs"][0], -1.0);
        assert_eq!(finish_reason(&parts), "length");
    }
}

#[tokio::test]
async fn a_shutdown_ends_streams_with_an_error_event_and_the_server_with_them() {
    let mut bench = Bench::start().await;
    let reply = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    let reply = reply.await.unwrap();
    bench.shutdown.cancel();
    let events = events(reply).await;
    assert_eq!(events.last().unwrap()["error"]["code"], "shutting_down");
    let served = tokio::time::timeout(DEADLINE, bench.server).await.expect("the server ends").unwrap();
    assert!(served.is_ok());
}

#[tokio::test]
async fn the_model_is_listed_with_its_numbers() {
    let bench = Bench::start().await;
    let (status, list) = bench.get("/v1/models").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(list["data"][0]["id"], "smollm2");
    assert_eq!(list["data"][0]["meta"]["n_ctx"], N_CTX);
    assert_eq!(list["data"][0]["meta"]["n_vocab"], 49152);
    assert_eq!(bench.get("/v1/models/smollm2").await.1, list["data"][0]);
    assert_eq!(
        bench.get("/ready").await.1,
        json!({
            "status": "ready", "model": "smollm2", "replicas": [{ "replica": 0, "status": "ready", "epoch": 1 }],
        })
    );
}

#[tokio::test]
async fn a_model_that_is_no_model_ends_the_server_with_its_name() {
    let identity = ClusterCa::new().unwrap().issue("test").unwrap();
    let (_agent, replica) = watch::channel(ReplicaState::Down { reason: "starting".into() });
    let feed = ReplicaFeed {
        state: replica,
        observations: watch::channel(Vec::new()).1,
        hops: watch::channel(None).1,
        slots: 4,
        predicted: None,
    };
    let config = OrchestratorConfig {
        model_name: "none".into(),
        aliases: Vec::new(),
        model_path: "no/such/model.gguf".into(),
        chat_template: None,
        fleet: fleet(vec![feed], &identity, &Limits::default()),
        cluster: None,
        deployment: None,
        n_ctx: N_CTX,
        limits: Limits::default(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, serve(listener, config, CancellationToken::new())).await;
    let error = ended.expect("the server ends").unwrap_err();
    assert!(error.to_string().contains("no/such/model.gguf"), "{error}");
}

/// The samples of a scrape by name and labels, of a text that is checked against OpenMetrics' grammar on the way: every sample
/// follows the type of its family, families do not interleave, and the text has an end.
async fn scrape(bench: &Bench) -> BTreeMap<String, f64> {
    let reply = bench.client.get(format!("{}/metrics", bench.url)).send().await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    let media_type = reply.headers()["content-type"].to_str().unwrap();
    assert!(media_type.starts_with("application/openmetrics-text; version=1.0.0"), "{media_type}");
    let text = reply.text().await.unwrap();
    let body = text.strip_suffix("# EOF\n").expect("the text has an end");
    let (mut samples, mut families, mut family) = (BTreeMap::new(), BTreeSet::new(), String::new());
    for line in body.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            family = declared.split(' ').next().unwrap().to_owned();
            assert!(families.insert(family.clone()), "{family} is told twice");
        } else if !line.starts_with("# ") {
            let (key, value) = line.rsplit_once(' ').expect("a sample has a value");
            let name = key.split('{').next().unwrap();
            assert!(name.starts_with("shoal_") && name.starts_with(&family), "{line} in {family}");
            assert!(key.len() == name.len() || key.ends_with("\"}"), "{line}");
            assert!(samples.insert(key.to_owned(), value.parse().unwrap()).is_none(), "{key} is told twice");
        }
    }
    samples
}

#[tokio::test]
async fn metrics_count_requests_tokens_and_times_and_tell_nothing_of_prompts() {
    let mut bench = Bench::start().await;
    let before = scrape(&bench).await;
    assert_eq!(before["shoal_ready"], 1.0);
    let reply = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(3).await;
    accepted.tokens(&bench.tokens("Hello there, friend")).await;
    let answer = bench.tokens("Hello there, friend").len();
    accepted.finish(FinishReason::Stop, answer as u32).await;
    events(reply.await.unwrap()).await;
    let refused = bench.send(CHAT, json!({ "messages": "no list" })).await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    bench.client.get(format!("{}/secret-path", bench.url)).send().await.unwrap();
    let after = scrape(&bench).await;
    for (key, value) in [
        (r#"shoal_http_requests_total{route="/v1/chat/completions",status="200"}"#, 1.0),
        (r#"shoal_http_requests_total{route="/v1/chat/completions",status="400"}"#, 1.0),
        (r#"shoal_http_requests_total{route="none",status="404"}"#, 1.0),
        (r#"shoal_generations_total{end="stop"}"#, 1.0),
        ("shoal_generated_tokens_total", answer as f64),
        ("shoal_cached_prompt_tokens_total", 3.0),
        ("shoal_time_to_first_token_seconds_count", 1.0),
        ("shoal_inter_token_seconds_count", answer as f64 - 1.0),
        ("shoal_open_requests", 0.0),
    ] {
        assert_eq!(after.get(key), Some(&value), "{key}: {after:#?}");
    }
    assert!(after["shoal_prompt_tokens_total"] > 10.0);
    let told = format!("{after:?}");
    assert!(!told.contains("secret") && !told.contains("hello"), "{told}");
}

#[tokio::test]
async fn metrics_tell_how_generations_ended_that_did_not_end_well() {
    let mut bench = Bench::start().await;
    let refused = bench.send(CHAT, chat(json!({})));
    bench.master.call().await.refuse(Status::resource_exhausted("64 wait"));
    assert_eq!(refused.await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    let left = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.token(bench.tokens("a")[0]).await;
    drop(left.await.unwrap());
    accepted.cancelled().await;
    let counted = async {
        loop {
            let samples = scrape(&bench).await;
            if samples.contains_key(r#"shoal_generations_total{end="cancelled"}"#) {
                return samples;
            }
        }
    };
    let samples = tokio::time::timeout(DEADLINE, counted).await.unwrap();
    assert_eq!(samples[r#"shoal_generations_total{end="failed"}"#], 1.0);
    assert_eq!(samples[r#"shoal_generations_total{end="cancelled"}"#], 1.0);
}

#[tokio::test]
async fn a_scrape_has_the_engines_and_the_stages_numbers_and_does_not_wait_for_a_master_that_is_silent() {
    let bench = Bench::start().await;
    assert!(!scrape(&bench).await.contains_key(r#"shoal_slots{replica="0"}"#), "the master does not answer");
    bench.master.engine.send_replace(Some(v1::EngineStatusReply {
        slots: 4,
        active: 3,
        queued: 2,
        queue_limit: 64,
        ..Default::default()
    }));
    let totals = StepTotals { steps: 100, rows: 300, time: Millis(500.0), ..Default::default() };
    let bucket = StepBucket::of(Phase::Decode, 3, 0);
    let mut correction = Correction::default();
    correction.observe(bucket, totals, Millis(4.0));
    let stage = |index, round_trips| StageObservation {
        resident: Bytes(1 << 20),
        steps: vec![ObservedSteps { bucket, totals, predicted: Some(Millis(400.0)) }],
        visits: Tally { count: 100, rows: 300, time: Millis(600.0) },
        round_trips,
        correction: correction.clone(),
        ..StageObservation::none(StageIndex(index))
    };
    let round_trips = Tally { count: 100, rows: 300, time: Millis(1300.0) };
    bench.stages.send_replace(vec![stage(0, Tally::default()), stage(1, round_trips)]);
    assert!(
        !scrape(&bench).await.contains_key(r#"shoal_step_hops_predicted_seconds{replica="0"}"#),
        "no link is watched"
    );
    bench.hops.send_replace(Some(ForetoldHops { observed: Millis(12.0), predicted: Millis(0.5) }));
    let samples = scrape(&bench).await;
    let labels = r#"stage="1",phase="decode",rows="3-4",depth="0-1024",replica="0""#;
    let of_replica = |name: &str| format!(r#"{name}{{replica="0"}}"#);
    for (key, value) in [
        (of_replica("shoal_replica_ready"), 1.0),
        (of_replica("shoal_slots"), 4.0),
        (of_replica("shoal_active_slots"), 3.0),
        (of_replica("shoal_engine_queued_requests"), 2.0),
        ("shoal_queued_requests".to_owned(), 0.0),
        ("shoal_queue_limit".to_owned(), 64.0),
        (format!("shoal_stage_steps_total{{{labels}}}"), 100.0),
        (format!("shoal_stage_compute_seconds_total{{{labels}}}"), 0.5),
        (format!("shoal_stage_predicted_compute_seconds_total{{{labels}}}"), 0.4),
        (r#"shoal_stage_resident_memory_bytes{stage="0",replica="0"}"#.to_owned(), 1048576.0),
        (of_replica("shoal_round_trips_total"), 100.0),
        (of_replica("shoal_step_hops_recent_seconds"), 0.012),
        (of_replica("shoal_step_hops_predicted_seconds"), 0.0005),
    ] {
        assert_eq!(samples.get(&key), Some(&value), "{key}: {samples:#?}");
    }
    assert!((samples[r#"shoal_step_hops_seconds{replica="0"}"#] - 0.001).abs() < 1e-9);
    let ratio = samples[r#"shoal_stage_correction_ratio{stage="0",phase="decode",rows="3-4",replica="0"}"#];
    assert!(ratio > 1.0 && ratio < 1.25, "{ratio}");
}
