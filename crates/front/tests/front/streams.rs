//! Streams, and what breaks them off.

use poorwill_front::backend::Refusal;

use super::setup::{END, EVENTS, Setup, Verdict, Wire, answer, chunk, post, run};

const ASK: &str = r#"{"model":"org/one","stream":true}"#;

/// A client and an engine with a stream that has sent one event.
async fn begun(setup: &Setup) -> (Wire, Wire) {
    let mut client = setup.asking(ASK).await;
    let mut engine = setup.engine().await;
    engine.message().await;
    engine.send(EVENTS).await;
    engine.send(chunk("data: 1\n\n")).await;
    assert_eq!(client.head().await.field("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(client.chunks_with(9).await, "data: 1\n\n");
    (client, engine)
}

#[test]
fn streams_are_forwarded_as_they_come() {
    run(async {
        let setup = Setup::new("").await;
        let (mut client, mut engine) = begun(&setup).await;
        // Each chunk is sent after the client has read the one before.
        for nth in 2..50 {
            let event = format!("data: {nth}\r\n: \u{e4}\n\n");
            engine.send(chunk(&event)).await;
            assert_eq!(client.chunk().await.unwrap(), event);
        }
        assert_eq!(setup.until(|_| true).await.running, 1);
        engine.send(END).await;
        assert_eq!(client.chunk().await, None);
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
        // The connection goes on.
        client.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn trailers_are_forwarded_to_clients_that_accept_them() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        client.send(post(ASK).replacen("Host", "TE: trailers\r\nHost", 1)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS.replacen("\r\n", "\r\nTrailer: x-sum\r\n", 1)).await;
        engine.send(chunk("data: 1\n\n")).await;
        engine.send("0\r\nx-sum: 7\r\n\r\n").await;
        client.head().await;
        assert_eq!(client.chunk().await.unwrap(), "data: 1\n\n");
        assert_eq!(client.head().await.field("x-sum"), Some("7"));
    });
}

#[test]
fn a_large_answer_arrives_whole_at_a_slow_reader() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        let large = (0..=250_u8).collect::<Vec<u8>>().repeat((48 << 20) / 251);
        let sent = large.clone();
        let sending = tokio::spawn(async move {
            engine.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", sent.len())).await;
            engine.send(sent).await;
            engine
        });
        let (head, body) = client.message().await;
        assert_eq!(head.status(), 200);
        assert!(body == large, "other bytes");
        sending.await.unwrap();
    });
}

#[test]
fn a_stream_that_the_engine_breaks_off_says_so_and_has_no_end() {
    run(async {
        let setup = Setup::new("").await;
        for (more, before) in [("", ""), ("data: {\"x", "data: {\"x\n\n")] {
            let (mut client, mut engine) = begun(&setup).await;
            if !more.is_empty() {
                engine.send(chunk(more)).await;
                assert_eq!(client.chunk().await.unwrap(), more);
            }
            drop(engine);
            let event = client.chunk().await.unwrap();
            let event = event.strip_prefix(before.strip_prefix(more).unwrap()).unwrap();
            let said: serde_json::Value =
                serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(said["error"]["code"], "engine_broke_off", "{said}");
            assert_eq!(client.ended().await, b"");
        }
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 2);
    });
}

