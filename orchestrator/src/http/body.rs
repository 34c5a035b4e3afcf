//! Reads a request's body as JSON, within a size and a time.
//!
//! Knows nothing of what the JSON means.

use std::time::Duration;

use axum::body::BodyDataStream;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::BytesMut;
use futures::StreamExt;
use serde_json::Value;

use crate::config::Limits;
use crate::openai::{ApiError, quoted};

/// A client that still sends while it is refused would see a broken connection instead of the refusal, so that much
/// more is read and thrown away, for so long.
const DISCARD_DEADLINE: Duration = Duration::from_secs(2);
const DISCARD_TIMES_LIMIT: u64 = 4;

/// Reads the body of a request that must be JSON.
pub(crate) async fn read_json(request: Request, limits: &Limits) -> Result<Value, ApiError> {
    check_content_type(request.headers())?;
    let limit = limits.max_body.0;
    let is_waiting = request.headers().contains_key(header::EXPECT);
    let announced = announced_size(request.headers());
    let mut body = request.into_body().into_data_stream();
    if let Some(size) = announced.filter(|&size| size > limit) {
        // A client that waits to be told to go on sends nothing.
        if !is_waiting {
            discard(body, limit).await;
        }
        return Err(ApiError::BodyTooLarge { size, limit });
    }
    let read = tokio::time::timeout(limits.body_deadline, read(&mut body, limit)).await;
    let bytes = match read {
        Ok(Err(over @ ApiError::BodyOverLimit { .. })) => {
            discard(body, limit).await;
            return Err(over);
        }
        Ok(read) => read?,
        Err(_) => return Err(ApiError::BodyTooSlow { seconds: limits.body_deadline.as_secs() }),
    };
    let text = std::str::from_utf8(&bytes).map_err(|e| ApiError::BodyNotUtf8 { offset: e.valid_up_to() })?;
    serde_json::from_str(text).map_err(|e| ApiError::BodyNotJson { reason: quoted(&e.to_string()) })
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Err(ApiError::ContentType { found: "nothing named".into() });
    };
    let text = String::from_utf8_lossy(value.as_bytes());
    let kind = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json") {
        return Ok(());
    }
    Err(ApiError::ContentType { found: quoted(&kind) })
}

fn announced_size(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn read(body: &mut BodyDataStream, limit: u64) -> Result<BytesMut, ApiError> {
    let mut bytes = BytesMut::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|e| ApiError::BodyBroken { reason: e.to_string() })?;
        if (bytes.len() + chunk.len()) as u64 > limit {
            return Err(ApiError::BodyOverLimit { limit });
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

async fn discard(mut body: BodyDataStream, limit: u64) {
    let mut left = limit.saturating_mul(DISCARD_TIMES_LIMIT);
    let discarding = async {
        while let Some(Ok(chunk)) = body.next().await {
            left = left.saturating_sub(chunk.len() as u64);
            if left == 0 {
                break;
            }
        }
    };
    // Whether or not it was everything, the client is answered now.
    let _ = tokio::time::timeout(DISCARD_DEADLINE, discarding).await;
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use cluster::Bytes;
    use futures::stream;

    use super::*;

    fn limits() -> Limits {
        Limits { max_body: Bytes(16), body_deadline: Duration::from_secs(1), ..Limits::default() }
    }

    fn request(content_type: &str, body: impl Into<Body>) -> Request {
        Request::builder().header(header::CONTENT_TYPE, content_type).body(body.into()).unwrap()
    }

    async fn refusal(request: Request) -> ApiError {
        read_json(request, &limits()).await.unwrap_err()
    }

    #[tokio::test]
    async fn json_is_read_whatever_its_parameters() {
        for kind in ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"] {
            assert_eq!(read_json(request(kind, "[1]"), &limits()).await.unwrap(), serde_json::json!([1]));
        }
    }

    #[tokio::test]
    async fn other_content_types_are_refused_by_name() {
        assert_eq!(
            refusal(request("text/plain", "[1]")).await,
            ApiError::ContentType { found: "text/plain".into() }
        );
        let nameless = Request::builder().body(Body::from("[1]")).unwrap();
        assert!(matches!(refusal(nameless).await, ApiError::ContentType { .. }));
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_with_the_numbers() {
        let mut announced = request("application/json", "[1, 2, 3, 4, 5, 6, 7]");
        announced.headers_mut().insert(header::CONTENT_LENGTH, 21.into());
        assert_eq!(refusal(announced).await, ApiError::BodyTooLarge { size: 21, limit: 16 });
        let parts = stream::iter(vec![Ok::<_, std::io::Error>("[1, 2, 3,"), Ok(" 4, 5, 6, 7]")]);
        let unannounced = request("application/json", Body::from_stream(parts));
        assert_eq!(refusal(unannounced).await, ApiError::BodyOverLimit { limit: 16 });
    }

    #[tokio::test]
    async fn what_is_no_text_or_no_json_is_refused_with_the_place() {
        assert_eq!(
            refusal(request("application/json", &b"[\"a\xff\"]"[..])).await,
            ApiError::BodyNotUtf8 { offset: 3 }
        );
        let error = refusal(request("application/json", "[1,")).await;
        assert!(error.to_string().contains("line 1 column 3"), "{error}");
        let lone_surrogate = refusal(request("application/json", r#"["\ud800"]"#)).await;
        assert!(matches!(lone_surrogate, ApiError::BodyNotJson { .. }));
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_refused() {
        let parts = stream::iter(vec![Ok("[1"), Err(std::io::Error::other("gone"))]);
        assert!(matches!(
            refusal(request("application/json", Body::from_stream(parts))).await,
            ApiError::BodyBroken { .. }
        ));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_arrives_is_given_up() {
        let never = Body::from_stream(stream::pending::<Result<&str, std::io::Error>>());
        assert_eq!(refusal(request("application/json", never)).await, ApiError::BodyTooSlow { seconds: 1 });
    }

    #[tokio::test]
    async fn endless_nesting_is_refused_without_a_deep_recursion() {
        let deep = "[".repeat(100_000);
        let large = Limits::default();
        let error = read_json(request("application/json", deep), &large).await.unwrap_err();
        assert!(error.to_string().contains("recursion limit"), "{error}");
    }
}
