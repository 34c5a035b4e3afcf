//! Routes, and what every route has in common: bodies are read within limits, and whatever goes wrong is answered in
//! OpenAI's shape, panics included.
//!
//! Knows nothing of what requests mean.

mod body;
mod metrics;
mod panics;
mod probes;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;

use crate::admin;
use crate::app::App;
use crate::openai::{self, ApiError};

pub(crate) use body::read_json;
pub(crate) use probes::describe_replica;

/// The routes of the API.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(probes::health))
        .route("/ready", get(probes::ready))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/models", get(probes::models))
        // Ids of models may have slashes.
        .route("/v1/models/{*id}", get(probes::model))
        .route("/v1/chat/completions", post(openai::create_chat))
        .route("/v1/completions", post(openai::create_completion))
        .merge(admin::routes(&app))
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(CatchPanicLayer::custom(panics::answer))
        // Outside of that, so that panics are counted as what they are answered with.
        .layer(from_fn_with_state(Arc::clone(&app), metrics::count))
        .with_state(app)
}

async fn unknown_route(request: Request) -> ApiError {
    let (method, path) = method_and_path(&request);
    ApiError::UnknownRoute { method, path }
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (method, path) = method_and_path(&request);
    ApiError::MethodNotAllowed { method, path }
}

fn method_and_path(request: &Request) -> (axum::http::Method, String) {
    (request.method().clone(), openai::quoted(request.uri().path()))
}

#[cfg(test)]
mod tests;
