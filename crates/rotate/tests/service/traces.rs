//! Traces of requests, as a collector gets them.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use poorwill_front::requests::Requests;
use poorwill_rotate::config::Config;
use poorwill_rotate::traces::Traces;
use prost::Message as _;
use tokio::net::TcpListener;

use super::front::{Head, Setup, Verdict, Wire, answer, post_with, run};

const BODY: &str = r#"{"model":"large","prompt":"secret"}"#;

/// Traces to an address, with these lines of `[traces]`.
fn traces(address: std::net::SocketAddr, lines: &str) -> Traces {
    let text = format!(
        "[traces]\nendpoint = \"http://{address}/v1/traces\"\n{lines}\n\
         [[model]]\nname = \"any\"\nurl = \"http://127.0.0.1:1\"\n"
    );
    let config = Config::parse(&text, &|place| Ok(format!("Bearer {place}"))).unwrap();
    Traces::start(&config.traces.unwrap()).unwrap()
}

/// What a collector gets until the traces end, in one request.
async fn collected(collector: &TcpListener, traces: &Traces) -> (Head, ExportTraceServiceRequest) {
    let taken = async {
        let mut wire = Wire::new(collector.accept().await.unwrap().0);
        let (head, body) = wire.message().await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        (head, ExportTraceServiceRequest::decode(&body[..]).unwrap())
    };
    tokio::join!(taken, traces.end()).0
}

fn text<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    match attributes.iter().find(|one| one.key == key)?.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        other => panic!("{key} is {other:?}"),
    }
}

/// Asks a model, with these lines in the head, and returns the head that its engine gets.
async fn asked(setup: &Setup, lines: &str) -> Head {
    let mut client = setup.client().await;
    client.send(post_with("/v1/chat/completions", lines, BODY)).await;
    let mut engine = setup.engine().await;
    let (head, _) = engine.message().await;
    engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
    assert_eq!(client.message().await.0.status(), 200);
    // Its spans have ended, then.
    while setup.backend.requests.active(0).1 > 0 {
        tokio::task::yield_now().await;
    }
    head
}

#[test]
fn a_client_its_wait_and_its_engine_have_one_trace() {
    run(async {
        let collector = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let lines = "service = \"gpu-7\"\nheaders = { authorization = \"env:OTLP\" }";
        let traces = traces(collector.local_addr().unwrap(), lines);
        let setup = Setup::with_requests(Requests::traced(std::sync::Arc::new(traces.clone()))).await;
        setup.say(Verdict::Wait);
        let head =
            "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\ntracestate: a=b\r\n";
        let admit = async {
            setup.until(|seen| seen.waiting == 1).await;
            // A shorter wait is none.
            tokio::time::sleep(Duration::from_millis(2)).await;
            setup.say(Verdict::Admit);
        };
        let (engine, ()) = tokio::join!(asked(&setup, head), admit);
        let (head, request) = collected(&collector, &traces).await;
        assert_eq!(head.first, "POST /v1/traces HTTP/1.1");
        assert_eq!(head.field("content-type"), Some("application/x-protobuf"));
        assert_eq!(head.field("authorization"), Some("Bearer env:OTLP"));
        let [resource] = &request.resource_spans[..] else { panic!("{request:#?}") };
        let attributes = &resource.resource.as_ref().unwrap().attributes;
        assert_eq!(text(attributes, "service.name"), Some("gpu-7"));
        let spans: Vec<&Span> = resource.scope_spans.iter().flat_map(|scope| &scope.spans).collect();
        let named = |name: &str| *spans.iter().find(|span| span.name == name).unwrap();
        let (whole, wait) = (named("POST /v1/chat/completions"), named("wait"));
        let call = named("chat /models/\"two\"");
        assert_eq!(spans.len(), 3);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for span in &spans {
            assert_eq!(hex(&span.trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
            assert!(!format!("{span:?}").contains("secret"), "{span:#?}");
        }
        assert_eq!(
            (hex(&whole.parent_span_id).as_str(), whole.kind()),
            ("00f067aa0ba902b7", SpanKind::Server)
        );
        assert_eq!((&wait.parent_span_id, &call.parent_span_id), (&whole.span_id, &whole.span_id));
        assert_eq!((call.kind(), call.events.len()), (SpanKind::Client, 1));
        assert!(wait.end_time_unix_nano - wait.start_time_unix_nano >= 1_000_000);
        assert_eq!(text(&whole.attributes, "gen_ai.request.model"), Some("two"));
        // The engine continues below the front's span.
        let forwarded = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", hex(&call.span_id));
        assert_eq!(engine.field("traceparent"), Some(forwarded.as_str()));
        assert_eq!(engine.field("tracestate"), Some("a=b"));
    });
}

#[test]
fn what_is_not_sampled_is_forwarded_as_such_and_not_exported() {
    run(async {
        let collector = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let traces = traces(collector.local_addr().unwrap(), "sample = 0");
        let setup = Setup::with_requests(Requests::traced(std::sync::Arc::new(traces.clone()))).await;
        let engine = asked(&setup, "").await;
        let made = engine.field("traceparent").unwrap();
        assert!(made.starts_with("00-") && made.ends_with("-00"), "{made}");
        let head = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00\r\n";
        let engine = asked(&setup, head).await;
        let made = engine.field("traceparent").unwrap();
        assert!(made.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && made.ends_with("-00"), "{made}");
        assert!(!made.contains("00f067aa0ba902b7"));
        // A sampled one is the only one that comes.
        asked(&setup, &head.replace("-00\r", "-01\r")).await;
        let (_, request) = collected(&collector, &traces).await;
        let spans = request.resource_spans.iter().flat_map(|one| &one.scope_spans).map(|one| one.spans.len());
        assert_eq!(spans.sum::<usize>(), 2);
    });
}

#[test]
fn requests_go_on_without_a_collector() {
    run(async {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let traces = traces(closed, "");
        let setup = Setup::with_requests(Requests::traced(std::sync::Arc::new(traces.clone()))).await;
        for _ in 0..20 {
            assert!(asked(&setup, "").await.field("traceparent").unwrap().ends_with("-01"));
        }
        traces.end().await;
        asked(&setup, "").await;
    });
}
