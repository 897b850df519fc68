//! Spans as they are exported: messages of OTLP in their JSON form.
//!
//! Keys are camelCase, identifiers hexadecimal, kinds and codes numbers, and integers of 64 bits texts. Empty fields are
//! left out.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};

/// Of [`SpanContext::flags`].
pub(super) const SAMPLED: u8 = 1;
/// Of [`Span::flags`] and [`SpanLink::flags`]: it is known whether the parent, or the linked span, is another process's.
const IS_REMOTE_KNOWN: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;
/// Of [`SpanFailure::code`].
const ERROR: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TraceId(pub(super) u128);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanId(pub(super) u64);

/// Which span of which trace. It prints as a `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanContext {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    /// Those of W3C.
    pub(super) flags: u8,
    /// Whether it is another process's.
    pub(super) is_remote: bool,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Span {
    pub(super) trace_id: TraceId,
    pub(super) span_id: SpanId,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parent_span_id: Option<SpanId>,
    pub(super) flags: u32,
    pub(super) name: Cow<'static, str>,
    pub(super) kind: SpanKind,
    #[serde(rename = "startTimeUnixNano", serialize_with = "unix_nanos")]
    pub(super) start: SystemTime,
    #[serde(rename = "endTimeUnixNano", serialize_with = "unix_nanos")]
    pub(super) end: SystemTime,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) attributes: Vec<Attribute>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) events: Vec<SpanEvent>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) links: Vec<SpanLink>,
    #[serde(rename = "status", skip_serializing_if = "Option::is_none")]
    pub(super) failure: Option<SpanFailure>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpanKind {
    Internal = 1,
    Server = 2,
    Client = 3,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Attribute {
    pub(super) key: Cow<'static, str>,
    pub(super) value: AttributeValue,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) enum AttributeValue {
    #[serde(rename = "stringValue")]
    Text(Cow<'static, str>),
    #[serde(rename = "intValue", serialize_with = "as_text")]
    Integer(i64),
    #[serde(rename = "doubleValue")]
    Number(f64),
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SpanEvent {
    #[serde(rename = "timeUnixNano", serialize_with = "unix_nanos")]
    at: SystemTime,
    pub(super) name: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    attributes: Vec<Attribute>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SpanLink {
    trace_id: TraceId,
    pub(super) span_id: SpanId,
    flags: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    attributes: Vec<Attribute>,
}

/// The status of a span that failed. Others have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct SpanFailure {
    code: u8,
    #[serde(skip_serializing_if = "str::is_empty")]
    message: Cow<'static, str>,
}

impl SpanContext {
    /// As OTLP has them.
    fn flags(self) -> u32 {
        u32::from(self.flags) | IS_REMOTE_KNOWN | if self.is_remote { IS_REMOTE } else { 0 }
    }
}

impl Span {
    /// A span that begins now, and is to end later.
    pub(super) fn new(
        context: SpanContext,
        parent: Option<SpanContext>,
        name: impl Into<Cow<'static, str>>,
    ) -> Self {
        let now = SystemTime::now();
        let of_parent = SpanContext { is_remote: parent.is_some_and(|parent| parent.is_remote), ..context };
        Self {
            trace_id: context.trace,
            span_id: context.span,
            parent_span_id: parent.map(|parent| parent.span),
            flags: of_parent.flags(),
            name: name.into(),
            kind: SpanKind::Internal,
            start: now,
            end: now,
            attributes: Vec::new(),
            events: Vec::new(),
            links: Vec::new(),
            failure: None,
        }
    }
}

impl Attribute {
    pub(super) fn new(key: impl Into<Cow<'static, str>>, value: impl Into<AttributeValue>) -> Self {
        Self { key: key.into(), value: value.into() }
    }
}

impl SpanEvent {
    pub(super) fn new(name: &'static str, at: SystemTime, attributes: Vec<Attribute>) -> Self {
        Self { at, name, attributes }
    }
}

impl SpanLink {
    pub(super) fn new(to: SpanContext, attributes: Vec<Attribute>) -> Self {
        Self { trace_id: to.trace, span_id: to.span, flags: to.flags(), attributes }
    }
}

impl SpanFailure {
    pub(super) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self { code: ERROR, message: message.into() }
    }
}

impl From<&'static str> for AttributeValue {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for AttributeValue {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<i64> for AttributeValue {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

impl From<f64> for AttributeValue {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, self.flags)
    }
}

impl Serialize for TraceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for SpanId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for SpanKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(*self as u8)
    }
}

fn as_text<S: Serializer>(number: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

fn unix_nanos<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{json, to_value};

    use super::*;

    #[test]
    fn a_span_is_written_as_the_protocol_has_it() {
        let context = SpanContext { trace: TraceId(0xabc), span: SpanId(0xde), flags: 1, is_remote: false };
        let parent = SpanContext { span: SpanId(0xf), is_remote: true, ..context };
        let at = UNIX_EPOCH + Duration::new(1_700_000_000, 7);
        let attributes = vec![Attribute::new("text", "\"x\""), Attribute::new("count", i64::MAX)];
        let event = SpanEvent::new("failed", at, vec![Attribute::new("share", 0.5)]);
        let span = Span {
            kind: SpanKind::Client,
            start: at,
            end: at + Duration::from_secs(1),
            attributes: attributes.clone(),
            events: vec![event],
            links: vec![SpanLink::new(parent, Vec::new())],
            failure: Some(SpanFailure::new("late")),
            ..Span::new(context, Some(parent), "chat")
        };
        let attributes = json!([
            { "key": "text", "value": { "stringValue": "\"x\"" } },
            { "key": "count", "value": { "intValue": "9223372036854775807" } },
        ]);
        let expected = json!({
            "traceId": "00000000000000000000000000000abc",
            "spanId": "00000000000000de",
            "parentSpanId": "000000000000000f",
            "flags": 0x301,
            "name": "chat",
            "kind": 3,
            "startTimeUnixNano": "1700000000000000007",
            "endTimeUnixNano": "1700000001000000007",
            "attributes": attributes,
            "events": [{
                "timeUnixNano": "1700000000000000007",
                "name": "failed",
                "attributes": [{ "key": "share", "value": { "doubleValue": 0.5 } }],
            }],
            "links": [{
                "traceId": "00000000000000000000000000000abc",
                "spanId": "000000000000000f",
                "flags": 0x301,
            }],
            "status": { "code": 2, "message": "late" },
        });
        assert_eq!(to_value(&span).unwrap(), expected);
        assert_eq!(context.to_string(), "00-00000000000000000000000000000abc-00000000000000de-01");
    }

    #[test]
    fn what_a_span_does_not_have_is_left_out() {
        let context = SpanContext { trace: TraceId(1), span: SpanId(2), flags: 1, is_remote: false };
        let span = to_value(Span::new(context, None, "swap")).unwrap();
        let keys: Vec<&String> = span.as_object().unwrap().keys().collect();
        let always = ["endTimeUnixNano", "flags", "kind", "name", "spanId", "startTimeUnixNano", "traceId"];
        assert_eq!(keys, always);
        assert_eq!((&span["flags"], &span["kind"]), (&json!(0x101), &json!(1)));
    }
}
