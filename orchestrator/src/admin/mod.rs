//! The admin API: who is a member of the cluster, what its replicas do, what is to run on it, and what happened. It is there where
//! nodes can join, and for those who have the key that lies with the cluster's state.
//!
//! It decides nothing: the registry, the desk and the deployment do.

mod events;
mod nodes;
mod plans;
mod replicas;
mod workload;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use registry::{Registry, RegistryError};

use crate::app::App;
use crate::openai::ApiError;

/// The routes, where there is a cluster.
pub(crate) fn routes(app: &App) -> Router<Arc<App>> {
    let Some(registry) = app.cluster.clone() else { return Router::new() };
    Router::new()
        .route("/admin/v1/nodes", get(nodes::list))
        .route("/admin/v1/nodes/{node}", get(nodes::one).delete(nodes::remove))
        .route("/admin/v1/nodes/{node}/approve", post(nodes::approve))
        .route("/admin/v1/replicas", get(replicas::list))
        .route("/admin/v1/replicas/{replica}/role", post(replicas::set_role))
        .route("/admin/v1/events", get(events::events))
        .route("/admin/v1/workload", get(workload::now))
        .merge(plan_routes(app))
        // Only of these routes, and before their handlers: one that is added is protected.
        .route_layer(from_fn_with_state(registry, check_key))
}

/// Where plans are carried out.
fn plan_routes(app: &App) -> Router<Arc<App>> {
    if app.deployment.is_none() {
        return Router::new();
    }
    Router::new()
        .route("/admin/v1/plans", get(plans::list).post(plans::add))
        .route("/admin/v1/plans/rollback", post(plans::roll_back))
        .route("/admin/v1/plans/{id}", get(plans::one))
        .route("/admin/v1/plans/{id}/apply", post(plans::apply))
        .route("/admin/v1/deployment", get(plans::now))
}

async fn check_key(
    State(registry): State<Registry>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = given.and_then(|given| given.strip_prefix("Bearer ")).unwrap_or_default();
    if registry.is_admin_key(key.trim()) { Ok(next.run(request).await) } else { Err(ApiError::AdminKey) }
}

/// The registry of a request that got past the key.
fn registry(app: &App) -> Result<Registry, ApiError> {
    app.cluster.clone().ok_or(ApiError::Internal { reason: "there is no cluster" })
}

fn failed(error: RegistryError) -> ApiError {
    if error.is_unknown_name() {
        return ApiError::NoSuchNode { reason: error.to_string() };
    }
    tracing::error!(%error, "the cluster's registry failed");
    ApiError::Internal { reason: "the cluster's registry failed" }
}

#[cfg(test)]
mod tests;
