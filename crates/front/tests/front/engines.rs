//! Connections to engines: which are used again, and what happens where an engine has closed one.

use std::net::SocketAddr;
use std::time::Duration;

use poorwill_front::proxy::Timeouts;
use poorwill_testkit::effort::Effort;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use super::setup::{END, EVENTS, Setup, Wire, answer, chunk, post, post_with, run};

const ASK: &str = r#"{"model":"org/one","prompt":"a"}"#;
const STREAM: &str = r#"{"model":"org/one","prompt":"a","stream":true}"#;

/// An error that keeps its connection, whatever is left of the request's body.
const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}";

/// What the requests of a model that were sent once more are counted as.
fn repeats(setup: &Setup) -> usize {
    let (mut registry, mut text) = (Registry::default(), String::new());
    setup.backend.requests.register(&mut registry);
    encode(&mut text, &registry).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("requests_repeated_total{model=\"org/one\"} "));
    line.map_or(0, |count| count.parse().unwrap())
}

/// Accepts connections for an engine that answers each by itself.
async fn serve<F: Future<Output = ()> + Send + 'static>(engine: TcpListener, each: fn(Wire) -> F) {
    while let Ok((stream, _)) = engine.accept().await {
        tokio::spawn(each(Wire::new(stream)));
    }
}

/// As llama.cpp's server: it closes behind each stream, and says nothing of it.
async fn closes_behind_streams(mut wire: Wire) {
    loop {
        let Some((_, body)) = wire.message_if_any().await else { return };
        if body != STREAM.as_bytes() {
            wire.send(answer("{}").replacen("\r\n", "\r\nKeep-Alive: timeout=5, max=100\r\n", 1)).await;
            continue;
        }
        wire.send(EVENTS.replacen("\r\n", "\r\nKeep-Alive: timeout=5, max=100\r\n", 1)).await;
        wire.send(chunk("data: 1\n\n")).await;
        return wire.send(END).await;
    }
}

/// As Python's `http.server`: where it knows no path, it does not read the body, and takes it for the next request.
async fn leaves_bodies_unread(mut wire: Wire) {
    while let Some(head) = wire.head_if_any().await {
        if !head.first.ends_with("HTTP/1.1") {
            return wire.send("HTTP/1.1 501 Unsupported method\r\nContent-Length: 0\r\n\r\n").await;
        }
        if !head.first.contains("/v1/embeddings") {
            wire.send(NOT_FOUND).await;
            continue;
        }
        let len = head.field("content-length").unwrap().parse().unwrap();
        wire.bytes(len).await;
        wire.send(answer("{}")).await;
    }
}

async fn status_of(client: &mut Wire) -> u16 {
    client.message().await.0.status()
}

#[test]
fn a_request_right_behind_a_stream_does_not_fail() {
    run(async {
        let Setup { address, engine, backend, .. } = Setup::new("").await;
        tokio::spawn(serve(engine, closes_behind_streams));
        let turns = Effort::of_this_run().cases(16);
        let client = |address: SocketAddr| async move {
            let mut client = Wire::to(address).await;
            for _ in 0..turns {
                client.send(post(STREAM)).await;
                assert_eq!(client.head().await.status(), 200);
                assert_eq!(client.chunk().await.as_deref(), Some("data: 1\n\n"));
                assert_eq!(client.chunk().await, None);
                client.send(post(ASK)).await;
                assert_eq!(status_of(&mut client).await, 200);
            }
        };
        let clients: Vec<_> = (0..16).map(|_| tokio::spawn(client(address))).collect();
        for client in clients {
            client.await.unwrap();
        }
        assert_eq!(backend.seen.borrow().suspects, 0);
    });
}

