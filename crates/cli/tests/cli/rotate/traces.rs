//! Traces of a whole rotation, as a collector gets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

use super::PROMPTS;
use super::fixture::{Fixture, Model, until};

/// Takes spans on one connection after another, until the test ends.
struct Collector {
    port: u16,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, spans) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<Span>>>::default());
        let shared = Arc::clone(&spans);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || taken(stream.unwrap(), &shared));
            }
        });
        Self { port, spans }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }
}

fn taken(mut stream: TcpStream, spans: &Mutex<Vec<Span>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
        let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        spans.lock().unwrap().extend(scopes.flat_map(|scope| scope.spans));
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    }
}

fn model(span: &Span) -> &str {
    let model = span.attributes.iter().find(|one| one.key == "gen_ai.request.model");
    match model.and_then(|one| one.value.as_ref()?.value.as_ref()) {
        Some(Value::StringValue(model)) => model,
        other => panic!("{other:?} of {span:#?}"),
    }
}

fn links(span: &Span) -> Vec<&Vec<u8>> {
    span.links.iter().map(|link| &link.span_id).collect()
}

#[test]
fn a_wait_leads_to_its_swap_and_that_to_the_model_that_left() {
    let collector = Collector::start();
    let traces = format!("[traces]\nendpoint = \"http://127.0.0.1:{}/v1/traces\"\n", collector.port);
    let models = vec![Model::new("amber"), Model { lines: traces, ..Model::new("birch") }];
    let fixture = Fixture::new("128MiB", models);
    let rotator = fixture.start(&[]);
    fixture.say("amber", PROMPTS[0]);
    fixture.say("birch", PROMPTS[0]);
    let answered = |spans: &[Span]| spans.iter().filter(|span| span.name == "POST /v1/completions").count();
    until(&rotator, "a batch comes while it runs", || answered(&collector.spans()) > 0);
    rotator.end();

    let spans = collector.spans();
    let of = |name: &str, of: &str| {
        let mut all = spans.iter().filter(|span| span.name == name && model(span) == of);
        let only = all.next().filter(|_| all.next().is_none());
        only.unwrap_or_else(|| panic!("not one {name} of {of}: {spans:#?}"))
    };
    assert_eq!(answered(&spans), 2);
    let (swap, leave) = (of("swap", "birch"), of("leave", "amber"));
    assert_eq!(links(of("wait", "birch")), [&swap.span_id]);
    assert_eq!(links(swap), [&leave.span_id]);
    assert_eq!(of("wait", "birch").parent_span_id, of("POST /v1/completions", "birch").span_id);
    assert_eq!(
        of("text_completion birch", "birch").parent_span_id,
        of("POST /v1/completions", "birch").span_id
    );
    for (parent, names) in
        [(swap, &["finding memory", "starting", "canary"][..]), (leave, &["falling asleep"])]
    {
        for name in names {
            let is_phase = |span: &&Span| span.name == *name && span.parent_span_id == parent.span_id;
            let phase = spans.iter().find(is_phase).unwrap_or_else(|| panic!("{name} in {spans:#?}"));
            assert!(phase.start_time_unix_nano >= parent.start_time_unix_nano, "{phase:#?} of {parent:#?}");
            assert!(phase.end_time_unix_nano <= parent.end_time_unix_nano, "{phase:#?} of {parent:#?}");
        }
    }
}
