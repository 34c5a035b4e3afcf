//! Everything a request can be refused with, and its one mapping to HTTP and OpenAI's error body.
//!
//! Messages go to the client that sent the request and may quote it; logs get the code and the parameter only.

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Why a request is refused or ends early.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("unknown route: {method} {path}")]
    UnknownRoute { method: Method, path: String },
    #[error("{path} does not answer to {method}")]
    MethodNotAllowed { method: Method, path: String },
    #[error("the admin API asks for the key of the cluster's state folder, as `Authorization: Bearer KEY`")]
    AdminKey,
    #[error("{reason}")]
    NoSuchNode { reason: String },
    #[error("{reason}")]
    NoSuchPlan { reason: String },
    #[error("{reason}")]
    PlanConflict { reason: String },
    #[error("the plan cannot be: {}", faults.join("; "))]
    BadPlan { faults: Vec<String> },
    #[error("the body must be sent as application/json, not as {found}")]
    ContentType { found: String },
    #[error("the body has {size} bytes, the limit is {limit} bytes")]
    BodyTooLarge { size: u64, limit: u64 },
    #[error("the body has more than {limit} bytes, which is the limit")]
    BodyOverLimit { limit: u64 },
    #[error("the body did not arrive within {seconds} s")]
    BodyTooSlow { seconds: u64 },
    #[error("the body broke off: {reason}")]
    BodyBroken { reason: String },
    #[error("the body is not valid UTF-8 from byte {offset} on")]
    BodyNotUtf8 { offset: usize },
    #[error("the body is not valid JSON: {reason}")]
    BodyNotJson { reason: String },
    #[error("`{param}` is required")]
    Missing { param: String },
    #[error("unknown parameter `{param}`")]
    UnknownParameter { param: String },
    #[error("`{param}` is not supported: {reason}")]
    Unsupported { param: String, reason: String },
    #[error("`{param}`: {reason}")]
    Invalid { param: String, reason: String },
    #[error("there is no model `{asked}` here; `{served}` is served")]
    ModelNotFound { asked: String, served: String },
    #[error(
        "the prompt has {prompt} tokens, a slot holds {n_ctx}; shorten the prompt or serve with a larger context"
    )]
    ContextLength { param: &'static str, prompt: usize, n_ctx: u32 },
    #[error("the model's chat template refuses the messages: {reason}")]
    Template { reason: String },
    #[error("the request cannot be served: {reason}")]
    Refused { reason: String },
    #[error("the model is not ready: {reason}")]
    NotReady { reason: String },
    #[error("{limit} requests are open already; try again later")]
    TooManyOpen { limit: usize },
    #[error("the queue is full: {reason}")]
    QueueFull { reason: String, seconds: u16 },
    #[error("the request waited {seconds} s for a slot, which is as long as it may; try again later")]
    QueueTimeout { seconds: u64 },
    #[error("the replica was lost: {reason}")]
    ReplicaLost { reason: String },
    #[error(
        "the request was sent to replicas {attempts} times, and each time the replica was lost; it may be what makes them fail: {reason}"
    )]
    LostRepeatedly { attempts: u32, reason: String },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine failed: {reason}")]
    Engine { reason: String },
    #[error("internal error: {reason}")]
    Internal { reason: &'static str },
}

