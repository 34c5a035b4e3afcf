//! Whether the process is up, whether it would answer a chat, and which model it has.
//!
//! Nothing here claims a model that would not answer, and nothing waits for anything.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use cluster::ReplicaState;
use serde_json::{Value, json};

use crate::app::App;
use crate::fleet::Member;
use crate::openai::ApiError;

/// `GET /health`: the process is up.
pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// `GET /ready`: 200 if a chat would be answered now, else 503 and the reason; and how each replica is.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let members = app.fleet.members();
    let replicas: Vec<Value> =
        members.iter().map(|(number, member)| describe_replica(*number, member)).collect();
    match app.readiness() {
        Ok(()) => {
            let body = json!({ "status": "ready", "model": &*app.model_name, "replicas": replicas });
            Json(body).into_response()
        }
        Err(error) => {
            let reason = match error {
                ApiError::NotReady { reason } => reason,
                other => other.to_string(),
            };
            let mut body = json!({ "status": overall(&replicas), "reason": reason });
            if let Some(progress) = furthest(&replicas) {
                body["progress"] = progress.into();
            }
            body["replicas"] = replicas.into();
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

/// Down if nothing is being loaded: then something must change before it serves.
fn overall(replicas: &[Value]) -> &'static str {
    if !replicas.is_empty() && replicas.iter().all(|replica| replica["status"] == "down") {
        "down"
    } else {
        "loading"
    }
}

/// How far the replica is that will be the first to serve.
fn furthest(replicas: &[Value]) -> Option<f64> {
    replicas.iter().filter_map(|replica| replica["progress"].as_f64()).max_by(f64::total_cmp)
}

fn describe_replica(number: usize, member: &Member) -> Value {
    let (status, reason) = match (member.readiness(), member.replica.state()) {
        (Err(reason), _) if member.is_draining() => ("draining", reason),
        (Ok(()), ReplicaState::Ready { epoch, .. }) => {
            return json!({ "replica": number, "status": "ready", "epoch": epoch.0 });
        }
        (Err(reason), ReplicaState::Loading { progress, .. }) => {
            let (status, reason) = ("loading", reason);
            return json!({ "replica": number, "status": status, "reason": reason, "progress": progress });
        }
        (Err(reason), _) => ("down", reason),
        (Ok(()), _) => ("loading", "its state is changing".to_owned()),
    };
    json!({ "replica": number, "status": status, "reason": reason })
}

/// `GET /v1/models`: the model, while it would answer.
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = describe(&app).into_iter().collect();
    Json(json!({ "object": "list", "data": data }))
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&id))?;
    describe(&app).map(Json)
}

fn describe(app: &App) -> Result<Value, ApiError> {
    app.readiness()?;
    let facts = app.text_model()?.facts();
    Ok(json!({
        "id": &*app.model_name,
        "object": "model",
        "created": app.created,
        "owned_by": "shoal",
        "meta": {
            "n_ctx": app.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_vocab": facts.n_vocab,
            "n_embd": facts.n_embd,
        },
    }))
}
