//! Traces of requests, as a collector gets them.

use std::time::Duration;

use poorwill_front::requests::Requests;
use poorwill_rotate::config::Config;
use poorwill_rotate::traces::Traces;
use serde_json::{Value, json};
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
async fn collected(collector: &TcpListener, traces: &Traces) -> (Head, Value) {
    let taken = async {
        let mut wire = Wire::new(collector.accept().await.unwrap().0);
        let (head, body) = wire.message().await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        (head, serde_json::from_slice(&body).unwrap())
    };
    tokio::join!(taken, traces.end()).0
}

/// Of the only resource, and its only scope.
fn spans(request: &Value) -> &Vec<Value> {
    let only = |all: &Value| assert_eq!(all.as_array().map(Vec::len), Some(1), "{request:#}");
    only(&request["resourceSpans"]);
    only(&request["resourceSpans"][0]["scopeSpans"]);
    request["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap()
}

/// The value of an attribute.
fn attribute<'a>(of: &'a Value, key: &str) -> Option<&'a Value> {
    let attributes = of["attributes"].as_array()?;
    attributes.iter().find(|one| one["key"] == key).map(|one| &one["value"])
}

/// When it began or ended.
fn nanos(span: &Value, key: &str) -> u64 {
    span[key].as_str().unwrap().parse().unwrap()
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
        assert_eq!(head.field("content-type"), Some("application/json"));
        assert_eq!(head.field("authorization"), Some("Bearer env:OTLP"));
        let spans = spans(&request);
        let resource = &request["resourceSpans"][0]["resource"];
        assert_eq!(attribute(resource, "service.name"), Some(&json!({ "stringValue": "gpu-7" })));
        let named = |name: &str| spans.iter().find(|span| span["name"] == name).unwrap();
        let (whole, wait) = (named("POST /v1/chat/completions"), named("wait"));
        let call = named("chat /models/\"two\"");
        assert_eq!(spans.len(), 3);
        for span in spans {
            assert_eq!(span["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
            assert!(!span.to_string().contains("secret"), "{span:#}");
        }
        // A server's, and a client's.
        assert_eq!((&whole["parentSpanId"], &whole["kind"]), (&json!("00f067aa0ba902b7"), &json!(2)));
        assert_eq!(whole["spanId"].as_str().map(str::len), Some(16));
        assert_eq!((&wait["parentSpanId"], &call["parentSpanId"]), (&whole["spanId"], &whole["spanId"]));
        assert_eq!((&call["kind"], call["events"].as_array().map(Vec::len)), (&json!(3), Some(1)));
        assert!(nanos(wait, "endTimeUnixNano") - nanos(wait, "startTimeUnixNano") >= 1_000_000);
        assert_eq!(attribute(whole, "gen_ai.request.model"), Some(&json!({ "stringValue": "two" })));
        // The engine continues below the front's span.
        let forwarded =
            format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", call["spanId"].as_str().unwrap());
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
        // It waits if the machine is slow.
        let other = spans(&request).iter().filter(|span| span["name"] != "wait");
        assert_eq!(other.count(), 2);
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