#[test]
fn a_wrong_path_does_not_break_the_next_request() {
    run(async {
        let Setup { address, engine, .. } = Setup::new("").await;
        tokio::spawn(serve(engine, leaves_bodies_unread));
        let (mut one, mut other) = (Wire::to(address).await, Wire::to(address).await);
        for _ in 0..Effort::of_this_run().cases(50) {
            one.send(post(ASK)).await;
            assert_eq!(status_of(&mut one).await, 404);
            other.send(post_with("/v1/embeddings", "", r#"{"model":"org/one","input":"x"}"#)).await;
            assert_eq!(status_of(&mut other).await, 200);
        }
    });
}

/// Whether the engine sees the second request on the connection of the first.
async fn is_kept(setup: &Setup, first: &str, said: &str) -> bool {
    let mut client = setup.client().await;
    client.send(first).await;
    let mut engine = setup.engine().await;
    engine.message().await;
    engine.send(said).await;
    let head = client.head().await;
    match head.field("content-length") {
        Some(len) => drop(client.bytes(len.parse().unwrap()).await),
        None if head.field("transfer-encoding").is_some() => while client.chunk().await.is_some() {},
        None => {}
    }
    client.send(post(ASK)).await;
    let is_kept = tokio::select! {
        biased;
        // Its end comes first, where it is not kept.
        Some(_) = engine.message_if_any() => true,
        mut fresh = setup.engine() => {
            fresh.message().await;
            fresh.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            false
        }
    };
    if is_kept {
        engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
    }
    assert_eq!(status_of(&mut client).await, 200);
    is_kept
}

#[test]
fn a_connection_is_kept_behind_a_clean_end_of_known_length() {
    run(async {
        let setup = Setup::new("").await;
        let stream = format!("{EVENTS}{}{END}", chunk("data: 1\n\n"));
        let read = "GET /props?model=org/one HTTP/1.1\r\nHost: a\r\n\r\n";
        for (ask, said, kept) in [
            (post(ASK), answer("{}"), true),
            (post(ASK), answer(""), true),
            (read.to_owned(), answer("{}"), true),
            (post(ASK), answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1), false),
            (post(ASK), stream.clone(), false),
            (post(ASK), NOT_FOUND.to_owned(), false),
            (read.to_owned(), NOT_FOUND.to_owned(), false),
            (post(ASK), answer("{}").replacen("200 OK", "500 No", 1), false),
            // Something that nothing has asked for.
            (post(ASK), format!("{}HTTP/1.1 408 Late\r\n\r\n", answer("{}")), false),
        ] {
            assert_eq!(is_kept(&setup, &ask, &said).await, kept, "{said}");
        }
        // Fronts of nodes do neither of what engines do.
        let router = Setup::of_router().await;
        assert!(is_kept(&router, &post(ASK), &stream).await);
        assert!(!is_kept(&router, &post(ASK), NOT_FOUND).await);
    });
}

/// The rest of the body would begin the next request.
#[test]
fn a_connection_whose_request_was_not_sent_whole_is_not_kept() {
    run(async {
        let setup = Setup::new("").await;
        let long = format!("{{\"model\":\"org/one\",\"prompt\":\"{}\"}}", "x".repeat(16 << 20));
        let mut client = setup.asking(&long).await;
        let mut engine = setup.engine().await;
        engine.head().await;
        engine.send(answer("{}")).await;
        assert_eq!(status_of(&mut client).await, 200);
        client.send(post(ASK)).await;
        setup.answered(answer("{}")).await;
        assert_eq!(status_of(&mut client).await, 200);
    });
}

/// A front with one connection to its engine, which is kept. Within `closed`, its break is that of an idle one.
async fn with_kept(lines: &str, closed: Duration) -> (Setup, Wire, Wire) {
    // The connection is still kept on a slow machine.
    let idle = Duration::from_secs(600);
    let setup = Setup::with_timeouts(lines, Timeouts { idle, closed, ..Timeouts::default() }).await;
    let mut client = setup.asking(ASK).await;
    let mut engine = setup.engine().await;
    engine.message().await;
    engine.send(answer("{}")).await;
    assert_eq!(status_of(&mut client).await, 200);
    (setup, client, engine)
}

/// It has read the request, or not: the front cannot know. Behind a long time it has.
#[test]
fn what_breaks_a_kept_connection_is_sent_once_more_if_that_is_safe() {
    run(async {
        let of = |path: &str| post_with(path, "", ASK);
        for (ask, is_safe) in [
            (of("/v1/chat/completions"), true),
            (of("/completion"), true),
            ("GET /props?model=org/one HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), true),
            ("DELETE /engines/org/one/x HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), true),
            // It may be stored, or do anything.
            (of("/v1/responses"), false),
            (of("/v1/images/generations"), false),
            (of("/v1/audio/speech"), false),
            (of("/sdapi/v1/txt2img"), false),
            (of("/jobs"), false),
            (of("/engines/org/one/jobs"), false),
        ] {
            for (closed, is_early) in [(Duration::from_secs(600), true), (Duration::ZERO, false)] {
                let lines = "paths = [\"/jobs\"]\npassthrough = true";
                let (setup, mut client, mut kept) = with_kept(lines, closed).await;
                client.send(&ask).await;
                let first = kept.message().await;
                drop(kept);
                let is_repeated = is_safe && is_early;
                if is_repeated {
                    let mut engine = setup.engine().await;
                    let again = engine.message().await;
                    assert_eq!((first.0.first, first.1), (again.0.first, again.1));
                    // Once: the second connection is new.
                    drop(engine);
                }
                let (head, said) = client.json().await;
                assert_eq!(
                    (head.status(), &said["error"]["code"]),
                    (502, &"engine_broke_off".into()),
                    "{ask}"
                );
                assert_eq!(head.field("retry-after"), Some("1"));
                let seen = (repeats(&setup), setup.backend.seen.borrow().suspects);
                assert_eq!(seen, (usize::from(is_repeated), 1), "{ask}");
            }
        }
    });
}

/// No byte of the request was sent, so any may be sent again.
#[test]
fn a_connection_that_has_been_closed_meanwhile_is_not_used() {
    run(async {
        let (setup, mut client, kept) = with_kept("paths = [\"/jobs\"]", Duration::ZERO).await;
        drop(kept);
        setup.rounds().await;
        client.send(post_with("/jobs", "", ASK)).await;
        setup.answered(answer("{}")).await;
        assert_eq!((status_of(&mut client).await, setup.backend.seen.borrow().suspects), (200, 0));
    });
}

/// It says nothing, or only a head, as servers do whose GPU hangs.
#[test]
fn an_engine_that_sends_no_first_byte_is_late() {
    run(async {
        for said in ["", EVENTS, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"] {
            let Setup { address, engine, backend, .. } = Setup::new("").await;
            *backend.first_byte_max.lock().unwrap() = Some(Duration::from_millis(20));
            let hangs = tokio::spawn(async move {
                let mut wire = Wire::new(engine.accept().await.unwrap().0);
                // It may be late already, on a slow machine.
                if wire.message_if_any().await.is_some() {
                    wire.send(said).await;
                }
                // Its work is of no use any more.
                wire.ended().await
            });
            let mut client = Wire::to(address).await;
            client.send(post(ASK)).await;
            let (head, error) = client.json().await;
            assert_eq!((head.status(), head.field("retry-after")), (504, Some("1")), "{said}");
            assert_eq!(error["error"]["code"], "engine_late");
            assert!(error["error"]["message"].as_str().unwrap().contains("first_byte_max"), "{error}");
            assert_eq!(backend.seen.borrow().suspects, 1);
            hangs.abort();
        }
    });
}

#[test]
fn an_answer_in_time_passes_whole() {
    run(async {
        let setup = Setup::new("").await;
        *setup.backend.first_byte_max.lock().unwrap() = Some(Duration::from_secs(600));
        let mut client = setup.client().await;
        for body in ["", "{}", "{\"a\":1}"] {
            client.send(post(ASK)).await;
            setup.answered(answer(body).replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            let (head, said) = client.message().await;
            assert_eq!((head.status(), said), (200, body.as_bytes().to_vec()));
        }
        client.send(post(STREAM)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        engine.send(chunk("data: 1\n\n")).await;
        assert_eq!(client.head().await.status(), 200);
        assert_eq!(client.chunk().await.as_deref(), Some("data: 1\n\n"));
        // Later ones have all the time they want.
        engine.send(chunk("data: 2\n\n")).await;
        engine.send(END).await;
        assert_eq!(client.chunk().await.as_deref(), Some("data: 2\n\n"));
        assert_eq!(client.chunk().await, None);
        // An engine that breaks off before its first byte has sent none.
        client.send(post(STREAM)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        drop(engine);
        assert_eq!(client.json().await.0.status(), 502);
    });
}

/// Connections that are idle for too long are closed, though no request comes.
#[test]
fn idle_connections_are_closed() {
    run(async {
        let setup =
            Setup::with_timeouts("", Timeouts { idle: Duration::from_millis(20), ..Timeouts::default() })
                .await;
        let mut client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(status_of(&mut client).await, 200);
        assert_eq!(engine.ended().await, b"");
    });
}
