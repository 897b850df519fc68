//! The spans of one request.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{HeaderValue, Uri};

use super::span::{Attribute, SpanContext, SpanEvent, SpanFailure, SpanId, SpanKind, SpanLink, TraceId};
use super::tracer::ActiveSpan;
use super::{Recording, Traces};
use poorwill_front::requests::{RequestNow, Tokens, TraceParent};

/// A shorter wait has no span.
const WAIT_MIN: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct RequestSpans {
    recording: Arc<Recording>,
    /// Parent of the other spans.
    request: ActiveSpan,
    waits_since: Option<SystemTime>,
    call: Option<ActiveSpan>,
}

impl Traces {
    pub(crate) fn request(&self, now: &RequestNow, parent: Option<TraceParent>) -> Option<RequestSpans> {
        let recording = self.0.clone()?;
        let parent = parent.map(|parent| SpanContext {
            trace: TraceId(parent.trace),
            span: SpanId(parent.span),
            flags: parent.flags,
            is_remote: true,
        });
        let mut request = recording.requests.begin(now.method.clone(), parent);
        if let Some(span) = request.recorded() {
            span.kind = SpanKind::Server;
            span.attributes.extend([
                Attribute::new("http.request.method", now.method.clone()),
                Attribute::new("url.path", now.path.clone()),
                Attribute::new("url.scheme", "http"),
                Attribute::new("poorwill.request.id", now.id.clone()),
            ]);
        }
        Some(RequestSpans { recording, request, waits_since: None, call: None })
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
        let mut wait = self.recording.requests.begin("wait", Some(self.request.context()));
        if let Some(wait) = wait.recorded() {
            wait.start = since;
            wait.links.extend(swap.map(|swap| SpanLink::new(swap, Vec::new())));
            wait.attributes
                .extend(model.map(|model| Attribute::new("gen_ai.request.model", model.to_owned())));
        }
    }

    /// Begins the request to an engine, and returns its `traceparent`.
    pub(crate) fn calls(&mut self, path: &str, url: &str, served_as: &str) -> Option<HeaderValue> {
        let operation = Operation::of(path);
        let name = operation.map_or_else(|| "POST".to_owned(), |known| format!("{} {served_as}", known.name));
        let mut call = self.recording.requests.begin(name, Some(self.request.context()));
        if let Some(span) = call.recorded() {
            span.kind = SpanKind::Client;
            span.attributes.extend([
                Attribute::new("http.request.method", "POST"),
                Attribute::new("gen_ai.request.model", served_as.to_owned()),
            ]);
            span.attributes.extend(operation.into_iter().flat_map(Operation::attributes));
            if let Some(engine) = url.parse::<Uri>().ok().and_then(|uri| uri.into_parts().authority) {
                span.attributes.push(Attribute::new("server.address", engine.host().to_owned()));
                let port = engine.port_u16().map(|port| Attribute::new("server.port", i64::from(port)));
                span.attributes.extend(port);
            }
        }
        let parent = call.context().to_string();
        self.call = Some(call);
        HeaderValue::from_str(&parent).ok()
    }

    /// The engine's first byte.
    pub(crate) fn begins(&mut self) {
        if let Some(call) = self.call.as_mut().and_then(ActiveSpan::recorded) {
            call.events.push(SpanEvent::new("first byte", SystemTime::now(), Vec::new()));
        }
    }

    pub(crate) fn end(&mut self, last: &RequestNow, status: Option<u16>, end: &str, tokens: Tokens) {
        self.runs(last.model.as_deref());
        let failure = (end == "broken").then(|| SpanFailure::new("the answer broke off"));
        let usage = used(tokens);
        // It ends here, and before the request.
        let mut call = self.call.take();
        if let Some(call) = call.as_mut().and_then(ActiveSpan::recorded) {
            call.attributes.extend(usage.clone());
            call.failure.clone_from(&failure);
        }
        drop(call);
        let Some(request) = self.request.recorded() else { return };
        request.attributes.extend(usage);
        request.attributes.push(Attribute::new("poorwill.end", end.to_owned()));
        request.attributes.extend(last.key.clone().map(|key| Attribute::new("poorwill.key", key)));
        if let Some(peer) = &last.peer {
            let host = peer.rsplit_once(':').map_or(peer.as_str(), |(host, _)| host);
            let host = host.trim_matches(['[', ']']).to_owned();
            request.attributes.push(Attribute::new("client.address", host));
        }
        if let Some(model) = &last.model {
            request.attributes.push(Attribute::new("gen_ai.request.model", model.clone()));
            request.attributes.extend(Operation::of(&last.path).into_iter().flat_map(Operation::attributes));
            if is_route(&last.path) {
                request.name = format!("{} {}", last.method, last.path).into();
                request.attributes.push(Attribute::new("http.route", last.path.clone()));
            }
        }
        request
            .attributes
            .extend(status.map(|status| Attribute::new("http.response.status_code", i64::from(status))));
        let kind = match (&failure, status) {
            (Some(_), _) => Some("broken".to_owned()),
            (None, Some(status @ 500..)) => Some(status.to_string()),
            _ => None,
        };
        if let Some(kind) = kind {
            request.failure = Some(failure.unwrap_or_else(|| SpanFailure::new("")));
            request.attributes.push(Attribute::new("error.type", kind));
        }
        self.request.end();
    }
}

fn used(tokens: Tokens) -> Vec<Attribute> {
    let usage =
        [("gen_ai.usage.input_tokens", tokens.prompt), ("gen_ai.usage.output_tokens", tokens.completion)];
    let known = usage.into_iter().filter_map(|(key, tokens)| Some((key, i64::try_from(tokens?).ok()?)));
    known.map(|(key, tokens)| Attribute::new(key, tokens)).collect()
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
    fn attributes(self) -> [Attribute; 2] {
        [
            Attribute::new("gen_ai.operation.name", self.name),
            Attribute::new("gen_ai.provider.name", self.provider),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::kept::{KeptSpans, attribute};
    use super::super::span::AttributeValue;
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
        assert_eq!((request.trace_id, call.trace_id), (TraceId(0xabc), TraceId(0xabc)));
        // Only the client's span is another process's.
        assert_eq!((request.parent_span_id, request.flags), (Some(SpanId(0xdef)), 0x301));
        assert_eq!((call.parent_span_id, call.flags), (Some(request.span_id), 0x101));
        assert_eq!((request.kind, call.kind), (SpanKind::Server, SpanKind::Client));
        assert_eq!((&request.failure, &call.failure), (&Some(SpanFailure::new("")), &None));
        assert_eq!(forwarded, format!("00-{}-{}-01", call.trace_id, call.span_id));
        assert_eq!(call.events.iter().map(|event| event.name).collect::<Vec<_>>(), ["first byte"]);
        for (span, key, value) in [
            (&request, "http.request.method", AttributeValue::from("POST")),
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
        let links: Vec<SpanId> = wait.links.iter().map(|link| link.span_id).collect();
        assert_eq!(links, [swap.span_id]);
        // The next one comes after that swap.
        spans.waits();
        std::thread::sleep(WAIT_MIN);
        spans.end(&now("/v1/completions"), Some(503), "whole", Tokens::default());
        let waits: Vec<_> = kept.all().into_iter().filter(|span| span.name == "wait").collect();
        assert_eq!(waits.len(), 2);
        assert_eq!(waits[1].links.len(), 0);
    }
}
