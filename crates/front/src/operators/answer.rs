//! Error responses: JSON with a message that says what to do next.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde::Serialize;

/// An error for an operator.
#[derive(Debug, Serialize)]
pub struct ControlError {
    #[serde(skip)]
    status: StatusCode,
    error: ErrorBody,
}

#[derive(Debug, Serialize)]
struct ErrorBody {
    message: String,
    /// The known models, if the name is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<Vec<String>>,
}

impl ControlError {
    /// With a message that says what to do next.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, error: ErrorBody { message: message.into(), models: None } }
    }

    /// No model has this name; these there are.
    #[must_use]
    pub fn no_model(name: &str, models: Vec<String>) -> Self {
        let message = format!("there is no model `{name}`; there are: {}", models.join(", "));
        Self { status: StatusCode::NOT_FOUND, error: ErrorBody { message, models: Some(models) } }
    }
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        let status = self.status;
        let mut response = (status, Json(self)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let scheme = header::HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
