//! Log lines of requests.

use std::fmt::{Debug, Write as _};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_front::proxy::Timeouts;
use tokio::io::AsyncWriteExt as _;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::setup::{EVENTS, Setup, answer, chunk, last_answer, post_with, run, run_on_one_thread};

/// Keeps all of the front's log lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("poorwill_front")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
}

#[test]
fn each_request_is_logged_once_without_its_body_and_key() {
    let lines = Lines::default();
    // Other tests log meanwhile, so these requests have ids.
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let mut peer = String::new();
    run(async {
        let setup = Setup::new("keys = [\"env:ONE\"]").await;
        let mut client = setup.client().await;
        peer = format!("peer=\"{}\" ", client.stream.local_addr().unwrap());
        let head = "Authorization: Bearer key-of-ONE\r\nX-Request-Id: told-1\r\n";
        client
            .send(post_with("/v1/completions?q=secret", head, r#"{"model":"small","prompt":"secret"}"#))
            .await;
        let mut engine = setup.engine().await;
        engine.message().await;
        // The next request comes on another connection.
        engine
            .send(
                answer(r#"{"text":"secret \"usage\"","usage":{"prompt_tokens":3,"completion_tokens":5}}"#)
                    .replacen("\r\n", "\r\nConnection: close\r\n", 1),
            )
            .await;
        client.message().await;
        let head = "Authorization: Bearer key-of-ONE\r\nX-Request-Id: told-2\r\n";
        client.send(post_with("/v1/completions", head, r#"{"secret"#)).await;
        client.message().await;
        let head = "Authorization: Bearer key-of-TWO\r\nX-Request-Id: told-3\r\n";
        client.send(post_with("/v1/completions", head, r#"{"model":"secret"}"#)).await;
        client.message().await;
        let head = "HEAD /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key-of-ONE\r\n";
        let mut client = setup.client().await;
        client.send(format!("{head}X-Request-Id: told-7\r\nConnection: close\r\n\r\n")).await;
        client.head().await;
        client.ended().await;
        // One that breaks off.
        let head = "Authorization: Bearer key-of-ONE\r\nX-Request-Id: told-4\r\n";
        let mut client = setup.client().await;
        client.send(post_with("/v1/completions", head, r#"{"model":"two","prompt":"secret"}"#)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234").await;
        client.head().await;
        client.bytes(4).await;
        drop(engine);
        client.ended().await;
        // One that reads what another has made.
        let mut client = setup.client().await;
        let head = "Authorization: Bearer key-of-ONE\r\nX-Request-Id: made\r\n";
        client.send(post_with("/v1/responses", head, r#"{"model":"two"}"#)).await;
        let made = last_answer(r#"{"id":"resp_1","usage":{"input_tokens":3,"output_tokens":5}}"#);
        setup.answered(&made).await;
        client.message().await;
        let head = "Authorization: Bearer key-of-ONE\r\nX-Request-Id: read-again\r\n";
        client.send(format!("GET /v1/responses/resp_1 HTTP/1.1\r\nHost: a\r\n{head}\r\n")).await;
        setup.answered(&made).await;
        client.message().await;
        // A WebSocket.
        let mut client = setup.client().await;
        let head = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a\r\n\
                    Sec-WebSocket-Protocol: openai-insecure-api-key.key-of-ONE\r\n";
        let head = format!("{head}X-Request-Id: told-6\r\n");
        client.send(format!("GET /v1/realtime?model=two&q=secret HTTP/1.1\r\nHost: a\r\n{head}\r\n")).await;
        let mut engine = setup.engine().await;
        engine.head().await;
        engine.send("HTTP/1.1 101 Go\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nsecret").await;
        client.head().await;
        client.bytes(6).await;
        drop((client, engine));
        setup.shutdown.cancel();
        setup.served.await.unwrap().unwrap();
    });
    // One that the front breaks off, since its client reads nothing and its model has to leave.
    run_on_one_thread(async {
        let timeouts = Timeouts { reader: Duration::from_millis(50), ..Timeouts::default() };
        let setup = Setup::with_timeouts("", timeouts).await;
        let mut client = setup.client().await;
        let ask = r#"{"model":"org/one","stream":true}"#;
        client.send(post_with("/v1/completions", "X-Request-Id: told-5\r\n", ask)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        let piece = chunk(&format!("data: {}\n\n", "x".repeat(64 << 10)));
        loop {
            tokio::select! {
                sent = engine.stream.write_all(piece.as_bytes()) => sent.unwrap(),
                () = setup.rounds() => break,
            }
        }
        setup.backend.aborted.cancel();
        setup.until(|seen| seen.running == 0).await;
        assert_eq!(client.reset().await, io::ErrorKind::ConnectionReset);
    });
    let all = lines.0.lock().unwrap();
    let lines: Vec<&String> = all.iter().filter(|line| line.contains("told-")).collect();
    let [first, second, third, head, fourth, socket, fifth] = &lines[..] else { panic!("{lines:#?}") };
    for part in [
        "request_id=\"told-1\"",
        "model=\"org/one\"",
        "status=200",
        "end=\"whole\"",
        "bytes=77",
        "prompt_tokens=3 ",
        "completion_tokens=5 ",
        "waited_ms=",
        "total_ms=",
        "method=\"POST\"",
        "path=\"/v1/completions\"",
        "ttft_ms=",
        &peer,
    ] {
        assert!(first.contains(part), "{part}: {first}");
    }
    assert!(second.contains("status=400") && third.contains("status=401"), "{lines:#?}");
    assert!(!second.contains("ttft_ms") && fourth.contains("ttft_ms="), "only an engine's bytes count");
    assert!(head.contains("method=\"HEAD\"") && head.contains("end=\"whole\""), "{head}");
    assert!(third.contains(&peer) && third.contains("path=\"/v1/completions\""), "{third}");
    assert!(!fourth.contains("tokens="), "{fourth}");
    for part in ["model=\"two\"", "status=200", "end=\"broken\"", "bytes=4"] {
        assert!(fourth.contains(part), "{part}: {fourth}");
    }
    for part in ["method=\"GET\"", "path=\"/v1/realtime\"", "model=\"two\"", "status=101", "bytes=6"] {
        assert!(socket.contains(part), "{part}: {socket}");
    }
    assert!(fifth.contains("end=\"broken\""), "{fifth}");
    let with = |id: &str| all.iter().find(|line| line.contains(id)).unwrap();
    assert!(with("\"made\"").contains("prompt_tokens=3 completion_tokens=5"), "{all:#?}");
    assert!(!with("\"read-again\"").contains("_tokens="), "tokens are counted once");
    assert!(!lines.iter().any(|line| line.contains("secret") || line.contains("key-of")), "{lines:#?}");
}
