//! Error responses: OpenAI's error body, worded as vLLM's.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use poorwill::{PoolError, chain};
use serde_json::json;

#[derive(Debug, Clone)]
pub(crate) struct Failure {
    status: StatusCode,
    param: Option<&'static str>,
    message: String,
}

impl Failure {
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, param: None, message: message.into() }
    }

    pub(crate) fn about(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::METHOD_NOT_ALLOWED => "Method Not Allowed",
            StatusCode::PAYLOAD_TOO_LARGE => "Request Entity Too Large",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        }
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the engine's memory: {}", chain(&error)))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let error = json!({
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.status.as_u16(),
        });
        (self.status, Json(json!({ "error": error }))).into_response()
    }
}
