//! `/admin/v1/replicas`: what each replica is used for and what it does, and how to use it for something else.
//!
//! A role is a routing decision, so it changes at once: nothing is loaded, and requests that run finish where they are.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use cluster::Role;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::desk::Load;
use crate::fleet::Member;
use crate::http::{describe_replica, read_json};
use crate::openai::ApiError;

/// `GET /admin/v1/replicas`.
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let queue = app.fleet.dispatch().queue();
    let members = app.fleet.members();
    let described = members
        .iter()
        .filter_map(|(number, member)| queue.loads.get(*number).map(|load| describe(*number, member, load)));
    let data: Vec<Value> = described.collect();
    Json(json!({
        "object": "list",
        "data": data,
        "queued": queue.waiting,
        "queue_limit": queue.limit,
        "queued_to_decode": queue.waiting_to_decode,
    }))
}

/// `POST /admin/v1/replicas/{replica}/role`, with `{"role": "prefill"}`, `"decode"` or `"mixed"`.
pub(super) async fn set_role(
    State(app): State<Arc<App>>,
    Path(replica): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let role = role_of(&read_json(request, &app.limits).await?)?;
    let number = replica.parse().ok();
    let found = number.and_then(|number: usize| Some((number, app.fleet.member(number)?)));
    let Some((number, member)) = found else {
        let there: Vec<String> = app.fleet.members().iter().map(|(number, _)| number.to_string()).collect();
        let (asked, there) = (crate::openai::quoted(&replica), there.join(", "));
        let reason = format!("there is no replica {asked}; there are: {there}");
        return Err(ApiError::NoSuchReplica { reason });
    };
    app.fleet.set_role(number, role);
    tracing::info!(replica = number, %role, "the replica has another role");
    let queue = app.fleet.dispatch().queue();
    let load = queue.loads.get(number);
    let load = load.ok_or(ApiError::Internal { reason: "a replica is unknown to the desk" })?;
    Ok(Json(describe(number, &member, load)))
}

fn role_of(body: &Value) -> Result<Role, ApiError> {
    let fields = body.as_object().into_iter().flatten();
    if let Some((param, _)) = fields.clone().find(|(name, _)| *name != "role") {
        return Err(ApiError::UnknownParameter { param: crate::openai::quoted(param) });
    }
    let role = body.get("role").ok_or_else(|| ApiError::Missing { param: "role".into() })?;
    Role::deserialize(role).map_err(|_| ApiError::invalid("role", "must be prefill, decode or mixed"))
}

fn describe(number: usize, member: &Member, load: &Load) -> Value {
    let mut described = describe_replica(number, member);
    let facts = json!({
        "role": load.role,
        "slots": load.slots,
        "waiting": load.waiting,
        "prefilling": load.prefilling,
        // Their KV is to go to another replica, or to come from one.
        "changing_hands": load.paused,
        "running": load.held - load.prefilling - load.paused,
        "prefill_tokens_per_second": load.prefill.0,
        "ms_per_token_alone": load.tpot_alone.0,
        "ms_per_token_full": load.tpot_full.0,
    });
    if let (Some(described), Value::Object(facts)) = (described.as_object_mut(), facts) {
        described.extend(facts);
    }
    described
}