impl ApiError {
    /// An invalid value of a parameter.
    pub(crate) fn invalid(param: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), reason: reason.into() }
    }

    /// A parameter or value that is known, but that this server does not support.
    pub(crate) fn unsupported(param: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported { param: param.into(), reason: reason.into() }
    }

    /// The HTTP status and the machine-readable code.
    pub(crate) fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::UnknownRoute { .. } => (StatusCode::NOT_FOUND, "unknown_url"),
            Self::MethodNotAllowed { .. } => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::AdminKey => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
            Self::NoSuchNode { .. } => (StatusCode::NOT_FOUND, "node_not_found"),
            Self::NoSuchPlan { .. } => (StatusCode::NOT_FOUND, "plan_not_found"),
            Self::PlanConflict { .. } => (StatusCode::CONFLICT, "plan_conflict"),
            Self::BadPlan { .. } => (StatusCode::BAD_REQUEST, "invalid_plan"),
            Self::ContentType { .. } => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
            Self::BodyTooLarge { .. } | Self::BodyOverLimit { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large")
            }
            Self::BodyTooSlow { .. } => (StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            Self::BodyBroken { .. } => (StatusCode::BAD_REQUEST, "body_incomplete"),
            Self::BodyNotUtf8 { .. } => (StatusCode::BAD_REQUEST, "invalid_utf8"),
            Self::BodyNotJson { .. } => (StatusCode::BAD_REQUEST, "invalid_json"),
            Self::Missing { .. } => (StatusCode::BAD_REQUEST, "missing_required_parameter"),
            Self::UnknownParameter { .. } => (StatusCode::BAD_REQUEST, "unknown_parameter"),
            Self::Unsupported { .. } => (StatusCode::BAD_REQUEST, "unsupported_parameter"),
            Self::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid_value"),
            Self::ModelNotFound { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            Self::ContextLength { .. } => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
            Self::Template { .. } => (StatusCode::BAD_REQUEST, "chat_template_error"),
            Self::Refused { .. } => (StatusCode::BAD_REQUEST, "invalid_request"),
            Self::NotReady { .. } => (StatusCode::SERVICE_UNAVAILABLE, "not_ready"),
            Self::TooManyOpen { .. } => (StatusCode::SERVICE_UNAVAILABLE, "too_many_requests"),
            Self::QueueFull { .. } => (StatusCode::SERVICE_UNAVAILABLE, "queue_full"),
            Self::QueueTimeout { .. } => (StatusCode::SERVICE_UNAVAILABLE, "queue_timeout"),
            Self::ReplicaLost { .. } => (StatusCode::SERVICE_UNAVAILABLE, "replica_lost"),
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            // No time after which it might succeed is named: it had better not be tried again.
            Self::LostRepeatedly { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "replica_lost_repeatedly"),
            Self::Engine { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "engine_failed"),
            Self::Internal { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        }
    }

    /// The parameter at fault, where there is one.
    pub(crate) fn param(&self) -> Option<&str> {
        match self {
            Self::Missing { param }
            | Self::UnknownParameter { param }
            | Self::Unsupported { param, .. }
            | Self::Invalid { param, .. } => Some(param),
            Self::ModelNotFound { .. } => Some("model"),
            Self::ContextLength { param, .. } => Some(param),
            Self::Template { .. } => Some("messages"),
            _ => None,
        }
    }

    /// Seconds after which the same request may succeed.
    fn retry_after(&self) -> Option<u16> {
        match self {
            Self::QueueFull { seconds, .. } => Some(*seconds),
            // A slot is usually free within a second or two.
            Self::TooManyOpen { .. } | Self::QueueTimeout { .. } => Some(2),
            // A stage is restarted and loaded again: seconds for a small model, longer for a large one.
            Self::NotReady { .. } | Self::ReplicaLost { .. } | Self::ShuttingDown => Some(5),
            _ => None,
        }
    }

    /// The body in OpenAI's shape.
    pub(crate) fn body(&self) -> ErrorBody<'_> {
        let (status, code) = self.status_and_code();
        let kind = match status {
            StatusCode::SERVICE_UNAVAILABLE => "unavailable_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let message = self.to_string();
        let faults = match self {
            Self::BadPlan { faults } => faults.as_slice(),
            _ => &[],
        };
        ErrorBody { error: ErrorFields { message, kind, param: self.param(), code, faults } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code) = self.status_and_code();
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            // Nothing in these messages comes from the client.
            tracing::warn!(code, status = status.as_u16(), "{self}");
        } else {
            // Clients that are turned away come back often; why they are is told elsewhere, once.
            tracing::debug!(code, status = status.as_u16(), param = self.param(), "request refused");
        }
        let mut response = (status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// OpenAI's error body.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
    /// Beyond OpenAI's fields: each on its own, where there are several.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    faults: &'a [String],
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(error: &ApiError) -> serde_json::Value {
        serde_json::to_value(error.body()).unwrap()
    }

    #[test]
    fn case_20_a_long_prompt_is_refused_with_both_numbers() {
        let error = ApiError::ContextLength { param: "messages", prompt: 20_000, n_ctx: 4096 };
        assert_eq!(error.status_and_code().0, StatusCode::BAD_REQUEST);
        let body = body(&error);
        assert_eq!(body["error"]["code"], "context_length_exceeded");
        assert_eq!(body["error"]["param"], "messages");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("20000") && message.contains("4096"), "{message}");
    }

    #[test]
    fn every_body_has_all_four_of_openais_fields() {
        let error = ApiError::unsupported("n", "only one choice is generated");
        assert_eq!(
            body(&error),
            json!({ "error": {
                "message": "`n` is not supported: only one choice is generated",
                "type": "invalid_request_error",
                "param": "n",
                "code": "unsupported_parameter",
            }})
        );
        assert_eq!(body(&ApiError::ShuttingDown)["error"]["param"], json!(null));
    }

    #[test]
    fn case_25_what_may_succeed_later_says_when() {
        for error in [
            ApiError::NotReady { reason: "loading".into() },
            ApiError::QueueFull { reason: "8 requests wait".into(), seconds: 7 },
            ApiError::QueueTimeout { seconds: 600 },
            ApiError::TooManyOpen { limit: 3 },
            ApiError::ReplicaLost { reason: "stage 1".into() },
        ] {
            let response = error.into_response();
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert!(response.headers().contains_key(header::RETRY_AFTER));
        }
    }
}
