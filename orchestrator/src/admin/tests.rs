//! The admin API over a real registry, with no model.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, StatusCode};
use cluster::{Attention, BlockKind, BlockShape, Bytes, FeedForward, MemoryCosts, ModelShape, ReplicaState};
use deploy::{Deployment, MemoryRule, ServedModel};
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
    deployment: Deployment,
    _folder: TempDir,
}

impl Api {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(folder.path()).unwrap();
        let deployment = Deployment::open(registry.clone(), served()).unwrap();
        let app = app(Some(registry.clone()), Some(deployment.clone()));
        Self { app, registry, deployment, _folder: folder }
    }

    async fn ask(&self, method: Method, path: &str, key: Option<&str>) -> Response {
        let request = Request::builder().method(method).uri(path);
        let request = match key {
            Some(key) => request.header(header::AUTHORIZATION, format!("Bearer {key}")),
            None => request,
        };
        router(Arc::clone(&self.app)).oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        answer(self.ask(Method::GET, path, Some(self.registry.admin_key())).await).await
    }

    async fn post(&self, path: &str, body: &str) -> (StatusCode, Value) {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let request = request.header(header::AUTHORIZATION, format!("Bearer {}", self.registry.admin_key()));
        let request = request.body(Body::from(body.to_owned())).unwrap();
        answer(router(Arc::clone(&self.app)).oneshot(request).await.unwrap()).await
    }
}

async fn answer(response: Response) -> (StatusCode, Value) {
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap())
}

/// A model of eight blocks.
fn served() -> ServedModel {
    let block = BlockShape {
        kind: BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense },
        weight_bytes: Bytes::from_mib(1),
        kv_elements_per_token: 64,
        state_bytes_per_slot: Bytes::ZERO,
    };
    let shape = ModelShape {
        architecture: "llama".into(),
        name: None,
        n_embd: 64,
        n_vocab: 100,
        n_ctx_train: 512,
        n_head: vec![4; 8],
        n_head_kv: vec![4; 8],
        blocks: vec![block; 8],
        embedding_bytes: Bytes::from_mib(1),
        head_bytes: Bytes::from_mib(1),
        tied: true,
        global_bytes: Bytes::ZERO,
        experts: None,
        range_rules: Vec::new(),
    };
    ServedModel {
        hash: "ab12".into(),
        names: vec!["fish".into()],
        n_ctx: 512,
        n_ubatch: 64,
        costs: MemoryCosts::assumed(&shape),
        memory: MemoryRule::Heed,
        shape,
    }
}

fn app(cluster: Option<Registry>, deployment: Option<Deployment>) -> Arc<App> {
    let down = ReplicaState::Down { reason: "none".into() };
    let config = config(feed(watch::channel(down).1));
    Arc::new(App::new(OrchestratorConfig { cluster, deployment, ..config }))
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
        (Method::GET, "/admin/v1/plans"),
        (Method::POST, "/admin/v1/plans"),
        (Method::GET, "/admin/v1/plans/1"),
        (Method::POST, "/admin/v1/plans/1/apply"),
        (Method::POST, "/admin/v1/plans/rollback"),
        (Method::GET, "/admin/v1/deployment"),
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
    let response = router(app(None, None)).oneshot(request).await.unwrap();
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
    let (status, body) = api.post("/admin/v1/replicas/0/role", r#"{ "role": "prefill" }"#).await;
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
        let (status, body) = api.post(path, body).await;
        assert_eq!((status, &body["error"]["code"]), (expected, &code.into()), "{body}");
    }
    assert_eq!(api.get("/admin/v1/replicas").await.1["data"][0]["role"], "prefill");
}

/// A plan of one replica on a node.
fn plan_on(node: &str) -> Value {
    let stage = serde_json::json!({ "device": node, "start": 0, "end": 8, "gpu_blocks": 0 });
    let replica = serde_json::json!({ "role": "mixed", "slots": 2, "stages": [stage], "limit": "memory" });
    serde_json::json!({ "objective": "by hand", "replicas": [replica] })
}

#[tokio::test]
async fn a_plan_with_faults_is_refused_with_all_of_them() {
    let api = Api::new();
    let mut plan = plan_on("desk");
    plan["replicas"][0]["slots"] = 0.into();
    plan["replicas"][0]["stages"][0]["end"] = 7.into();
    let (status, body) = api.post("/admin/v1/plans", &plan.to_string()).await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::BAD_REQUEST, &"invalid_plan".into()));
    let faults = body["error"]["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 3, "{faults:?}");
    for part in ["it has 0 slots", "blocks 7..8 are nowhere", "there is no node desk"] {
        assert!(faults.iter().any(|fault| fault.as_str().unwrap().contains(part)), "{part}: {faults:?}");
        assert!(body["error"]["message"].as_str().unwrap().contains(part), "{body}");
    }
    let (status, _) = api.post("/admin/v1/plans", "{").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let (status, body) = api.post("/admin/v1/plans", "{}").await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::BAD_REQUEST, &"invalid_plan".into()));
    assert_eq!(api.get("/admin/v1/plans").await.1["data"], serde_json::json!([]));
}

