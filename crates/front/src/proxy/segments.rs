//! The body of a request to an engine: pieces of the client's, between which parts were replaced.
//!
//! Promise: nothing of it is written before the backend was asked for the last time whether the engine may have it.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::api_error::ApiError;
use super::{edit, json};
use crate::backend::{Backend, NotOwned, Route};

/// A body in pieces, between which parts of it were replaced.
#[derive(Debug, Clone)]
pub(super) struct Segments {
    segments: Vec<Bytes>,
    next: usize,
    permit: Option<HandOver>,
}

/// Asks for the last time whether an engine may have a request: directly before its first byte is written.
#[derive(Clone)]
struct HandOver {
    backend: Arc<dyn Backend>,
    route: Arc<Route>,
    was_given: bool,
}

impl std::fmt::Debug for HandOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandOver").field("route", &self.route).finish_non_exhaustive()
    }
}

impl Drop for HandOver {
    /// The request is on its way now, or never. A process that was stopped in between has let it through.
    fn drop(&mut self) {
        if self.was_given && self.backend.check(&self.route).is_err() {
            self.backend.was_late(&self.route);
        }
    }
}

impl Segments {
    pub(super) fn whole(body: Bytes) -> Self {
        Self::of(vec![body])
    }

    fn of(segments: Vec<Bytes>) -> Self {
        Self { segments, next: 0, permit: None }
    }

    pub(super) fn edited(body: Bytes, asked: &str, route: &Route) -> Result<Self, ApiError> {
        // `parse` has found the name before.
        let segments = edit::edited(body, asked, route);
        let segments = segments.ok_or_else(|| ApiError::invalid_body(json::BodyError::NoModel))?;
        Ok(Self::of(segments))
    }

    pub(super) fn with(body: &Bytes, span: Range<usize>, text: String) -> Self {
        Self::of(vec![body.slice(..span.start), text.into(), body.slice(span.end..)])
    }

    /// Has the backend asked directly before the first byte.
    pub(super) fn asks(&mut self, backend: &Arc<dyn Backend>, route: &Arc<Route>) {
        let (backend, route) = (Arc::clone(backend), Arc::clone(route));
        // hyper does not ask for an empty body, so for that the look before was the last.
        let was_given = self.is_end_stream();
        self.permit = Some(HandOver { backend, route, was_given });
    }
}

impl Body for Segments {
    type Data = Bytes;
    type Error = NotOwned;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, NotOwned>>> {
        // hyper writes nothing of the head before it has asked for a piece of the body.
        if let Some(permit) = self.permit.as_mut().filter(|permit| !permit.was_given) {
            if let Err(why) = permit.backend.check(&permit.route) {
                return Poll::Ready(Some(Err(why)));
            }
            permit.was_given = true;
        }
        while let Some(segment) = self.segments.get(self.next).cloned() {
            self.next += 1;
            if !segment.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(segment))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.segments.iter().skip(self.next).all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        let left: usize = self.segments.iter().skip(self.next).map(Bytes::len).sum();
        SizeHint::with_exact(u64::try_from(left).unwrap_or(u64::MAX))
    }
}
