//! The front's requests, traced.

use http::HeaderValue;
use poorwill_front::requests::{RequestNow, RequestTrace, Tokens, TraceParent, Tracer};

use super::Traces;
use super::request::RequestSpans;

impl Tracer for Traces {
    fn request(&self, now: &RequestNow, parent: Option<TraceParent>) -> Option<Box<dyn RequestTrace>> {
        let spans = Traces::request(self, now, parent)?;
        Some(Box::new(spans))
    }
}

impl RequestTrace for RequestSpans {
    fn waits(&mut self) {
        Self::waits(self);
    }

    fn runs(&mut self, model: Option<&str>) {
        Self::runs(self, model);
    }

    fn calls(&mut self, path: &str, url: &str, served_as: &str) -> Option<HeaderValue> {
        Self::calls(self, path, url, served_as)
    }

    fn begins(&mut self) {
        Self::begins(self);
    }

    fn end(&mut self, last: &RequestNow, status: Option<u16>, end: &str, tokens: Tokens) {
        Self::end(self, last, status, end, tokens);
    }
}