#[tokio::test]
async fn plans_are_listed_applied_tried_without_effect_and_taken_back() {
    let api = Api::new();
    let (status, body) = api.post("/admin/v1/plans/rollback", "").await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::CONFLICT, &"plan_conflict".into()));
    for node in ["desk", "mac"] {
        let file = serde_json::from_value(plan_on(node)).unwrap();
        api.deployment.add(&file, registry::PlanOrigin::Given).unwrap();
    }
    let (status, body) = api.post("/admin/v1/plans/1/apply?dry_run=true", "").await;
    assert_eq!((status, &body["dry_run"], &body["decision"]), (StatusCode::OK, &true.into(), &Value::Null));
    assert_eq!(
        (&body["steps"][0]["act"], &body["steps"][0]["chain"]),
        (&"start".into(), &"desk[0..8], 2 slots".into())
    );
    assert_eq!(api.get("/admin/v1/deployment").await.1["plan"], Value::Null);
    for id in [1, 2] {
        let (status, body) = api.post(&format!("/admin/v1/plans/{id}/apply"), "").await;
        assert_eq!((status, &body["decision"]), (StatusCode::OK, &id.into()), "{body}");
    }
    let (_, plans) = api.get("/admin/v1/plans").await;
    let desired: Vec<bool> =
        plans["data"].as_array().unwrap().iter().map(|plan| plan["desired"].as_bool().unwrap()).collect();
    assert_eq!(desired, [true, false]);
    let (_, plan) = api.get("/admin/v1/plans/1").await;
    assert_eq!(plan["plan"]["replicas"][0]["stages"][0]["device"], "desk");
    let (_, back) = api.post("/admin/v1/plans/rollback", "").await;
    assert_eq!((&back["plan"], &back["decision"]), (&1.into(), &3.into()));
    let (_, now) = api.get("/admin/v1/deployment").await;
    assert_eq!(
        (&now["plan"], &now["reached"], &now["replicas"]),
        (&1.into(), &false.into(), &serde_json::json!([]))
    );
    assert_eq!(now["history"].as_array().unwrap().len(), 3);
    for (path, code) in
        [("9/apply", "plan_not_found"), ("x/apply", "invalid_value"), ("1/apply?dryrun=1", "invalid_value")]
    {
        let (status, body) = api.post(&format!("/admin/v1/plans/{path}"), "").await;
        assert!(status.is_client_error() && body["error"]["code"] == code, "{path}: {body}");
    }
}

#[tokio::test]
async fn what_is_asked_for_and_what_is_made_of_it_is_told() {
    let api = Api::new();
    let fleet = &api.app.fleet;
    fleet.count_demand_over(Duration::from_secs(60));
    for prompt in [100, 300] {
        let answer = fleet.meter().arrived(prompt);
        (0..8).for_each(|_| answer.token());
    }
    let (status, told) = api.get("/admin/v1/workload").await;
    assert_eq!(
        (status, &told["window_s"], &told["adaptation"]),
        (StatusCode::OK, &60.0.into(), &Value::Null)
    );
    assert_eq!((&told["prompt_tokens"], &told["answer_tokens"]), (&200.0.into(), &8.0.into()));
    assert_eq!((&told["counted"]["prompt"]["count"], &told["waiting"]), (&2.into(), &0.into()));
    let planned = cluster::DemandLevel { requests_per_second: 2.0, prompt_tokens: 100.0, answer_tokens: 8.0 };
    let planned = Some(cluster::DemandRange::of(planned));
    let (mode, planned, outside, last) = ("roles".to_owned(), planned, None, Some("flipped".to_owned()));
    fleet.tell_adaptation(crate::demand::Adaptation { mode, planned, outside, last });
    let (_, told) = api.get("/admin/v1/workload").await;
    assert_eq!(
        (&told["adaptation"]["mode"], &told["adaptation"]["last"]),
        (&"roles".into(), &"flipped".into())
    );
    assert_eq!(told["adaptation"]["planned"]["low"]["requests_per_second"], 2.0);
    let (status, _) = answer(api.ask(Method::GET, "/admin/v1/workload", None).await).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}
