//! Whole runs against small servers that behave well and badly, over real sockets.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Json;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::stream;
use loadgen::{
    ApiKey, Arrivals, Ending, Endpoint, Limits, Load, Prompts, Requests, Run, Summary, Target, TargetConfig,
    TargetError, warm_up,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const END: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// Serves until the test ends. What the prompt says is what the server does.
async fn server() -> String {
    let turn = Arc::new(AtomicUsize::new(0));
    let generate = move |Json(body): Json<Value>| {
        let turn = turn.fetch_add(1, Ordering::Relaxed);
        async move { behave(body["messages"][0]["content"].as_str().unwrap_or_default(), turn) }
    };
    let models = |headers: HeaderMap| async move {
        match headers.get("authorization").map(|key| key.to_str().unwrap().to_owned()) {
            Some(key) if key != "Bearer good" => StatusCode::UNAUTHORIZED.into_response(),
            _ => Json(json!({ "data": [{ "id": "m" }] })).into_response(),
        }
    };
    let routes = Router::new()
        .route("/v1/models", get(models))
        .route("/empty/v1/models", get(|| async { Json(json!({ "data": [] })) }))
        .route("/v1/chat/completions", post(generate));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, routes).into_future());
    format!("http://{address}")
}

fn behave(what: &str, turn: usize) -> Response {
    let events = |events: Vec<Result<&'static str, std::io::Error>>| {
        Body::from_stream(stream::iter(events)).into_response()
    };
    match what {
        "answer" => events(vec![Ok(TOKEN), Ok(TOKEN), Ok(TOKEN), Ok(END)]),
        "refuse every second" if turn % 2 == 1 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        "refuse every second" => events(vec![Ok(TOKEN), Ok(END)]),
        "drop" => events(vec![Ok(TOKEN), Err(std::io::Error::other("gone"))]),
        "end early" => events(vec![Ok(TOKEN)]),
        "error" => events(vec![Ok(TOKEN), Ok("data: {\"error\":{\"code\":\"engine_error\"}}\n\n")]),
        "hang" => Body::from_stream(stream::pending::<Result<&str, std::io::Error>>()).into_response(),
        other => panic!("{other}"),
    }
}

fn config(url: &str) -> TargetConfig {
    TargetConfig {
        url: url.to_owned(),
        key: None,
        model: None,
        endpoint: Endpoint::Chat,
        fields: serde_json::Map::new(),
        timeout: Duration::from_secs(30),
    }
}

fn requests(prompts: &str) -> Requests {
    let prompts = Prompts::parse(prompts).unwrap();
    Requests { prompts, max_tokens: "8".parse().unwrap(), trace: None, seed: 0 }
}

fn run<'a>(target: &'a Arc<Target>, requests: &'a Requests, load: &'a Load, count: u64) -> Run<'a> {
    let ending = Ending { requests: count, after: None };
    Run { target, requests, load, ending, first: 0, limits: Limits::default() }
}

async fn closed(config: TargetConfig, prompts: &str, count: u64) -> Summary {
    let target = Arc::new(Target::connect(config).await.unwrap());
    let (requests, load) = (requests(prompts), Load::Closed { concurrency: 3 });
    run(&target, &requests, &load, count).run(&CancellationToken::new(), &mut |_| {}).await.summary()
}

#[tokio::test]
async fn a_closed_loop_sends_as_many_as_it_should_and_counts_every_token() {
    let server = server().await;
    let summary = closed(config(&server), "answer", 20).await;
    assert_eq!((summary.answered, summary.failed, summary.unfinished), (20, 0, 0));
    assert_eq!((summary.tokens, summary.ttft_ms.unwrap().count), (60, 20));
    assert!(summary.tokens_per_second > 0.0 && summary.client.cpu_share > 0.0);
}

#[tokio::test]
async fn an_open_loop_sends_every_request_at_its_time_or_later() {
    let target = Arc::new(Target::connect(config(&server().await)).await.unwrap());
    let (requests, load) = (requests("answer"), Load::Open(Arrivals::Fixed("200".parse().unwrap())));
    let mut ended = Vec::new();
    let tally =
        run(&target, &requests, &load, 20).run(&CancellationToken::new(), &mut |n| ended.push(n)).await;
    let summary = tally.summary();
    assert_eq!((summary.answered, summary.failed), (20, 0));
    assert!(summary.seconds >= 0.095, "{}", summary.seconds);
    assert_eq!(ended, (1..=20).collect::<Vec<u64>>());
}

