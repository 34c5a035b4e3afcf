//! `/admin/v1/nodes`: who is a member, and who may be.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use registry::{Member, NodeRecord, NodeView, Registry, RegistryError};
use serde_json::{Value, json};

use super::{failed, registry};
use crate::app::App;
use crate::openai::ApiError;

/// `GET /admin/v1/nodes`.
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let members = registry(&app)?.run(Registry::members).await.map_err(failed)?;
    let nodes: Vec<NodeView> = members.iter().map(NodeView::from).collect();
    Ok(Json(json!({ "object": "list", "data": nodes })))
}

/// `GET /admin/v1/nodes/{node}`: by its name, its id or the start of that.
pub(super) async fn one(
    State(app): State<Arc<App>>,
    Path(node): Path<String>,
) -> Result<Json<NodeView>, ApiError> {
    let found = registry(&app)?.run(move |registry| registry.member(&node)).await;
    found.map(|member| Json(NodeView::from(&member))).map_err(failed)
}

/// `POST /admin/v1/nodes/{node}/approve`.
pub(super) async fn approve(
    State(app): State<Arc<App>>,
    Path(node): Path<String>,
) -> Result<Json<NodeView>, ApiError> {
    change(&app, node, Registry::approve).await
}

/// `DELETE /admin/v1/nodes/{node}`.
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Path(node): Path<String>,
) -> Result<Json<NodeView>, ApiError> {
    change(&app, node, Registry::remove).await
}

async fn change(
    app: &App,
    node: String,
    change: fn(&Registry, &str) -> Result<NodeRecord, RegistryError>,
) -> Result<Json<NodeView>, ApiError> {
    let changed = registry(app)?.run(move |registry| change(registry, &node)).await;
    let member = |record| Member { record, present: None };
    changed.map(|record| Json(NodeView::from(&member(record)))).map_err(failed)
}
