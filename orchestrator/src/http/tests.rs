//! Routes without a model: everything that is decided before one is needed.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use cluster::{Bytes, ReplicaState};
use protocol::tls::ClusterCa;
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::ServiceExt;

use super::*;
use crate::config::{Limits, OrchestratorConfig, ReplicaFeed};
use crate::testing::fleet;

fn app(state: ReplicaState) -> (Arc<App>, watch::Sender<ReplicaState>) {
    let (sender, replica) = watch::channel(state);
    let feeds = vec![ReplicaFeed {
        state: replica,
        observations: watch::channel(Vec::new()).1,
        hops: watch::channel(None).1,
        slots: 1,
        predicted: None,
    }];
    let tls = ClusterCa::new().unwrap().issue("orchestrator").unwrap();
    let config = OrchestratorConfig {
        model_name: "fish".into(),
        aliases: vec!["fish.gguf".into()],
        model_path: "no/such/file".into(),
        chat_template: None,
        fleet: fleet(feeds, &tls, &Limits::default()),
        cluster: None,
        deployment: None,
        n_ctx: 512,
        limits: Limits { max_body: Bytes(4096), max_open_requests: 1, ..Limits::default() },
    };
    (Arc::new(App::new(config)), sender)
}

fn down() -> ReplicaState {
    ReplicaState::Down { reason: "stage 1 was killed".into() }
}

async fn ask(app: &Arc<App>, request: Request<Body>) -> Response {
    router(Arc::clone(app)).oneshot(request).await.unwrap()
}

async fn get_path(app: &Arc<App>, path: &str) -> Response {
    ask(app, Request::get(path).body(Body::empty()).unwrap()).await
}

async fn post(app: &Arc<App>, path: &str, body: &Value) -> Response {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    ask(app, request.body(Body::from(body.to_string())).unwrap()).await
}

async fn json_of(response: Response) -> Value {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn chat() -> Value {
    json!({ "model": "fish", "messages": [{ "role": "user", "content": "hi" }] })
}

#[tokio::test]
async fn case_26_health_is_well_whatever_the_replica_is() {
    let (app, _agent) = app(down());
    assert_eq!(get_path(&app, "/health").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn case_2_nothing_claims_a_model_that_would_not_answer() {
    let (app, _agent) = app(down());
    let ready = get_path(&app, "/ready").await;
    assert_eq!(ready.status(), StatusCode::SERVICE_UNAVAILABLE);
    let reason = "stage 1 was killed";
    let replica = json!({ "replica": 0, "status": "down", "reason": reason });
    assert_eq!(json_of(ready).await, json!({ "status": "down", "reason": reason, "replicas": [replica] }));
    assert_eq!(json_of(get_path(&app, "/v1/models").await).await, json!({ "object": "list", "data": [] }));
    assert_eq!(get_path(&app, "/v1/models/fish").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    for (path, body) in [("/v1/chat/completions", chat()), ("/v1/completions", json!({ "prompt": "hi" }))] {
        let answer = post(&app, path, &body).await;
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key(header::RETRY_AFTER));
        let body = json_of(answer).await;
        assert_eq!(body["error"]["code"], "not_ready");
        assert!(body["error"]["message"].as_str().unwrap().contains("stage 1 was killed"));
    }
}

#[tokio::test]
async fn a_loading_replica_tells_its_progress() {
    let (app, agent) = app(ReplicaState::Loading { progress: 0.5, waiting_for: "stage 2".into() });
    let body = json_of(get_path(&app, "/ready").await).await;
    assert_eq!(body["status"], "loading");
    assert_eq!(body["progress"], 0.5);
    assert_eq!(body["reason"], "loading, 50 %, waiting for stage 2");
    agent.send_replace(down());
    assert_eq!(json_of(get_path(&app, "/ready").await).await["status"], "down");
}

#[tokio::test]
async fn a_replica_whose_agent_is_gone_is_not_ready() {
    let master = "127.0.0.1:1".parse().unwrap();
    let (app, agent) = app(ReplicaState::Ready { master, epoch: cluster::Epoch(1) });
    let reason = json_of(get_path(&app, "/ready").await).await["reason"].clone();
    assert_eq!(reason, "the vocabulary is being loaded");
    drop(agent);
    let reason = json_of(get_path(&app, "/ready").await).await["reason"].clone();
    assert_eq!(reason, "the replica's agent has ended");
}

#[tokio::test]
async fn another_models_name_is_not_found() {
    let (app, _agent) = app(down());
    let mut asked = chat();
    asked["model"] = json!("whale");
    let answer = post(&app, "/v1/chat/completions", &asked).await;
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    let body = json_of(answer).await;
    assert_eq!(
        (&body["error"]["code"], &body["error"]["param"]),
        (&json!("model_not_found"), &json!("model"))
    );
    assert_eq!(get_path(&app, "/v1/models/org/whale").await.status(), StatusCode::NOT_FOUND);
    for known in [json!("fish"), json!("fish.gguf"), json!(null)] {
        asked["model"] = known;
        assert_eq!(
            post(&app, "/v1/chat/completions", &asked).await.status(),
            StatusCode::SERVICE_UNAVAILABLE
        );
    }
}

#[tokio::test]
async fn bad_requests_are_refused_even_while_nothing_is_ready() {
    let (app, _agent) = app(down());
    let answer = post(&app, "/v1/chat/completions", &json!({ "messages": [] })).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    assert_eq!(json_of(answer).await["error"]["param"], "messages");
    let large = json!({ "prompt": "a".repeat(5000) });
    let answer = post(&app, "/v1/completions", &large).await;
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let message = json_of(answer).await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("4096"), "{message}");
}

#[tokio::test]
async fn unknown_routes_and_methods_are_refused_in_openais_shape() {
    let (app, _agent) = app(down());
    let unknown = get_path(&app, "/v1/nothing").await;
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
    assert_eq!(json_of(unknown).await["error"]["code"], "unknown_url");
    let wrong = get_path(&app, "/v1/chat/completions").await;
    assert_eq!(wrong.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(wrong.headers()[header::ALLOW], "POST");
    assert_eq!(json_of(wrong).await["error"]["code"], "method_not_allowed");
}

#[tokio::test]
async fn case_25_too_many_open_requests_are_refused_with_retry_after() {
    let (app, _agent) = app(down());
    let place = app.admit().unwrap();
    let answer = post(&app, "/v1/chat/completions", &chat()).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(json_of(answer).await["error"]["code"], "too_many_requests");
    assert_eq!(get_path(&app, "/health").await.status(), StatusCode::OK);
    drop(place);
    let answer = post(&app, "/v1/chat/completions", &chat()).await;
    assert_eq!(json_of(answer).await["error"]["code"], "not_ready");
}

#[tokio::test]
async fn a_panic_is_answered_in_openais_shape() {
    async fn panics() -> &'static str {
        panic!("a prompt may be here")
    }
    let routes: Router = Router::new().route("/", get(panics)).layer(CatchPanicLayer::custom(panics::answer));
    let answer = routes.oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = json_of(answer).await;
    assert_eq!(body["error"]["code"], "internal_error");
    assert!(!body.to_string().contains("a prompt"));
}
