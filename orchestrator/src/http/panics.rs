//! A panic in a route is a defect of ours; it ends one request, with an answer.

use std::any::Any;

use axum::response::{IntoResponse, Response};

use crate::openai::ApiError;

/// The answer of a route that panicked. The panic's message may hold a prompt: the panic hook has printed it to the
/// operator, the client does not get it.
pub(super) fn answer(_: Box<dyn Any + Send>) -> Response {
    ApiError::Internal { reason: "the request ended in a panic" }.into_response()
}
