//! WebSockets: their handshake, bytes both ways, and what ends them.

use std::time::Duration;

use poorwill_front::backend::Refusal;
use poorwill_front::proxy::Timeouts;
use tokio::io::AsyncWriteExt as _;

use super::setup::{Head, Setup, Verdict, Wire, last_answer, post, run};

const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: accepted\r\nServer: engine\r\n\r\n";
const ASK: &str = "/v1/realtime?model=org/one";
const HELLO: [u8; 4] = [0x81, 2, b'h', b'i'];

fn opening(path: &str, lines: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: front\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a2V5\r\n{lines}\r\n"
    )
}

/// Both ends of a WebSocket, and what the engine was asked.
async fn open(setup: &Setup, path: &str, lines: &str) -> (Wire, Wire, Head) {
    let mut client = setup.client().await;
    client.send(opening(path, lines)).await;
    let mut engine = setup.engine().await;
    let asked = engine.head().await;
    engine.send(SWITCH).await;
    let head = client.head().await;
    assert_eq!((head.status(), head.field("sec-websocket-accept")), (101, Some("accepted")));
    assert_eq!((head.field("upgrade"), head.field("connection")), (Some("websocket"), Some("Upgrade")));
    assert_eq!(head.field("server"), None);
    (client, engine, asked)
}

async fn refused(setup: &Setup, head: &str) -> (Head, serde_json::Value) {
    let mut client = setup.client().await;
    client.send(head).await;
    client.json().await
}

#[test]
fn bytes_pass_until_both_ends_have_closed() {
    run(async {
        let setup = Setup::new("").await;
        let (mut client, mut engine, asked) =
            open(&setup, "/v1/realtime?x=1&model=lar%67e", "X-Other: kept\r\nCookie: a=b\r\n").await;
        assert_eq!(asked.first, "GET /v1/realtime?x=1&model=/models/%22two%22 HTTP/1.1");
        for (name, value) in [
            ("upgrade", Some("websocket")),
            ("connection", Some("Upgrade")),
            ("sec-websocket-version", Some("13")),
            ("sec-websocket-key", Some("a2V5")),
            ("x-other", Some("kept")),
            ("cookie", None),
        ] {
            assert_eq!(asked.field(name), value, "{name}");
        }
        for nth in 0..100 {
            let bytes = vec![nth; 3000];
            client.send(&bytes).await;
            assert_eq!(engine.bytes(3000).await, bytes);
            engine.send(&bytes).await;
            assert_eq!(client.bytes(3000).await, bytes);
        }
        let (now, count) = setup.backend.requests.active(9);
        assert_eq!((count, now[0].model.as_deref(), now[0].bytes), (1, Some("two"), 300_000));
        assert_eq!(setup.until(|_| true).await.running, 1);
        // Each end closes its own direction.
        client.stream.shutdown().await.unwrap();
        assert_eq!(engine.ended().await, b"");
        engine.send(HELLO).await;
        assert_eq!(client.bytes(4).await, HELLO);
        drop(engine);
        assert_eq!(client.ended().await, b"");
        let seen = setup.until(|seen| seen.running == 0).await;
        assert_eq!((seen.admitted, seen.suspects), (1, 0));
    });
}