#[tokio::test]
async fn no_more_is_sent_when_the_time_is_over() {
    let target = Arc::new(Target::connect(config(&server().await)).await.unwrap());
    let requests = requests("answer");
    for load in [Load::Open(Arrivals::Fixed("100".parse().unwrap())), Load::Closed { concurrency: 2 }] {
        let ending = Ending { requests: u64::MAX, after: Some(Duration::from_millis(100)) };
        let run = Run { ending, ..run(&target, &requests, &load, 0) };
        let summary = run.run(&CancellationToken::new(), &mut |_| {}).await.summary();
        assert!(summary.answered > 0 && summary.failed == 0, "{load:?}: {summary:?}");
        if let Load::Open(_) = load {
            assert_eq!(summary.answered, 10);
        }
    }
}

#[tokio::test]
async fn what_goes_wrong_is_counted_by_kind() {
    let server = server().await;
    let summary = closed(config(&server), "refuse every second", 10).await;
    assert_eq!((summary.answered, summary.failures["HTTP 503"]), (5, 5));
    for (what, kind) in
        [("drop", "stream dropped"), ("end early", "stream dropped"), ("error", "error event engine_error")]
    {
        let summary = closed(config(&server), what, 4).await;
        assert_eq!(
            (summary.answered, summary.failures.get(kind)),
            (0, Some(&4)),
            "{what}: {:?}",
            summary.failures
        );
    }
    let impatient = TargetConfig { timeout: Duration::from_millis(50), ..config(&server) };
    assert_eq!(closed(impatient, "hang", 2).await.failures["timed out"], 2);
}

/// Answers the first request of each connection and closes it at the second, as a server does whose patience with idle connections
/// ends at the wrong moment.
async fn impatient() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 1 << 16];
                if matches!(stream.read(&mut buffer).await, Ok(n) if n > 0) {
                    let body = format!("{TOKEN}{END}");
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: ";
                    let answer = format!("{head}{}\r\n\r\n{body}", body.len());
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    let _ = stream.read(&mut buffer).await;
                }
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test]
async fn a_connection_that_ends_as_it_is_used_again_costs_no_request() {
    let config = TargetConfig { model: Some("m".to_owned()), ..config(&impatient().await) };
    let summary = closed(config, "answer", 6).await;
    assert_eq!((summary.answered, summary.failed), (6, 0), "{:?}", summary.failures);
}

#[tokio::test]
async fn an_interrupted_run_gives_what_was_measured_so_far() {
    let target = Arc::new(Target::connect(config(&server().await)).await.unwrap());
    let (requests, load) = (requests("answer\nanswer\nhang"), Load::Closed { concurrency: 1 });
    let stop = CancellationToken::new();
    let summary = run(&target, &requests, &load, 9)
        .run(&stop, &mut |ended| {
            if ended == 2 {
                stop.cancel();
            }
        })
        .await
        .summary();
    assert_eq!((summary.answered, summary.failed, summary.unfinished), (2, 0, 1));
}

#[tokio::test]
async fn a_warm_up_asks_for_as_many_as_it_should() {
    let target = Arc::new(Target::connect(config(&server().await)).await.unwrap());
    let tally = warm_up(&target, &requests("answer"), (3, 2), &CancellationToken::new()).await;
    assert_eq!(tally.summary().answered, 3);
}

#[tokio::test]
async fn a_server_that_cannot_be_used_is_told_apart() {
    let server = server().await;
    let error = |config| async { Target::connect(config).await.unwrap_err() };
    let refused = error(TargetConfig { key: Some(ApiKey::from("bad".to_owned())), ..config(&server) }).await;
    assert!(matches!(refused, TargetError::Refused { .. }));
    assert!(refused.to_string().ends_with("the API key was refused"), "{refused}");
    let key = TargetConfig { key: Some(ApiKey::from("a\nb".to_owned())), ..config(&server) };
    assert!(matches!(error(key).await, TargetError::Key(_)));
    assert!(matches!(error(config("127.0.0.1:1")).await, TargetError::Unreachable { .. }));
    assert!(matches!(error(config("not a url")).await, TargetError::Url { .. }));
    let empty = config(&format!("{server}/empty"));
    assert!(matches!(error(empty.clone()).await, TargetError::NoModels { .. }));
    let named = Target::connect(TargetConfig { model: Some("m".to_owned()), ..empty }).await.unwrap();
    assert_eq!(named.model(), "m");
}
