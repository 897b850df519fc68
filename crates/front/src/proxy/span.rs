//! Request identifiers, and W3C trace context.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::requests::TraceParent;

pub(super) static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(super) static TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
static TRACE_STATE: HeaderName = HeaderName::from_static("tracestate");

/// Longer identifiers of clients are replaced.
const ID_MAX: usize = 128;

/// Unique and not predictable from one another, but no secrets.
#[derive(Debug, Default)]
pub(super) struct Ids {
    keys: (RandomState, RandomState),
    count: AtomicU64,
}

impl Ids {
    fn short(&self) -> u64 {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        // Zero means "no identifier".
        self.keys.0.hash_one(count).max(1)
    }

    fn long(&self) -> u128 {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let (high, low) = (self.keys.0.hash_one(count), self.keys.1.hash_one(count));
        (u128::from(high) << 64 | u128::from(low)).max(1)
    }

    /// The client's valid request identifier, or a new one.
    pub(super) fn request(&self, headers: &HeaderMap) -> HeaderValue {
        let is_plain = |value: &&HeaderValue| {
            let bytes = value.as_bytes();
            (1..=ID_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
        };
        let only = only(headers, &REQUEST_ID).filter(is_plain);
        only.cloned().unwrap_or_else(|| {
            let made = format!("{:032x}", self.long());
            HeaderValue::from_str(&made).unwrap_or(HeaderValue::from_static("unknown"))
        })
    }

    /// Continues the client's valid trace, or begins a new one.
    pub(super) fn trace(&self, headers: &mut HeaderMap) {
        // Without a decision about recording, the engine records as it would without a proxy.
        let (trace, flags) = match parent(headers) {
            Some(parent) => (parent.trace, parent.flags),
            None => {
                headers.remove(&TRACE_STATE);
                (self.long(), 1)
            }
        };
        let made = format!("00-{trace:032x}-{:016x}-{flags:02x}", self.short());
        match HeaderValue::from_str(&made) {
            Ok(value) => headers.insert(&TRACE_PARENT, value),
            Err(_) => headers.remove(&TRACE_PARENT),
        };
    }
}

/// If it occurs once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut all = headers.get_all(name).iter();
    all.next().filter(|_| all.next().is_none())
}

/// The client's trace, if it has a valid one.
pub(super) fn parent(headers: &HeaderMap) -> Option<TraceParent> {
    only(headers, &TRACE_PARENT).and_then(|value| value.to_str().ok()).and_then(parsed)
}

/// Of a `traceparent`.
fn parsed(parent: &str) -> Option<TraceParent> {
    let is_hex = |text: &str, len: usize| {
        text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let mut parts = parent.splitn(5, '-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_known = is_hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    let is_right = is_known && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
    let trace = u128::from_str_radix(trace, 16).ok()?;
    let span = u64::from_str_radix(span, 16).ok()?;
    let flags = u8::from_str_radix(flags, 16).ok()?;
    (is_right && trace != 0 && span != 0).then_some(TraceParent { trace, span, flags })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn traced(parent: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(&TRACE_PARENT, HeaderValue::from_str(parent).unwrap());
        headers.insert(&TRACE_STATE, HeaderValue::from_static("a=b"));
        Ids::default().trace(&mut headers);
        let made = headers[&TRACE_PARENT].to_str().unwrap().to_owned();
        assert!(parsed(&made).is_some(), "{made}");
        assert_ne!(made, parent);
        assert_eq!(headers.contains_key(&TRACE_STATE), made.contains(TRACE), "{parent}");
        made
    }

    #[test]
    fn a_trace_goes_on() {
        let made = traced(&format!("00-{TRACE}-00f067aa0ba902b7-00"));
        assert!(made.starts_with(&format!("00-{TRACE}-")) && made.ends_with("-00"), "{made}");
        assert!(!made.contains("00f067aa0ba902b7"));
        assert!(traced(&format!("01-{TRACE}-00f067aa0ba902b7-01-more")).contains(TRACE));
    }

    #[test]
    fn what_is_no_trace_is_replaced() {
        let upper = TRACE.to_uppercase();
        for parent in [
            "x".to_owned(),
            format!("00-{upper}-00f067aa0ba902b7-01"),
            format!("00-{TRACE}-00f067aa0ba902b7"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("ff-{TRACE}-00f067aa0ba902b7-01"),
            format!("00-{TRACE}-00f067aa0ba902b7-01-more"),
            format!("00-{TRACE}-00f067aa0ba902b7-1"),
        ] {
            assert!(!traced(&parent).contains(TRACE), "{parent}");
        }
    }
}
