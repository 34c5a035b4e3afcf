//! `/admin/v1/plans` and `/admin/v1/deployment`: plans, which of them is desired, and how far the cluster is from it.
//!
//! What is desired is answered at once; that it is carried out is seen in `/admin/v1/deployment` and in the events.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use deploy::{DeployError, Deployment, DeploymentView, PlanView};
use serde::Deserialize;
use serde_json::{Value, json};

use super::failed;
use crate::app::App;
use crate::http::read_json;
use crate::openai::ApiError;

/// How a plan is to be applied.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct HowToApply {
    /// Only say which steps that would be.
    dry_run: bool,
}

type Asked = Result<Query<HowToApply>, QueryRejection>;

/// `GET /admin/v1/plans`: the newest first.
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let plans = deployment(&app)?.run(Deployment::plans).await.map_err(refused)?;
    Ok(Json(json!({ "object": "list", "data": plans })))
}

/// `GET /admin/v1/plans/{id}`.
pub(super) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<u64>, PathRejection>,
) -> Result<Json<PlanView>, ApiError> {
    let id = plan_id(id)?;
    deployment(&app)?.run(move |deployment| deployment.plan(id)).await.map(Json).map_err(refused)
}

/// `POST /admin/v1/plans`: a plan as `shoal plan` writes it, alone or in its report. It is kept, and desired when it is applied.
pub(super) async fn add(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let deployment = deployment(&app)?;
    let plan = read_json(request, &app.limits).await?.to_string();
    let added = deployment.run(move |deployment| {
        let record = deployment.add_text(&plan)?;
        deployment.plan(record.id)
    });
    let added = added.await.map_err(refused)?;
    Ok((StatusCode::CREATED, Json(added)).into_response())
}

/// `POST /admin/v1/plans/{id}/apply`: desired from now on; with `?dry_run=true`, which steps that would be.
pub(super) async fn apply(
    State(app): State<Arc<App>>,
    id: Result<Path<u64>, PathRejection>,
    asked: Asked,
) -> Result<Json<Value>, ApiError> {
    let id = plan_id(id)?;
    let asked = how(asked)?;
    desire(&app, asked, move |_| Ok(id), "it was applied by the admin API").await
}

/// `POST /admin/v1/plans/rollback`: the plan that was desired before the present one.
pub(super) async fn roll_back(State(app): State<Arc<App>>, asked: Asked) -> Result<Json<Value>, ApiError> {
    let asked = how(asked)?;
    desire(&app, asked, Deployment::before, "the one after it was taken back by the admin API").await
}

/// `GET /admin/v1/deployment`.
pub(super) async fn now(State(app): State<Arc<App>>) -> Result<Json<DeploymentView>, ApiError> {
    deployment(&app)?.run(Deployment::view).await.map(Json).map_err(refused)
}

async fn desire(
    app: &App,
    asked: HowToApply,
    which: impl FnOnce(&Deployment) -> Result<u64, DeployError> + Send + 'static,
    reason: &'static str,
) -> Result<Json<Value>, ApiError> {
    let deployment = deployment(app)?;
    let done = deployment.run(move |deployment| {
        let id = which(deployment)?;
        // Before it is desired, lest its first steps are taken already.
        let steps = deployment.steps_to(id)?;
        let decision = if asked.dry_run { None } else { Some(deployment.apply(id, reason)?.decision) };
        Ok(json!({ "plan": id, "dry_run": asked.dry_run, "decision": decision, "steps": steps }))
    });
    done.await.map(Json).map_err(refused)
}

fn deployment(app: &App) -> Result<Deployment, ApiError> {
    app.deployment.clone().ok_or(ApiError::Internal { reason: "no plan can be carried out here" })
}

fn how(asked: Asked) -> Result<HowToApply, ApiError> {
    asked.map(|Query(asked)| asked).map_err(|error| ApiError::invalid("query", error.body_text()))
}

fn plan_id(id: Result<Path<u64>, PathRejection>) -> Result<u64, ApiError> {
    id.map(|Path(id)| id).map_err(|error| ApiError::invalid("plan", error.body_text()))
}

fn refused(error: DeployError) -> ApiError {
    match error {
        DeployError::Faults(faults) => {
            ApiError::BadPlan { faults: faults.iter().map(ToString::to_string).collect() }
        }
        DeployError::File(error) => ApiError::BadPlan { faults: vec![error.to_string()] },
        DeployError::OtherModel { .. } | DeployError::NothingBefore => {
            ApiError::PlanConflict { reason: error.to_string() }
        }
        DeployError::Registry(error) if error.is_unknown_name() => {
            ApiError::NoSuchPlan { reason: error.to_string() }
        }
        DeployError::Registry(error) => failed(error),
        DeployError::CutOff(reason) => {
            tracing::error!(%reason, "a plan's work was cut off");
            ApiError::Internal { reason: "the work was cut off" }
        }
    }
}
