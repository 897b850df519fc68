//! A request of OTLP over HTTP, in its JSON form: spans, who recorded them, and the environment's additions.
//!
//! Of the environment it takes `OTEL_RESOURCE_ATTRIBUTES`, and `OTEL_EXPORTER_OTLP_TRACES_HEADERS` or else
//! `OTEL_EXPORTER_OTLP_HEADERS`. The configuration comes before both.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;

use super::span::{Attribute, Span};

/// Looks up a variable of the environment.
pub(super) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Who recorded the spans.
#[derive(Debug, Serialize)]
pub(super) struct TraceResource {
    attributes: Vec<Attribute>,
}

impl TraceResource {
    pub(super) fn new(service: &str, variable: Variable<'_>) -> Self {
        let own = [
            ("telemetry.sdk.language", "rust"),
            ("telemetry.sdk.name", "poorwill"),
            ("telemetry.sdk.version", env!("CARGO_PKG_VERSION")),
        ];
        let own = own.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let mut all = BTreeMap::from(own);
        all.extend(variable("OTEL_RESOURCE_ATTRIBUTES").map(|text| pairs(&text)).unwrap_or_default());
        all.insert("service.name".to_owned(), service.to_owned());
        Self { attributes: all.into_iter().map(|(key, value)| Attribute::new(key, value)).collect() }
    }
}

/// Headers for the collector; invalid ones are left out.
pub(super) fn headers_from(variable: Variable<'_>) -> HeaderMap {
    // One that is empty counts as not set.
    let said = |name| variable(name).filter(|text| !text.is_empty());
    let text = said("OTEL_EXPORTER_OTLP_TRACES_HEADERS").or_else(|| said("OTEL_EXPORTER_OTLP_HEADERS"));
    let header = |(name, value): (String, String)| {
        let mut value = HeaderValue::from_str(&value).ok()?;
        value.set_sensitive(true);
        Some((HeaderName::try_from(name).ok()?, value))
    };
    text.map(|text| pairs(&text)).unwrap_or_default().into_iter().filter_map(header).collect()
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExportRequest<'a> {
    resource_spans: [ResourceSpans<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceSpans<'a> {
    resource: &'a TraceResource,
    scope_spans: [ScopeSpans<'a>; 1],
}

#[derive(Serialize)]
struct ScopeSpans<'a> {
    scope: InstrumentationScope,
    spans: &'a [Span],
}

#[derive(Serialize)]
struct InstrumentationScope {
    name: &'static str,
    version: &'static str,
}

/// The body of a request with these spans.
pub(super) fn body(resource: &TraceResource, spans: &[Span]) -> serde_json::Result<Vec<u8>> {
    let scope = InstrumentationScope { name: "poorwill-rotate", version: env!("CARGO_PKG_VERSION") };
    let scope_spans = [ScopeSpans { scope, spans }];
    serde_json::to_vec(&ExportRequest { resource_spans: [ResourceSpans { resource, scope_spans }] })
}

/// Keys and values, such as `a=1,b=two%20words`.
fn pairs(text: &str) -> Vec<(String, String)> {
    let pair = |part: &str| {
        let (key, value) = part.split_once('=')?;
        let value = value.trim();
        Some((key.trim().to_owned(), decoded(value).unwrap_or_else(|| value.to_owned())))
    };
    text.split(',').filter_map(pair).collect()
}

/// `None` if its percent signs encode no text.
fn decoded(value: &str) -> Option<String> {
    let mut parts = value.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2).filter(|hex| !hex.starts_with('+'))?, 16).ok()?);
        bytes.extend_from_slice(part.get(2..)?.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::span::{SpanContext, SpanId, TraceId};
    use super::*;

    #[test]
    fn a_request_says_who_recorded_its_spans() {
        let variable = |name: &str| {
            let value = "region=eu,deployment.environment.name=a%20b, odd , service.name=other,off=50%";
            (name == "OTEL_RESOURCE_ATTRIBUTES").then(|| value.to_owned())
        };
        let context = SpanContext { trace: TraceId(1), span: SpanId(2), flags: 1, is_remote: false };
        let span = Span::new(context, None, "swap");
        let body = body(&TraceResource::new("gpu-7", &variable), std::slice::from_ref(&span)).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let attributes = [
            ("deployment.environment.name", "a b"),
            ("off", "50%"),
            ("region", "eu"),
            ("service.name", "gpu-7"),
            ("telemetry.sdk.language", "rust"),
            ("telemetry.sdk.name", "poorwill"),
            ("telemetry.sdk.version", version),
        ];
        let attributes =
            attributes.map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } }));
        let scope = json!({ "name": "poorwill-rotate", "version": version });
        let scope_spans = json!([{ "scope": scope, "spans": [span] }]);
        let resource = json!({ "attributes": attributes });
        assert_eq!(body, json!({ "resourceSpans": [{ "resource": resource, "scopeSpans": scope_spans }] }));
    }

    #[test]
    fn headers_come_from_the_nearer_variable() {
        let both = |name: &str| Some(format!("x-from={name}, authorization=Bearer%20x,no name=y"));
        let headers = headers_from(&both);
        assert_eq!(headers.len(), 2);
        assert_eq!(headers["x-from"], "OTEL_EXPORTER_OTLP_TRACES_HEADERS");
        assert_eq!(headers["authorization"], "Bearer x");
        let general = |name: &str| both(name).filter(|_| name == "OTEL_EXPORTER_OTLP_HEADERS");
        assert_eq!(headers_from(&general)["x-from"], "OTEL_EXPORTER_OTLP_HEADERS");
        assert!(headers_from(&|_| None).is_empty());
    }
}