#[test]
fn other_answers_that_break_off_are_incomplete() {
    run(async {
        let setup = Setup::new("").await;
        for head in ["Content-Length: 10", "Transfer-Encoding: chunked"] {
            let mut client = setup.asking(ASK).await;
            let mut engine = setup.engine().await;
            engine.message().await;
            engine.send(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n4\r\n1234\r\n")).await;
            client.head().await;
            client.bytes(7).await;
            drop(engine);
            let rest = String::from_utf8(client.ended().await).unwrap();
            assert!(!rest.contains("0\r\n"), "{rest:?}");
        }
        // For HTTP/1.0 the end of the connection is the end of the answer, so a reset is none.
        let mut client = setup.client().await;
        client.send(post(ASK).replacen("HTTP/1.1", "HTTP/1.0", 1)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n1234\r\n").await;
        client.head().await;
        assert_eq!(client.bytes(4).await, b"1234");
        drop(engine);
        assert_eq!(client.reset().await, std::io::ErrorKind::ConnectionReset);
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 3);
    });
}

#[test]
fn requests_that_have_to_end_are_ended() {
    run(async {
        let setup = Setup::new("").await;
        // A stream without data, one within its events, and one within something else.
        let mut silent = setup.asking(ASK).await;
        let mut silent_engine = setup.engine().await;
        silent_engine.message().await;
        let (mut events, mut events_engine) = begun(&setup).await;
        let mut other = setup.asking(ASK).await;
        let mut other_engine = setup.engine().await;
        other_engine.message().await;
        other_engine.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234").await;
        other.head().await;
        setup.backend.aborted.cancel();
        let (head, body) = silent.json().await;
        assert_eq!((head.status(), head.field("retry-after")), (503, Some("1")), "{body}");
        let event = events.chunk().await.unwrap();
        assert!(event.starts_with("data: {\"error\":") && event.ends_with("}\n\n"), "{event}");
        assert_eq!(events.ended().await, b"");
        assert_eq!(other.ended().await, b"1234");
        for engine in [&mut silent_engine, &mut events_engine, &mut other_engine] {
            assert_eq!(engine.ended().await, b"");
        }
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
    });
}

#[test]
fn an_engine_that_never_pauses_is_ended_too() {
    run(async {
        let setup = Setup::new("").await;
        let (mut client, mut engine) = begun(&setup).await;
        let flood = tokio::spawn(async move {
            use tokio::io::AsyncWriteExt;
            let event = chunk(&format!("data: {}\n\n", "x".repeat(4096)));
            while engine.stream.write_all(event.as_bytes()).await.is_ok() {}
        });
        let mut all = client.chunks_with(1 << 20).await;
        setup.backend.aborted.cancel();
        all += &String::from_utf8(client.ended().await).unwrap();
        assert!(all.contains("\ndata: {\"error\":") && !all.ends_with(END), "it ended without a word");
        flood.await.unwrap();
    });
}

#[test]
fn clients_that_wait_for_a_stream_get_keep_alives() {
    run(async {
        let setup = Setup::new("keep_alive = \"5ms\"").await;
        setup.say(Verdict::Wait);
        let mut client = setup.asking(ASK).await;
        let head = client.head().await;
        assert_eq!(
            (head.status(), head.field("content-type")),
            (200, Some("text/event-stream; charset=utf-8"))
        );
        for _ in 0..3 {
            assert_eq!(client.chunk().await.unwrap(), ": waiting\n\n");
        }
        setup.say(Verdict::Admit);
        let mut engine = setup.engine().await;
        engine.message().await;
        // Also while the engine sends nothing.
        client.chunk().await.unwrap();
        engine.send(EVENTS).await;
        engine.send(chunk("data: 1\n\n")).await;
        let mut event = client.chunk().await.unwrap();
        while event == ": waiting\n\n" {
            event = client.chunk().await.unwrap();
        }
        assert_eq!(event, "data: 1\n\n");
        engine.send(chunk("data: 2\n\n")).await;
        // From now on only the engine's bytes.
        assert_eq!(client.chunk().await.unwrap(), "data: 2\n\n");
        engine.send(END).await;
        assert_eq!(client.chunk().await, None);
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn a_stream_that_never_begins_ends_with_an_error() {
    run(async {
        let setup = Setup::new("keep_alive = \"5ms\"").await;
        let bad = "{\"error\": {\n\"message\": \"too long\"}}";
        for (said, code) in [
            (None, "no_room"),
            (Some(answer(bad).replacen("200 OK", "400 Bad", 1)), ""),
            (Some(answer("odd")), "engine_error"),
        ] {
            setup.say(Verdict::Wait);
            let mut client = setup.asking(ASK).await;
            client.head().await;
            client.chunk().await.unwrap();
            match &said {
                None => setup.refuse(Refusal::NoMemory, None),
                Some(said) => {
                    setup.say(Verdict::Admit);
                    let mut engine = setup.engine().await;
                    engine.message().await;
                    engine.send(said).await;
                }
            }
            let mut event = client.chunk().await.unwrap();
            while event == ": waiting\n\n" {
                event = client.chunk().await.unwrap();
            }
            assert_eq!(event.trim_end().lines().count(), 1, "{event}");
            let event: serde_json::Value =
                serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
            match code {
                "" => assert_eq!(event, serde_json::from_str::<serde_json::Value>(bad).unwrap()),
                code => assert_eq!(event["error"]["code"], code, "{event}"),
            }
            assert_eq!(client.chunk().await, None);
            setup.until(|seen| seen.running == 0 && seen.waiting == 0).await;
        }
    });
}

#[test]
fn a_client_without_stream_gets_none() {
    run(async {
        let setup = Setup::new("keep_alive = \"1ms\"").await;
        setup.say(Verdict::Wait);
        let mut client = setup.asking(r#"{"model":"org/one","stream":false}"#).await;
        setup.until(|seen| seen.waiting == 1).await;
        setup.refuse(Refusal::WaitedTooLong, None);
        assert_eq!(client.message().await.0.status(), 503);
    });
}
