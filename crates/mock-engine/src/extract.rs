//! What the paths have in common.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use bytes::Bytes;

use crate::engine::Engine;
use crate::failure::Failure;

pub(crate) type SharedEngine = State<Arc<Engine>>;
pub(crate) type RequestBody = Result<Bytes, BytesRejection>;
pub(crate) type HttpResult = Result<Response, Failure>;

pub(crate) fn read(body: RequestBody) -> Result<Bytes, Failure> {
    body.map_err(|rejection| Failure::new(rejection.status(), rejection.body_text()))
}
