//! The spans of one request.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{HeaderValue, Uri};
use opentelemetry::trace::{
    Link, Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId,
    TraceState, Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::Span;

use super::{Recording, Traces};
use poorwill_front::requests::{RequestNow, Tokens, TraceParent};

/// A shorter wait has no span.
const WAIT_MIN: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct RequestSpans {
    recording: Arc<Recording>,
    request: Span,
    /// Parent of the other spans.
    context: Context,
    waits_since: Option<SystemTime>,
    call: Option<Span>,
}

impl Traces {
    pub(crate) fn request(&self, now: &RequestNow, parent: Option<TraceParent>) -> Option<RequestSpans> {
        let recording = self.0.clone()?;
        let parent = parent.map_or_else(Context::new, |parent| {
            Context::new().with_remote_span_context(SpanContext::new(
                TraceId::from(parent.trace),
                SpanId::from(parent.span),
                TraceFlags::new(parent.flags),
                true,
                TraceState::NONE,
            ))
        });
        let attributes = [
            KeyValue::new("http.request.method", now.method.clone()),
            KeyValue::new("url.path", now.path.clone()),
            KeyValue::new("url.scheme", "http"),
            KeyValue::new("poorwill.request.id", now.id.clone()),
        ];
        let builder = recording.requests.span_builder(now.method.clone()).with_kind(SpanKind::Server);
        let request = recording.requests.build_with_context(builder.with_attributes(attributes), &parent);
        let context = Context::new().with_remote_span_context(request.span_context().clone());
        Some(RequestSpans { recording, request, context, waits_since: None, call: None })
    }
}

impl RequestSpans {
    pub(crate) fn waits(&mut self) {
        self.waits_since = Some(SystemTime::now());
    }

    /// Ends its wait for a model, with a link to the swap that it waited for.
    pub(crate) fn runs(&mut self, model: Option<&str>) {
        let Some(since) = self.waits_since.take() else { return };
        if since.elapsed().unwrap_or_default() < WAIT_MIN {
            return;
        }
        let swap = model.and_then(|model| self.recording.moves().swap_of(model, since));
        let builder = self.recording.requests.span_builder("wait").with_start_time(since);
        let links = swap.map(|swap| Link::new(swap, Vec::new(), 0)).into_iter().collect();
        let model = model.map(|model| KeyValue::new("gen_ai.request.model", model.to_owned()));
        let builder = builder.with_links(links).with_attributes(model);
        self.recording.requests.build_with_context(builder, &self.context).end();
    }

    /// Begins the request to an engine, and returns its `traceparent`.
    pub(crate) fn calls(&mut self, path: &str, url: &str, served_as: &str) -> Option<HeaderValue> {
        let operation = Operation::of(path);
        let name = operation.map_or_else(|| "POST".to_owned(), |known| format!("{} {served_as}", known.name));
        let mut attributes = vec![
            KeyValue::new("http.request.method", "POST"),
            KeyValue::new("gen_ai.request.model", served_as.to_owned()),
        ];
        attributes.extend(operation.into_iter().flat_map(Operation::attributes));
        if let Some(engine) = url.parse::<Uri>().ok().and_then(|uri| uri.into_parts().authority) {
            attributes.push(KeyValue::new("server.address", engine.host().to_owned()));
            let port = engine.port_u16().map(|port| KeyValue::new("server.port", i64::from(port)));
            attributes.extend(port);
        }
        let builder = self.recording.requests.span_builder(name).with_kind(SpanKind::Client);
        let call =
            self.recording.requests.build_with_context(builder.with_attributes(attributes), &self.context);
        let of = call.span_context();
        let parent = format!("00-{}-{}-{:02x}", of.trace_id(), of.span_id(), of.trace_flags().to_u8());
        self.call = Some(call);
        HeaderValue::from_str(&parent).ok()
    }

    /// The engine's first byte.
    pub(crate) fn begins(&mut self) {
        if let Some(call) = &mut self.call {
            call.add_event("first byte", Vec::new());
        }
    }

    pub(crate) fn end(&mut self, last: &RequestNow, status: Option<u16>, end: &str, tokens: Tokens) {
        self.runs(last.model.as_deref());
        let is_broken = end == "broken";
        let usage = [("input", tokens.prompt), ("output", tokens.completion)];
        let usage = usage.into_iter().filter_map(|(kind, tokens)| {
            let tokens = i64::try_from(tokens?).ok()?;
            Some(KeyValue::new(format!("gen_ai.usage.{kind}_tokens"), tokens))
        });
        let usage: Vec<KeyValue> = usage.collect();
        if let Some(mut call) = self.call.take() {
            call.set_attributes(usage.clone());
            if is_broken {
                call.set_status(Status::error("the answer broke off"));
            }
        }
        let request = &mut self.request;
        if !request.is_recording() {
            return;
        }
        request.set_attributes(usage);
        request.set_attribute(KeyValue::new("poorwill.end", end.to_owned()));
        if let Some(key) = &last.key {
            request.set_attribute(KeyValue::new("poorwill.key", key.clone()));
        }
        if let Some(peer) = &last.peer {
            let host = peer.rsplit_once(':').map_or(peer.as_str(), |(host, _)| host);
            request.set_attribute(KeyValue::new("client.address", host.trim_matches(['[', ']']).to_owned()));
        }
        if let Some(model) = &last.model {
            request.set_attribute(KeyValue::new("gen_ai.request.model", model.clone()));
            request.set_attributes(Operation::of(&last.path).into_iter().flat_map(Operation::attributes));
            if is_route(&last.path) {
                request.update_name(format!("{} {}", last.method, last.path));
                request.set_attribute(KeyValue::new("http.route", last.path.clone()));
            }
        }
        if let Some(status) = status {
            request.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        }
        let kind = match (is_broken, status) {
            (true, _) => Some("broken".to_owned()),
            (false, Some(status @ 500..)) => Some(status.to_string()),
            _ => None,
        };
        if let Some(kind) = kind {
            request.set_status(Status::error(if is_broken { "the answer broke off" } else { "" }));
            request.set_attribute(KeyValue::new("error.type", kind));
        }
        request.end();
    }
}

/// Whether a path is without identifiers, so that names of spans are few.
fn is_route(path: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || matches!(byte, b'/' | b'_');
    path.strip_prefix("/v1/").is_some_and(|rest| rest.bytes().all(is_plain))
}

/// By the conventions for generative models.
#[derive(Debug, Clone, Copy)]
struct Operation {
    name: &'static str,
    provider: &'static str,
}

impl Operation {
    /// `None` for paths without an operation of their own.
    fn of(path: &str) -> Option<Self> {
        let (name, provider) = match path {
            "/v1/chat/completions" | "/v1/responses" => ("chat", "openai"),
            "/v1/completions" => ("text_completion", "openai"),
            "/v1/embeddings" => ("embeddings", "openai"),
            "/v1/messages" => ("chat", "anthropic"),
            _ => return None,
        };
        Some(Self { name, provider })
    }

    /// The provider is the format of the API: engines of any kind have it.
    fn attributes(self) -> [KeyValue; 2] {
        [
            KeyValue::new("gen_ai.operation.name", self.name),
            KeyValue::new("gen_ai.provider.name", self.provider),
        ]
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::Value;

    use super::super::kept::{KeptSpans, attribute};
    use super::*;
    use crate::service::{EventKind, ServiceEvent};
    use poorwill_front::requests::RequestState;
    use poorwill_rotation_policy::StageName;

    const PARENT: TraceParent = TraceParent { trace: 0xabc, span: 0xdef, flags: 1 };

    fn now(path: &str) -> RequestNow {
        RequestNow {
            id: "r-1".to_owned(),
            method: "POST".to_owned(),
            path: path.to_owned(),
            peer: Some("[::1]:999".to_owned()),
            key: Some("team".to_owned()),
            model: Some("org/one".to_owned()),
            state: RequestState::Reading,
            age_s: 0.0,
            waited_s: None,
            ttft_s: None,
            bytes: 0,
        }
    }

    #[test]
    fn a_request_is_described_by_the_conventions() {
        let kept = KeptSpans::default();
        let mut spans = kept.traces(0.0).request(&now("/v1/messages"), Some(PARENT)).unwrap();
        let forwarded = spans.calls("/v1/messages", "http://127.0.0.1:8000", "llama").unwrap();
        spans.begins();
        let tokens = Tokens { prompt: Some(3), completion: Some(20) };
        spans.end(&now("/v1/messages"), Some(503), "whole", tokens);
        let (request, call) = (kept.one("POST /v1/messages"), kept.one("chat llama"));
        assert_eq!(request.span_context.trace_id(), TraceId::from(0xabc_u128));
        assert_eq!((request.parent_span_id, request.parent_span_is_remote), (SpanId::from(0xdef_u64), true));
        assert_eq!(call.parent_span_id, request.span_context.span_id());
        let of = &call.span_context;
        assert_eq!(forwarded, format!("00-{}-{}-01", of.trace_id(), of.span_id()));
        assert_eq!(call.events.iter().map(|event| &*event.name).collect::<Vec<_>>(), ["first byte"]);
        for (span, key, value) in [
            (&request, "http.request.method", Value::from("POST")),
            (&request, "http.route", "/v1/messages".into()),
            (&request, "url.path", "/v1/messages".into()),
            (&request, "http.response.status_code", 503.into()),
            (&request, "error.type", "503".into()),
            (&request, "client.address", "::1".into()),
            (&request, "gen_ai.operation.name", "chat".into()),
            (&request, "gen_ai.provider.name", "anthropic".into()),
            (&request, "gen_ai.request.model", "org/one".into()),
            (&request, "gen_ai.usage.input_tokens", 3.into()),
            (&request, "poorwill.key", "team".into()),
            (&request, "poorwill.request.id", "r-1".into()),
            (&call, "gen_ai.request.model", "llama".into()),
            (&call, "gen_ai.usage.output_tokens", 20.into()),
            (&call, "server.address", "127.0.0.1".into()),
            (&call, "server.port", 8000.into()),
        ] {
            assert_eq!(attribute(span, key), Some(value), "{key}");
        }
    }

    #[test]
    fn paths_with_identifiers_give_no_names() {
        let kept = KeptSpans::default();
        for path in ["/v1/audio/transcriptions", "/v1/responses/resp_1/cancel"] {
            kept.traces(1.0).request(&now(path), None).unwrap().end(
                &now(path),
                None,
                "left",
                Tokens::default(),
            );
        }
        kept.one("POST /v1/audio/transcriptions");
        let other = kept.one("POST");
        assert_eq!(attribute(&other, "http.route"), None);
        assert_eq!(attribute(&other, "http.response.status_code"), None);
        assert_eq!(attribute(&other, "poorwill.end"), Some("left".into()));
    }

    #[test]
    fn a_client_decides_about_its_trace_and_the_share_about_others() {
        let kept = KeptSpans::default();
        let path = "/v1/completions";
        for (sample, parent, flags) in [
            (1.0, Some(TraceParent { flags: 0, ..PARENT }), "00"),
            (0.0, Some(PARENT), "01"),
            (0.0, None, "00"),
            (1.0, None, "01"),
        ] {
            let before = kept.all().len();
            let mut spans = kept.traces(sample).request(&now(path), parent).unwrap();
            let forwarded = spans.calls(path, "http://127.0.0.1:8000", "one").unwrap();
            assert!(forwarded.to_str().unwrap().ends_with(&format!("-{flags}")), "{forwarded:?}");
            spans.end(&now(path), Some(200), "whole", Tokens::default());
            assert_eq!(kept.all().len() - before, if flags == "01" { 2 } else { 0 }, "{sample} {parent:?}");
        }
        assert!(Traces::default().request(&now(path), None).is_none());
    }

    #[test]
    fn a_wait_links_to_its_swap() {
        let kept = KeptSpans::default();
        let traces = kept.traces(1.0);
        let stage = |before, stage| ServiceEvent {
            seq: 1,
            at_unix_ms: 1000,
            model: "org/one".to_owned(),
            what: EventKind::Stage { before, before_s: 0.0, stage },
        };
        let recording = traces.0.clone().unwrap();
        let mut spans = traces.request(&now("/v1/completions"), None).unwrap();
        spans.waits();
        std::thread::sleep(WAIT_MIN);
        recording.record(&stage(StageName::Asleep, StageName::Waking));
        spans.runs(Some("org/one"));
        recording.record(&stage(StageName::Waking, StageName::Cold));
        let (wait, swap) = (kept.one("wait"), kept.one("swap"));
        let links: Vec<SpanId> = wait.links.iter().map(|link| link.span_context.span_id()).collect();
        assert_eq!(links, [swap.span_context.span_id()]);
        // The next one comes after that swap.
        spans.waits();
        std::thread::sleep(WAIT_MIN);
        spans.end(&now("/v1/completions"), Some(503), "whole", Tokens::default());
        let waits: Vec<_> = kept.all().into_iter().filter(|span| span.name == "wait").collect();
        assert_eq!(waits.len(), 2);
        assert_eq!(waits[1].links.len(), 0);
    }
}
