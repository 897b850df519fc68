//! Errors that clients get.

use std::sync::Arc;
use std::time::Duration;

use poorwill_front::backend::Refusal;

use super::setup::{EVENTS, Setup, Verdict, Wire, answer, chunk, post, post_with, run};

const TOO_LARGE: Refusal = Refusal::TooLarge { need_bytes: 90 << 30, total_bytes: 80 << 30 };
const ASK_ONE: &str = r#"{"model":"org/one","prompt":"x"}"#;

#[test]
fn refusals_have_their_status_and_retry_after() {
    run(async {
        let setup = Setup::new("").await;
        for (refusal, retry_after, status, seconds) in [
            (Refusal::WaitedTooLong, Some(Duration::ZERO), 503, "1"),
            (Refusal::Quarantined, Some(Duration::from_millis(4001)), 503, "5"),
            (Refusal::NoMemory, Some(Duration::from_secs(7)), 503, "7"),
            (TOO_LARGE, Some(Duration::from_secs(8)), 503, "8"),
            (Refusal::NotStarted, Some(Duration::from_secs(7)), 503, "7"),
            (Refusal::ShuttingDown, None, 503, "1"),
        ] {
            setup.refuse(refusal, retry_after);
            let (head, body) = setup.asking(ASK_ONE).await.json().await;
            assert_eq!((head.status(), head.field("retry-after")), (status, Some(seconds)), "{refusal:?}");
            assert!(
                body["error"]["code"].is_string()
                    && body["error"]["message"].as_str().unwrap().contains("org/one")
            );
            let names_sizes = body.to_string().contains("needs 90 GiB of a GPU that has 80 GiB");
            assert_eq!(names_sizes, refusal == TOO_LARGE, "{body}");
        }
        assert_eq!(setup.until(|seen| seen.waiting == 0).await.admitted, 0);
    });
}

