//! Traces of a whole rotation, as a collector gets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::Value;

use super::PROMPTS;
use super::fixture::{Fixture, Model, until};

/// Takes spans on one connection after another, until the test ends.
struct Collector {
    port: u16,
    spans: Arc<Mutex<Vec<Value>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, spans) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<Value>>>::default());
        let shared = Arc::clone(&spans);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || taken(stream.unwrap(), &shared));
            }
        });
        Self { port, spans }
    }

    fn spans(&self) -> Vec<Value> {
        self.spans.lock().unwrap().clone()
    }
}

fn taken(mut stream: TcpStream, spans: &Mutex<Vec<Value>>) {
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
        let request: Value = serde_json::from_slice(&body).unwrap();
        let scopes = all(&request["resourceSpans"]).iter().flat_map(|resource| all(&resource["scopeSpans"]));
        spans.lock().unwrap().extend(scopes.flat_map(|scope| all(&scope["spans"])).cloned());
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    }
}

/// Of a list, which is left out if it is empty.
fn all(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn model(span: &Value) -> &str {
    let model = all(&span["attributes"]).iter().find(|one| one["key"] == "gen_ai.request.model");
    let model = model.and_then(|one| one["value"]["stringValue"].as_str());
    model.unwrap_or_else(|| panic!("no model: {span:#}"))
}

fn links(span: &Value) -> Vec<&Value> {
    all(&span["links"]).iter().map(|link| &link["spanId"]).collect()
}

/// When it began and ended.
fn times(span: &Value) -> (u64, u64) {
    let of = |key: &str| span[key].as_str().unwrap().parse().unwrap();
    (of("startTimeUnixNano"), of("endTimeUnixNano"))
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
    let answered =
        |spans: &[Value]| spans.iter().filter(|span| span["name"] == "POST /v1/completions").count();
    until(&rotator, "a batch comes while it runs", || answered(&collector.spans()) > 0);
    rotator.end();

    let spans = collector.spans();
    let of = |name: &str, of: &str| {
        let mut all = spans.iter().filter(|span| span["name"] == name && model(span) == of);
        let only = all.next().filter(|_| all.next().is_none());
        only.unwrap_or_else(|| panic!("not one {name} of {of}: {spans:#?}"))
    };
    assert_eq!(answered(&spans), 2);
    let (swap, leave) = (of("swap", "birch"), of("leave", "amber"));
    assert_eq!(links(of("wait", "birch")), [&swap["spanId"]]);
    assert_eq!(links(swap), [&leave["spanId"]]);
    let request = &of("POST /v1/completions", "birch")["spanId"];
    assert_eq!(of("wait", "birch")["parentSpanId"], *request);
    assert_eq!(of("text_completion birch", "birch")["parentSpanId"], *request);
    for (parent, names) in
        [(swap, &["finding memory", "starting", "canary"][..]), (leave, &["falling asleep"])]
    {
        for name in names {
            let is_phase = |span: &&Value| span["name"] == *name && span["parentSpanId"] == parent["spanId"];
            let phase = spans.iter().find(is_phase).unwrap_or_else(|| panic!("{name} in {spans:#?}"));
            let ((start, end), whole) = (times(phase), times(parent));
            assert!(whole.0 <= start && end <= whole.1, "{phase:#} of {parent:#}");
        }
    }
}
