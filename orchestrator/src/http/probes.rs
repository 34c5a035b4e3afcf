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
use crate::openai::ApiError;

/// `GET /health`: the process is up.
pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// `GET /ready`: 200 if a chat would be answered now, else 503 and the reason.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    match (app.readiness(), app.replica.state()) {
        (Ok(()), ReplicaState::Ready { epoch, .. }) => {
            Json(json!({ "status": "ready", "model": &*app.model_name, "epoch": epoch.0 })).into_response()
        }
        (Ok(()), state) => unready(&state, "the replica's state is changing"),
        (Err(ApiError::NotReady { reason }), state) => unready(&state, &reason),
        (Err(error), state) => unready(&state, &error.to_string()),
    }
}

fn unready(state: &ReplicaState, reason: &str) -> Response {
    let body = match state {
        ReplicaState::Down { .. } => json!({ "status": "down", "reason": reason }),
        ReplicaState::Loading { progress, .. } => {
            json!({ "status": "loading", "reason": reason, "progress": progress })
        }
        ReplicaState::Ready { .. } => json!({ "status": "loading", "reason": reason }),
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
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
