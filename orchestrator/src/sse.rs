//! Answers as server-sent events, in the form OpenAI's clients expect: one JSON chunk per event, `[DONE]` at the end.
//!
//! An answer that fails under way ends with an event of the error's body and no `[DONE]`, so that a client cannot
//! take what it has for the whole. Knows nothing of what the chunks hold.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream, StreamExt};

use crate::openai::ApiError;

/// Streams `chunks`, each one line of JSON, and comments while there is none.
pub(crate) fn respond<S>(chunks: S, keep_alive: Duration) -> Response
where
    S: Stream<Item = Result<String, ApiError>> + Send + 'static,
{
    let events = stream::unfold(Some(Box::pin(chunks)), |chunks| async move {
        let mut chunks = chunks?;
        match chunks.next().await {
            Some(Ok(chunk)) => Some((chunk, Some(chunks))),
            Some(Err(error)) => Some((last_words(&error), None)),
            None => Some(("[DONE]".to_owned(), None)),
        }
    });
    let events = events.map(|data| Ok::<_, Infallible>(Event::default().data(data)));
    let comments = KeepAlive::new().interval(keep_alive).text("keep-alive");
    let mut response = Sse::new(events).keep_alive(comments).into_response();
    // nginx would collect the events otherwise.
    let unbuffered = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(unbuffered, HeaderValue::from_static("no"));
    response
}

fn last_words(error: &ApiError) -> String {
    // The body has no part that could fail to serialise; if it ever did, the client would still see an error.
    serde_json::to_string(&error.body())
        .unwrap_or_else(|_| r#"{"error":{"message":"internal error"}}"#.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn body(chunks: Vec<Result<String, ApiError>>) -> String {
        let response = respond(stream::iter(chunks), Duration::from_secs(10));
        let bytes = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_whole_answer_ends_with_done() {
        let body = body(vec![Ok("{\"a\":1}".into()), Ok("{}".into())]).await;
        assert_eq!(body, "data: {\"a\":1}\n\ndata: {}\n\ndata: [DONE]\n\n");
    }

    #[tokio::test]
    async fn case_1_a_broken_answer_ends_with_an_error_event_and_no_done() {
        let lost = ApiError::ReplicaLost { reason: "stage 1 was killed".into() };
        let body = body(vec![Ok("{}".into()), Err(lost), Ok("never".into())]).await;
        let last = body.trim_end().lines().last().unwrap().strip_prefix("data: ").unwrap();
        let error: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!(error["error"]["code"], "replica_lost");
        assert!(!body.contains("[DONE]") && !body.contains("never"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_sends_comments() {
        let silent = stream::pending::<Result<String, ApiError>>();
        let response = respond(silent, Duration::from_secs(10));
        let mut body = response.into_body().into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), ": keep-alive\n\n");
    }
}
