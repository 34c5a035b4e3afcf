//! `GET /metrics`, and the counting of every answer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::fleet::Fleet;
use crate::metrics::{CONTENT_TYPE, ReplicaSnapshot, Snapshot};
use crate::openai::ApiError;

/// The engine answers such questions beside its work, within a millisecond. Without an answer its numbers are left out.
const ENGINE_DEADLINE: Duration = Duration::from_millis(300);

/// Under which requests are counted that no route answers: their paths are anything a client likes.
const NO_ROUTE: &str = "none";

/// `GET /metrics`.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let members = app.fleet.members();
    let engines = Fleet::engines(&members, ENGINE_DEADLINE).await;
    let queue = app.fleet.dispatch().queue();
    let load = |number: usize| queue.loads.get(number).copied();
    let told =
        members.iter().zip(engines).filter_map(|(member, engine)| Some((member, engine, load(member.0)?)));
    let replicas = told.map(|((number, member), engine, load)| ReplicaSnapshot {
        number: *number,
        is_ready: member.readiness().is_ok(),
        load,
        engine,
        stages: member.observations.borrow().clone(),
        hops: *member.hops.borrow(),
    });
    let snapshot = Snapshot {
        is_ready: app.readiness().is_ok(),
        open_requests: app.open_requests(),
        queued: queue.waiting,
        queue_limit: queue.limit,
        queued_to_decode: queue.waiting_to_decode,
        decisions: app.fleet.meter().decisions(),
        demand: app.fleet.meter().demand().1.level(),
        replicas: replicas.collect(),
    };
    let text = app.metrics.render(snapshot);
    let text = text.map_err(|_| ApiError::Internal { reason: "the metrics cannot be written" })?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

/// Counts an answer by its route and status.
pub(super) async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    app.metrics.answered(route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str), response.status().as_u16());
    response
}
