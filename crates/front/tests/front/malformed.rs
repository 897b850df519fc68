//! Clients that send no HTTP, or ambiguous HTTP.

use super::setup::{Setup, answer, post, run};

const ASK: &str = r#"{"model":"org/one"}"#;

#[test]
fn invalid_http_never_reaches_an_engine() {
    run(async {
        let setup = Setup::new("").await;
        let body = format!("\r\n\r\n{ASK}");
        for asked in [
            "\r\n\r\nwhat".to_owned(),
            "GET\r\n\r\n".to_owned(),
            "GET / HTTP/9.9\r\n\r\n".to_owned(),
            "\x16\x03\x01\x02\0\x01\0\x01\u{fc}\x03\x03".to_owned(),
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
            format!("POST /v1/completions HTTP/1.1\r\nHost : a\r\nContent-Length: {}{body}", ASK.len()),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x{body}"),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: +{}{body}", ASK.len()),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1{body}"),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 19\r\nContent-Length: 20{body}"
            ),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999{body}"),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip{body}"),
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip{body}"),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{ASK}"
            ),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{ASK}"
            ),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n13\r\n{ASK}XX0\r\n\r\n"
            ),
            format!("POST /v1/completions HTTP/1.1\r\nContent-Length: {}{body}", ASK.len()),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: {}{body}",
                ASK.len()
            ),
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: \0\r\nContent-Length: {}{body}",
                ASK.len()
            ),
            format!("GET /health HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(5000)),
        ] {
            let mut client = setup.client().await;
            client.send(&asked).await;
            tokio::io::AsyncWriteExt::shutdown(&mut client.stream).await.unwrap();
            let said = String::from_utf8(client.ended().await).unwrap();
            let is_error = said.is_empty() || said.starts_with("HTTP/1.1 4");
            assert!(is_error, "{:?}: {said}", &asked[..asked.len().min(200)]);
        }
        let seen = setup.until(|_| true).await;
        assert_eq!((seen.admitted, seen.waiting), (0, 0));
    });
}

#[test]
fn ambiguous_framing_smuggles_nothing() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        // By its length the body is another one than by its chunks.
        let chunks = format!("{:x}\r\n{ASK}\r\n0\r\n\r\n", ASK.len());
        let lines = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n";
        client.send(format!("{lines}{chunks}")).await;
        tokio::select! {
            // It may be read by its chunks. Then the engine gets that body with a length.
            mut engine = setup.engine() => {
                let (head, body) = engine.message().await;
                assert_eq!((head.field("transfer-encoding"), body.as_slice()), (None, ASK.as_bytes()));
                engine.send(answer("{}")).await;
                assert_eq!(client.message().await.0.status(), 200);
            }
            // Or it is refused.
            (head, _) = client.message() => assert_eq!(head.status(), 400),
        }
        // A second request within the first one's body stays part of that body.
        let inner = post(r#"{"model":"org/one","x":1}"#);
        let outer = format!("{{\"model\":\"org/one\",\"x\":{}}}", serde_json::Value::from(inner));
        let mut client = setup.asking(&outer).await;
        let mut engine = setup.engine().await;
        assert_eq!(engine.message().await.1, outer.as_bytes());
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn requests_that_come_at_once_are_answered_one_after_another() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        let asked: String =
            (0..5).map(|nth| post(&format!("{{\"model\":\"org/one\",\"n\":{nth}}}"))).collect();
        client.send(asked).await;
        for nth in 0..5 {
            // Closed each time, so that it is known which connection is next.
            let mut engine = setup.engine().await;
            assert_eq!(engine.message().await.1, format!("{{\"model\":\"org/one\",\"n\":{nth}}}").as_bytes());
            engine.send(answer(&nth.to_string()).replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            drop(engine);
            assert_eq!(client.message().await.1, nth.to_string().as_bytes());
        }
    });
}

#[test]
fn chunks_of_a_body_are_put_together() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        client.send("POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n").await;
        for byte in ASK.chars() {
            client.send(format!("1;ext=1\r\n{byte}\r\n")).await;
        }
        client.send("0\r\nx: 1\r\n\r\n").await;
        let mut engine = setup.engine().await;
        let (head, body) = engine.message().await;
        assert_eq!((head.field("content-length"), body.as_slice()), (Some("19"), ASK.as_bytes()));
        assert_eq!((head.field("transfer-encoding"), head.field("trailer")), (None, None));
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}
