//! The body of a request to an engine: pieces of the client's, between which parts were replaced.

use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::api_error::ApiError;
use super::{edit, json};
use crate::backend::Route;

/// A body in pieces, between which parts of it were replaced.
#[derive(Debug, Clone)]
pub(super) struct Segments {
    segments: Vec<Bytes>,
    next: usize,
}

impl Segments {
    pub(super) fn whole(body: Bytes) -> Self {
        Self::of(vec![body])
    }

    fn of(segments: Vec<Bytes>) -> Self {
        Self { segments, next: 0 }
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
}

impl Body for Segments {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
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
