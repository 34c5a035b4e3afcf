//! The admin API over a real registry, with no model.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, StatusCode};
use cluster::ReplicaState;
use futures::StreamExt;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::watch;
use tower::ServiceExt;

use super::*;
use crate::config::OrchestratorConfig;
use crate::http::router;
use crate::testing::{config, feed};

struct Api {
    app: Arc<App>,
    registry: Registry,
    _folder: TempDir,
}

impl Api {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(folder.path()).unwrap();
        Self { app: app(Some(registry.clone())), registry, _folder: folder }
    }

    async fn ask(&self, method: Method, path: &str, key: Option<&str>) -> Response {
        let request = Request::builder().method(method).uri(path);
        let request = match key {
            Some(key) => request.header(header::AUTHORIZATION, format!("Bearer {key}")),
            None => request,
        };
        router(Arc::clone(&self.app)).oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    async fn set_role(&self, path: &str, body: &str) -> (StatusCode, Value) {
        let request = Request::post(path)
            .header(header::AUTHORIZATION, format!("Bearer {}", self.registry.admin_key()))
            .header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = router(Arc::clone(&self.app)).oneshot(request).await.unwrap();
        let status = response.status();
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let response = self.ask(Method::GET, path, Some(self.registry.admin_key())).await;
        let status = response.status();
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap())
    }
}

fn app(cluster: Option<Registry>) -> Arc<App> {
    let down = ReplicaState::Down { reason: "none".into() };
    let config = config(feed(watch::channel(down).1));
    Arc::new(App::new(OrchestratorConfig { cluster, ..config }))
}

// Field case 30.
#[tokio::test]
async fn case_30_every_admin_route_asks_for_the_key_and_probes_do_not() {
    let api = Api::new();
    let other = Api::new();
    for (method, path) in [
        (Method::GET, "/admin/v1/nodes"),
        (Method::GET, "/admin/v1/nodes/desk"),
        (Method::DELETE, "/admin/v1/nodes/desk"),
        (Method::POST, "/admin/v1/nodes/desk/approve"),
        (Method::GET, "/admin/v1/replicas"),
        (Method::POST, "/admin/v1/replicas/0/role"),
        (Method::GET, "/admin/v1/events"),
        (Method::GET, "/admin/v1/events?follow=true"),
        (Method::HEAD, "/admin/v1/nodes"),
    ] {
        for key in [None, Some(""), Some("x"), Some(other.registry.admin_key())] {
            let refused = api.ask(method.clone(), path, key).await;
            assert_eq!(refused.status(), StatusCode::UNAUTHORIZED, "{method} {path}");
        }
    }
    assert_eq!(api.ask(Method::GET, "/health", None).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn without_a_cluster_there_is_no_admin_api() {
    let request = Request::get("/admin/v1/nodes").body(Body::empty()).unwrap();
    let response = router(app(None)).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn nodes_are_listed_and_an_unknown_one_is_not_found() {
    let api = Api::new();
    let (status, body) = api.get("/admin/v1/nodes").await;
    assert_eq!((status, &body["data"]), (StatusCode::OK, &serde_json::json!([])));
    let (status, body) = api.get("/admin/v1/nodes/desk").await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &"node_not_found".into()));
}

#[tokio::test]
async fn events_are_listed_and_followed_from_where_one_left_off() {
    let api = Api::new();
    for _ in 0..3 {
        api.registry.make_token(Duration::from_secs(60), Vec::new()).unwrap();
    }
    let (_, body) = api.get("/admin/v1/events?limit=2").await;
    assert_eq!(body["data"].as_array().unwrap().len(), 2);
    assert_eq!(body["data"][0]["kind"], "token_made");
    let last = body["data"][1]["id"].as_u64().unwrap();
    let path = format!("/admin/v1/events?after={last}&follow=true");
    let followed = api.ask(Method::GET, &path, Some(api.registry.admin_key())).await;
    let mut body = followed.into_body().into_data_stream();
    let third = String::from_utf8(body.next().await.unwrap().unwrap().to_vec()).unwrap();
    assert!(third.contains(&format!("id: {}", last + 1)) && third.contains("event: token_made"), "{third}");
    // What happens later comes too, as another process's does.
    let id = api.registry.tokens().unwrap()[0].id;
    api.registry.revoke_token(&id.to_string()).unwrap();
    let fourth = String::from_utf8(body.next().await.unwrap().unwrap().to_vec()).unwrap();
    assert!(fourth.contains("token_revoked"), "{fourth}");
    let (status, _) = api.get("/admin/v1/events?limt=2").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_replicas_role_is_set_and_shown_and_what_is_no_role_or_no_replica_is_refused() {
    let api = Api::new();
    let (status, body) = api.get("/admin/v1/replicas").await;
    assert_eq!(status, StatusCode::OK);
    let replica = &body["data"][0];
    assert_eq!((&replica["role"], &replica["status"]), (&"mixed".into(), &"down".into()), "{body}");
    assert_eq!(
        (&replica["slots"], &replica["running"], &replica["waiting"]),
        (&1.into(), &0.into(), &0.into())
    );
    assert!(replica["prefill_tokens_per_second"].as_f64().unwrap() > 0.0, "{body}");
    let (status, body) = api.set_role("/admin/v1/replicas/0/role", r#"{ "role": "prefill" }"#).await;
    assert_eq!((status, &body["role"]), (StatusCode::OK, &"prefill".into()), "{body}");
    assert_eq!(api.get("/admin/v1/replicas").await.1["data"][0]["role"], "prefill");
    for (path, body, expected, code) in [
        ("/admin/v1/replicas/1/role", r#"{ "role": "decode" }"#, StatusCode::NOT_FOUND, "replica_not_found"),
        ("/admin/v1/replicas/x/role", r#"{ "role": "decode" }"#, StatusCode::NOT_FOUND, "replica_not_found"),
        ("/admin/v1/replicas/0/role", r#"{ "role": "cook" }"#, StatusCode::BAD_REQUEST, "invalid_value"),
        ("/admin/v1/replicas/0/role", r#"{}"#, StatusCode::BAD_REQUEST, "missing_required_parameter"),
        ("/admin/v1/replicas/0/role", r#"[]"#, StatusCode::BAD_REQUEST, "missing_required_parameter"),
        (
            "/admin/v1/replicas/0/role",
            r#"{ "role": "decode", "now": 1 }"#,
            StatusCode::BAD_REQUEST,
            "unknown_parameter",
        ),
    ] {
        let (status, body) = api.set_role(path, body).await;
        assert_eq!((status, &body["error"]["code"]), (expected, &code.into()), "{body}");
    }
    assert_eq!(api.get("/admin/v1/replicas").await.1["data"][0]["role"], "prefill");
}
