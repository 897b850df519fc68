//! Error responses: JSON with a message that says what to do next.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde::Serialize;

/// An error response.
#[derive(Debug, Serialize)]
pub(super) struct Wrong {
    #[serde(skip)]
    status: StatusCode,
    error: Said,
}

#[derive(Debug, Serialize)]
struct Said {
    message: String,
    /// The known models, if the name is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<Vec<String>>,
}

impl Wrong {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, error: Said { message: message.into(), models: None } }
    }

    pub(super) fn no_model(name: &str, models: Vec<String>) -> Self {
        let message = format!("there is no model `{name}`; there are: {}", models.join(", "));
        Self { status: StatusCode::NOT_FOUND, error: Said { message, models: Some(models) } }
    }
}

impl IntoResponse for Wrong {
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
