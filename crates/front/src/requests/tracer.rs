//! What traces requests, if anything does.

use std::fmt::Debug;

use http::HeaderValue;

use super::now::{RequestNow, Tokens};

/// A client's valid `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace: u128,
    /// The client's span.
    pub span: u64,
    /// Whether it is sampled, and more.
    pub flags: u8,
}

/// Traces requests.
pub trait Tracer: Debug + Send + Sync {
    /// Begins the trace of a request; `None` if requests are not traced.
    fn request(&self, now: &RequestNow, parent: Option<TraceParent>) -> Option<Box<dyn RequestTrace>>;
}

/// The trace of one request.
pub trait RequestTrace: Debug + Send {
    /// It waits for its model.
    fn waits(&mut self);

    /// Its wait for this model has ended.
    fn runs(&mut self, model: Option<&str>);

    /// It goes to its engine. Returns the `traceparent` for it.
    fn calls(&mut self, path: &str, url: &str, served_as: &str) -> Option<HeaderValue>;

    /// Its engine's first byte has come.
    fn begins(&mut self);

    /// It has ended.
    fn end(&mut self, last: &RequestNow, status: Option<u16>, end: &str, tokens: Tokens);
}
