//! `/admin/v1/events`: what happened, as a list, or as server-sent events as it happens.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event as SentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream, StreamExt};
use registry::{Event, Registry};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{failed, registry};
use crate::app::App;
use crate::openai::ApiError;

/// Events in one answer.
const MOST: u32 = 1000;

/// How often it is looked for new ones: other processes, such as `shoal node approve`, make events too.
const LOOK_PERIOD: Duration = Duration::from_millis(250);

/// What is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Asked {
    /// The id of the last event that is known.
    after: Option<u64>,
    /// At most so many.
    limit: Option<u32>,
    /// Send what happens from now on too, as server-sent events.
    follow: bool,
}

/// `GET /admin/v1/events`.
pub(super) async fn events(
    State(app): State<Arc<App>>,
    asked: Result<Query<Asked>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Query(asked) = asked.map_err(|error| ApiError::invalid("query", error.body_text()))?;
    let registry = registry(&app)?;
    // What a browser or a client that lost its connection sends of itself.
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).and_then(|id| id.parse().ok());
    let after = last.or(asked.after).unwrap_or(0);
    if asked.follow {
        let events = follow(registry, after, app.closing());
        let comments = KeepAlive::new().interval(app.limits.keep_alive).text("keep-alive");
        return Ok(Sse::new(events).keep_alive(comments).into_response());
    }
    let limit = asked.limit.unwrap_or(MOST).min(MOST);
    let found = registry.run(move |registry| registry.events_after(after, limit)).await.map_err(failed)?;
    Ok(Json(json!({ "object": "list", "data": found })).into_response())
}

fn follow(
    registry: Registry,
    after: u64,
    closing: CancellationToken,
) -> impl Stream<Item = Result<SentEvent, Infallible>> + Send + 'static {
    let batches = stream::unfold((registry, after), async |(registry, after)| {
        loop {
            let found = registry.run(move |registry| registry.events_after(after, MOST)).await;
            match found {
                Ok(found) if !found.is_empty() => {
                    let last = found.last().map_or(after, |event| event.id);
                    return Some((found, (registry, last)));
                }
                Ok(_) => tokio::time::sleep(LOOK_PERIOD).await,
                Err(error) => {
                    tracing::error!(%error, "the cluster's registry failed");
                    return None;
                }
            }
        }
    });
    let events = batches.flat_map(stream::iter).map(|event| Ok(sent(&event)));
    events.take_until(closing.cancelled_owned())
}

fn sent(event: &Event) -> SentEvent {
    // It has no part that could fail to serialise.
    let data = serde_json::to_string(event).unwrap_or_default();
    SentEvent::default().id(event.id.to_string()).event(event.kind.as_str()).data(data)
}
