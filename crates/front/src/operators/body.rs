//! Bodies of commands, and commands that outlive their client.

use std::future::Future;

use axum::body::Body;
use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::answer::ControlError;
use super::limits::{BODY_MAX_BYTES, REQUEST_MAX};

/// Does a command to its end, even if the client disconnects.
///
/// # Errors
/// It panicked.
pub async fn to_completion<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, ControlError> {
    tokio::spawn(work).await.map_err(|error| {
        tracing::error!(%error, "a command panicked");
        ControlError::new(StatusCode::INTERNAL_SERVER_ERROR, "this broke halfway; see the service's log")
    })
}

/// Reads a body within the size limit and timeout.
///
/// # Errors
/// It is too long, too late, or broke off.
pub async fn read_body(body: Body) -> Result<Bytes, ControlError> {
    let read = tokio::time::timeout(REQUEST_MAX, Limited::new(body, BODY_MAX_BYTES).collect()).await;
    match read {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the body is longer than {BODY_MAX_BYTES} bytes, which is the limit");
            Err(ControlError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(error)) => {
            Err(ControlError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}")))
        }
        Err(_) => {
            let message = format!("the body did not come within {} s", REQUEST_MAX.as_secs());
            Err(ControlError::new(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}