#[test]
fn bodies_that_ask_for_nothing_are_refused() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        for (body, status) in [
            ("", 400),
            ("{", 400),
            ("[]", 400),
            ("{}", 400),
            (r#"{"model":1}"#, 400),
            (r#"{"model":"two","model":"two"}"#, 400),
            (r#"{"model":"two"}{"model":"two"}"#, 400),
            (r#"{"model":"three"}"#, 404),
        ] {
            client.send(post(body)).await;
            let (head, said) = client.json().await;
            assert_eq!((head.status(), &said["error"]["param"]), (status, &"model".into()), "{body}: {said}");
            if status == 404 {
                let message = said["error"]["message"].as_str().unwrap();
                assert!(message.contains("org/one") && message.contains("two"), "{message}");
            }
        }
        for lines in ["Content-Encoding: gzip\r\n", "Content-Type: multipart/mixed; boundary=x\r\n"] {
            let mut client = setup.client().await;
            let asked = post_with("/v1/audio/transcriptions", lines, ASK_ONE);
            client.send(asked.replacen("Content-Type: application/json\r\n", "", 1)).await;
            assert_eq!(client.json().await.0.status(), 415, "{lines}");
        }
        for (path, kind, words) in [
            ("/v1/audio/transcriptions", "multipart/form-data; boundary=\"a b\"", "one `boundary`"),
            ("/v1/embeddings", "multipart/form-data; boundary=B", "/v1/audio/transcriptions"),
        ] {
            let mut client = setup.client().await;
            let typed = format!("Content-Type: {kind}\r\n");
            client
                .send(post_with(path, "", ASK_ONE).replacen("Content-Type: application/json\r\n", &typed, 1))
                .await;
            let (head, said) = client.json().await;
            let message = said["error"]["message"].as_str().unwrap();
            assert!(head.status() == 415 && message.contains(words), "{message}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}

#[test]
fn oversized_requests_are_refused() {
    run(async {
        let setup = Setup::new("body_max = 64\nhead_max = 8192").await;
        // No byte of the body is sent, and the answer comes.
        let mut client = setup.client().await;
        client.send("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 65\r\n\r\n").await;
        assert_eq!(client.json().await.0.status(), 413);
        // A client that goes on sending gets it, too.
        let mut client = setup.client().await;
        client.send("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n").await;
        client.send(vec![b' '; 1 << 20]).await;
        assert_eq!(client.json().await.0.status(), 413);
        // A body without a length.
        let mut client = setup.client().await;
        client.send("POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n").await;
        client.send(format!("40\r\n{}\r\n1\r\n \r\n", " ".repeat(64))).await;
        assert_eq!(client.json().await.0.status(), 413);
        let mut client = setup.client().await;
        client.send(format!("GET /health HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(8192))).await;
        assert_eq!(client.json().await.0.status(), 431);
        let mut client = setup.client().await;
        client.send(format!("GET /health HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(100_000))).await;
        assert_eq!(client.head().await.status(), 431);
        // At the limit.
        let mut client = setup.asking(&format!("{{\"model\":\"two\"{}}}", " ".repeat(49))).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn no_more_requests_are_here_than_may_be() {
    run(async {
        let setup = Setup::new("requests_max = 2").await;
        setup.say(Verdict::Wait);
        let mut waiting = setup.asking(ASK_ONE).await;
        let gone = setup.asking(ASK_ONE).await;
        setup.until(|seen| seen.waiting == 2).await;
        let (head, body) = setup.asking(ASK_ONE).await.json().await;
        assert_eq!((head.status(), head.field("retry-after")), (429, Some("2")), "{body}");
        // The list of models needs no permit.
        let mut client = setup.client().await;
        client.send("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.message().await.0.status(), 200);
        drop(gone);
        setup.until(|seen| seen.waiting == 1).await;
        setup.say(Verdict::Admit);
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n12").await;
        assert_eq!(waiting.head().await.status(), 200);
        // With its answer half sent, the request still counts; the limit is the current one.
        let mut fewer = (**setup.backend.front.lock().unwrap()).clone();
        fewer.requests_max = 1;
        *setup.backend.front.lock().unwrap() = Arc::new(fewer);
        assert_eq!(setup.asking(ASK_ONE).await.json().await.0.status(), 429);
        engine.send("34").await;
        assert_eq!(waiting.bytes(4).await, b"1234");
        setup.until(|seen| seen.running == 0).await;
        // Its permit is released right after the backend saw its end.
        loop {
            setup.refuse(Refusal::NoMemory, None);
            if setup.asking(ASK_ONE).await.json().await.0.status() == 503 {
                break;
            }
        }
    });
}

#[test]
fn an_engine_that_is_not_there_is_suspect() {
    run(async {
        let setup = Setup::new("").await;
        // It breaks off before its answer.
        let mut client = setup.asking(ASK_ONE).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        drop(engine);
        let (head, body) = client.json().await;
        assert_eq!(head.status(), 502, "{body}");
        assert!(head.field("x-request-id").is_some());
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 1);
        // Its answer is no HTTP.
        let mut client = setup.asking(ASK_ONE).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send("what?\r\n\r\n").await;
        assert_eq!(client.json().await.0.status(), 502);
        // It refuses connections.
        let Setup { engine, backend, address, .. } = setup;
        drop(engine);
        let mut client = Wire::to(address).await;
        client.send(post(ASK_ONE)).await;
        let (head, body) = client.json().await;
        assert_eq!((head.status(), &body["error"]["code"]), (502, &"engine_unreachable".into()));
        assert!(!body.to_string().contains("127.0.0.1"), "{body}");
        assert_eq!(backend.seen.borrow().suspects, 3);
    });
}

/// Checks that this is an error of Anthropic's format and kind.
fn check_anthropic(error: &serde_json::Value, kind: &str) {
    assert_eq!((&error["type"], &error["error"]["type"]), (&"error".into(), &kind.into()), "{error}");
    assert!(error["error"]["message"].is_string(), "{error}");
}

#[test]
fn clients_of_anthropic_get_its_errors() {
    run(async {
        let setup = Setup::new("keys = [\"env:ONE\"]\nbody_max = 64").await;
        let key = "x-api-key: key-of-ONE\r\n";
        let long = format!("{{\"model\":\"two\"{}}}", " ".repeat(64));
        for (path, lines, body, status, kind) in [
            ("/v1/messages", "", ASK_ONE, 401, "authentication_error"),
            ("/v1/messages", key, "{}", 400, "invalid_request_error"),
            ("/v1/messages", key, r#"{"model":"three"}"#, 404, "not_found_error"),
            ("/v1/messages/other", key, ASK_ONE, 404, "not_found_error"),
            ("/v1/messages/count_tokens", key, &long, 413, "request_too_large"),
            ("/v1/messages", key, ASK_ONE, 429, "rate_limit_error"),
        ] {
            setup.refuse(Refusal::QueueFull, None);
            let mut client = setup.client().await;
            client.send(post_with(path, lines, body)).await;
            let (head, error) = client.json().await;
            assert_eq!(head.status(), status, "{error}");
            check_anthropic(&error, kind);
        }
        setup.refuse(Refusal::NoMemory, None);
        let mut client = setup.client().await;
        client.send(post_with("/v1/messages", key, ASK_ONE)).await;
        let (head, error) = client.json().await;
        assert_eq!((head.status(), head.field("retry-after")), (503, Some("1")));
        check_anthropic(&error, "overloaded_error");
    });
}

/// The JSON of an error event, after keep-alive comments.
async fn error_event(client: &mut Wire) -> serde_json::Value {
    loop {
        let event = client.chunk().await.expect("an error event");
        if let Some(data) = event.trim_start().strip_prefix("event: error\ndata: ") {
            return serde_json::from_str(data).unwrap();
        }
        assert_eq!(event, ": waiting\n\n");
    }
}

#[test]
fn streams_of_anthropic_end_with_its_error_event() {
    run(async {
        let setup = Setup::new("keep_alive = \"10ms\"").await;
        let body = r#"{"model":"org/one","stream":true}"#;
        // While it waits.
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        client.send(post_with("/v1/messages", "", body)).await;
        assert_eq!(client.head().await.status(), 200);
        assert_eq!(client.chunk().await.unwrap(), ": waiting\n\n");
        setup.refuse(Refusal::QueueFull, None);
        check_anthropic(&error_event(&mut client).await, "rate_limit_error");
        // By the engine, in another format.
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        client.send(post_with("/v1/messages", "", body)).await;
        assert_eq!(client.head().await.status(), 200);
        setup.say(Verdict::Admit);
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer(r#"{"error":{"message":"why"}}"#).replace("200 OK", "400 Bad")).await;
        let error = error_event(&mut client).await;
        check_anthropic(&error, "invalid_request_error");
        assert!(error["error"]["message"].as_str().unwrap().contains("why"), "{error}");
        drop(engine);
        // Amid an answer.
        let mut client = setup.client().await;
        client.send(post_with("/v1/messages", "", body)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(format!("{EVENTS}{}", chunk("event: ping\ndata: {}"))).await;
        client.head().await;
        assert_eq!(client.chunks_with(20).await, "event: ping\ndata: {}");
        drop(engine);
        let error = client.chunk().await.unwrap();
        let data = error.strip_prefix("\n\nevent: error\ndata: ").unwrap();
        check_anthropic(&serde_json::from_str(data).unwrap(), "api_error");
    });
}