#[test]
fn bytes_right_behind_a_handshake_are_not_lost() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        client.send([opening(ASK, "").as_bytes(), &HELLO].concat()).await;
        let mut engine = setup.engine().await;
        engine.head().await;
        engine.send([SWITCH.as_bytes(), &HELLO].concat()).await;
        client.head().await;
        assert_eq!(client.bytes(4).await, HELLO);
        assert_eq!(engine.bytes(4).await, HELLO);
        drop(client);
        assert_eq!(engine.ended().await, b"");
        drop(engine);
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn a_websocket_waits_for_its_model() {
    run(async {
        let setup = Setup::new("requests_max = 1").await;
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        client.send(opening(ASK, "")).await;
        setup.until(|seen| seen.waiting == 1).await;
        assert_eq!(refused(&setup, &opening(ASK, "")).await.0.status(), 429);
        setup.refuse(Refusal::WaitedTooLong, None);
        assert_eq!(client.json().await.1["error"]["code"], "waited_too_long");
        setup.say(Verdict::Wait);
        client.send(opening(ASK, "")).await;
        setup.until(|seen| seen.waiting == 1).await;
        drop(client);
        setup.until(|seen| seen.gave_up == 1).await;
        setup.say(Verdict::Admit);
        // Its place may be free a little later.
        let (client, engine) = loop {
            let mut client = setup.client().await;
            client.send(opening(ASK, "")).await;
            tokio::select! {
                mut engine = setup.engine() => {
                    engine.head().await;
                    engine.send(SWITCH).await;
                    client.head().await;
                    break (client, engine);
                }
                (head, _) = client.message() => assert_eq!(head.status(), 429),
            }
        };
        // An open one takes a place.
        assert_eq!(refused(&setup, &post("{}")).await.0.status(), 429);
        drop((client, engine));
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn an_open_websocket_takes_a_connection() {
    run(async {
        let setup = Setup::new("connections_max = 1").await;
        let (client, engine, _) = open(&setup, ASK, "").await;
        let mut second = setup.client().await;
        second.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(setup.until(|_| true).await.running, 1);
        drop((client, engine));
        assert_eq!(second.message().await.0.status(), 200);
    });
}

#[test]
fn a_model_that_leaves_ends_its_websockets() {
    run(async {
        let timeouts = Timeouts { reader: Duration::from_millis(50), ..Timeouts::default() };
        let setup = Setup::with_timeouts("", timeouts).await;
        let (mut client, mut engine, _) = open(&setup, ASK, "").await;
        engine.send(HELLO).await;
        assert_eq!(client.bytes(4).await, HELLO);
        setup.backend.aborted.cancel();
        assert_eq!(engine.ended().await, b"");
        // At once, though the client has not closed.
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
        let last = client.ended().await;
        assert_eq!((last[0], &last[2..4]), (0x88, &1013_u16.to_be_bytes()[..]), "{last:?}");
    });
}

#[test]
fn an_operator_ends_a_websocket() {
    run(async {
        let setup = Setup::new("").await;
        let (mut client, mut engine, _) = open(&setup, ASK, "X-Request-Id: it\r\n").await;
        assert_eq!(setup.backend.requests.cancel("it"), 1);
        assert_eq!(engine.ended().await, b"");
        let last = client.ended().await;
        assert_eq!((last[0], &last[2..4]), (0x88, &1001_u16.to_be_bytes()[..]), "{last:?}");
        assert!(last.ends_with(b"an operator cancelled it"), "{last:?}");
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
    });
}

#[test]
fn a_websocket_without_data_is_closed() {
    run(async {
        let setup = Setup::new("websocket_idle_max = \"20ms\"").await;
        let (mut client, mut engine, _) = open(&setup, ASK, "").await;
        let last = client.ended().await;
        assert_eq!((last[0], &last[2..4]), (0x88, &1001_u16.to_be_bytes()[..]), "{last:?}");
        assert_eq!(engine.ended().await, b"");
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn open_websockets_end_before_the_front_does() {
    run(async {
        let setup = Setup::new("").await;
        let (mut client, mut engine, _) = open(&setup, ASK, "").await;
        setup.shutdown.cancel();
        client.send(HELLO).await;
        assert_eq!(engine.bytes(4).await, HELLO);
        assert!(!setup.served.is_finished());
        drop((client, engine));
        setup.served.await.unwrap().unwrap();
        // One that is broken off takes its connections with it.
        let setup = Setup::new("").await;
        let (mut client, mut engine, _) = open(&setup, ASK, "").await;
        setup.served.abort();
        client.ended().await;
        engine.ended().await;
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn an_engine_may_refuse_or_break_off() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        client.send(opening(ASK, "")).await;
        let mut engine = setup.engine().await;
        engine.head().await;
        engine.send(last_answer("{\"said\":1}").replacen("200 OK", "403 Forbidden", 1)).await;
        let (head, said) = client.json().await;
        assert_eq!((head.status(), &said["said"]), (403, &1.into()));
        drop(engine);
        client.send(opening(ASK, "")).await;
        let mut engine = setup.engine().await;
        engine.head().await;
        drop(engine);
        assert_eq!(client.json().await.1["error"]["code"], "engine_broke_off");
        let (mut client, engine, _) = open(&setup, ASK, "").await;
        engine.stream.set_zero_linger().unwrap();
        drop(engine);
        assert_eq!(client.ended().await, b"");
        setup.until(|seen| seen.suspects == 2).await;
        let mut client = setup.client().await;
        // A switch without a request for it is no answer.
        client.send(post(r#"{"model":"two"}"#)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(SWITCH).await;
        assert_eq!(client.json().await.0.status(), 502);
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 3);
    });
}

#[test]
fn keys_may_be_subprotocols_and_reach_no_engine() {
    run(async {
        let setup = Setup::new("keys = [\"env:ONE\"]").await;
        let protocols = |all: &str| format!("Sec-WebSocket-Protocol: {all}\r\n");
        let offered = protocols("realtime, openai-insecure-api-key.key-of-ONE, openai-beta.realtime-v1");
        let mut client = setup.client().await;
        client.send(opening(ASK, &offered)).await;
        let mut engine = setup.engine().await;
        let asked = engine.head().await;
        assert_eq!(asked.field("sec-websocket-protocol"), Some("realtime, openai-beta.realtime-v1"));
        assert!(!format!("{asked:?}").contains("key-of"), "{asked:?}");
        engine.send(SWITCH).await;
        // Browsers fail if no protocol is chosen.
        assert_eq!(client.head().await.field("sec-websocket-protocol"), Some("realtime"));
        let (client, mut engine, asked) = open(&setup, ASK, "Authorization: Bearer key-of-ONE\r\n").await;
        assert_eq!(asked.field("authorization"), None);
        drop(client);
        engine.ended().await;
        for lines in [
            "",
            &protocols("realtime"),
            &protocols("openai-insecure-api-key.key-of-TWO"),
            &format!(
                "{}Authorization: Bearer key-of-TWO\r\n",
                protocols("openai-insecure-api-key.key-of-ONE")
            ),
        ] {
            assert_eq!(refused(&setup, &opening(ASK, lines)).await.0.status(), 401, "{lines}");
        }
    });
}

#[test]
fn what_is_no_right_handshake_is_refused() {
    run(async {
        let setup = Setup::new("paths = [\"/v1/speech/\"]").await;
        let right = opening(ASK, "");
        for (text, status, word) in [
            (opening("/v1/realtime", ""), 400, "?model=NAME"),
            (opening("/v1/realtime?model=", ""), 400, "empty"),
            (opening("/v1/realtime?model=two&model=two", ""), 400, "?model=NAME"),
            (opening("/v1/realtime?model=three", ""), 404, "three"),
            (opening("/v1/speech/x?model=three", ""), 404, "three"),
            (opening("/v1/speech/../sleep?model=two", ""), 400, "not supported at this path"),
            (opening("/v1/chat/completions?model=two", ""), 400, "not supported at this path"),
            (opening("/sleep?model=two", ""), 400, "not supported at this path"),
            (right.replace("Version: 13", "Version: 8"), 426, "13"),
            (right.replace("Sec-WebSocket-Version: 13\r\n", ""), 426, "13"),
            (right.replace("Sec-WebSocket-Key: a2V5\r\n", ""), 400, "Key"),
            (right.replace("keep-alive, Upgrade", "keep-alive"), 400, "Connection"),
            (right.replace("Upgrade: websocket\r\n", ""), 426, "WebSockets"),
            (right.replace("GET", "POST").replace("\r\n\r\n", "\r\nContent-Length: 0\r\n\r\n"), 405, "GET"),
            (right.replace("HTTP/1.1", "HTTP/1.0"), 400, "HTTP/1.1"),
        ] {
            let (head, said) = refused(&setup, &text).await;
            assert_eq!(head.status(), status, "{text}: {said}");
            assert!(said["error"]["message"].as_str().unwrap().contains(word), "{said}");
            let is_asked = head.field("sec-websocket-version") == Some("13")
                && head.field("upgrade") == Some("websocket");
            assert_eq!(is_asked, status == 426, "{head:?}");
        }
        let local = Setup::local("").await;
        let (head, said) = refused(
            &local,
            &right.replace("front", "localhost").replace("\r\n\r\n", "\r\nOrigin: http://x.example\r\n\r\n"),
        )
        .await;
        assert_eq!((head.status(), &said["error"]["code"]), (403, &"forbidden_origin".into()));
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}
