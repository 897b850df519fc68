//! Which requests go where, and with which headers.

use std::time::Duration;

use poorwill_front::proxy::Timeouts;

use super::setup::{Setup, Verdict, answer, post, post_with, run, run_on_one_thread};

const ASK_ONE: &str = r#"{"model":"org/one","prompt":"x"}"#;

#[test]
fn requests_go_to_their_engine_and_answers_come_back() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        for (model, wanted) in [
            ("org/one", "org/one"),
            ("small", "org/one"),
            ("two", r#"/models/\"two\""#),
            ("large", r#"/models/\"two\""#),
        ] {
            client
                .send(post_with("/v1/completions?x=a%20b", "", &format!(" {{ \"model\" : \"{model}\"}}\n")))
                .await;
            let mut engine = setup.engine().await;
            exchange(&mut engine, &mut client, wanted).await;
        }
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 4);
    });
}

async fn exchange(engine: &mut super::setup::Wire, client: &mut super::setup::Wire, wanted: &str) {
    let (head, body) = engine.message().await;
    assert_eq!(head.first, "POST /v1/completions?x=a%20b HTTP/1.1");
    assert_eq!(String::from_utf8(body).unwrap(), format!(" {{ \"model\" : \"{wanted}\"}}\n"));
    // The next request comes on another connection.
    engine.send(answer("{\"is\": 1}\n").replace("200 OK", "418 Teapot\r\nConnection: close")).await;
    let (head, body) = client.message().await;
    assert_eq!((head.status(), body.as_slice()), (418, "{\"is\": 1}\n".as_bytes()));
}

#[test]
fn connections_to_an_engine_are_used_again() {
    run_on_one_thread(async {
        let idle = Duration::from_secs(600);
        let setup = Setup::with_timeouts("", Timeouts { idle, ..Timeouts::default() }).await;
        let mut client = setup.asking(ASK_ONE).await;
        let mut engine = setup.engine().await;
        for _ in 0..3 {
            engine.message().await;
            engine.send(answer("{}")).await;
            assert_eq!(client.message().await.0.status(), 200);
            // By now the connection is ready for reuse.
            setup.rounds().await;
            client.send(post(ASK_ONE)).await;
        }
        engine.message().await;
    });
}

#[test]
fn hop_by_hop_headers_and_keys_are_not_forwarded() {
    run(async {
        let setup = Setup::new("keys = [\"env:ONE\"]").await;
        let mut client = setup.client().await;
        let lines = "Authorization: Bearer key-of-ONE\r\nConnection: x-hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n\
                     TE: trailers\r\nProxy-Authorization: x\r\nX-Other: kept\r\nExpect: 100-continue\r\n\
                     X-Request-Id: my-id\r\ntracestate: a=b\r\n\
                     traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00\r\n";
        client.send(post_with("/v1/completions", lines, ASK_ONE)).await;
        let mut engine = setup.engine().await;
        let (head, _) = engine.message().await;
        for name in [
            "authorization",
            "connection",
            "x-hop",
            "keep-alive",
            "te",
            "proxy-authorization",
            "expect",
            "upgrade",
        ] {
            assert_eq!(head.field(name), None, "{head:?}");
        }
        assert_eq!(head.field("x-other"), Some("kept"));
        assert_eq!(head.field("x-request-id"), Some("my-id"));
        assert_eq!(head.field("tracestate"), Some("a=b"));
        assert_eq!(head.field("host"), Some(setup.engine.local_addr().unwrap().to_string().as_str()));
        let trace = head.field("traceparent").unwrap();
        assert!(
            trace.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && trace.ends_with("-00"),
            "{trace}"
        );
        assert!(!trace.contains("00f067aa0ba902b7"), "{trace}");
        let lines = "Server: uvicorn\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nX-Other: kept\r\nContent-Length: 2\r\n";
        engine.send(format!("HTTP/1.1 200 OK\r\n{lines}\r\n{{}}")).await;
        assert_eq!(client.head().await.status(), 100);
        let (head, body) = client.message().await;
        assert_eq!(body, b"{}");
        for name in ["server", "x-hop", "keep-alive"] {
            assert_eq!(head.field(name), None, "{head:?}");
        }
        assert_eq!(head.field("x-other"), Some("kept"));
        assert_eq!(head.field("x-request-id"), Some("my-id"));
    });
}

#[test]
fn an_offer_of_another_protocol_is_ignored() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        for lines in [
            // As Java's client does by default.
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
            "Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
            "Connection: upgrade\r\nUpgrade: TLS/1.2\r\n",
        ] {
            client.send(post_with("/v1/chat/completions", lines, ASK_ONE)).await;
            let mut engine = setup.engine().await;
            let (head, body) = engine.message().await;
            assert_eq!(body, ASK_ONE.as_bytes());
            for name in ["connection", "upgrade", "http2-settings"] {
                assert_eq!(head.field(name), None, "{head:?}");
            }
            engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            assert_eq!(client.message().await.0.status(), 200, "{lines}");
        }
    });
}

#[test]
fn keys_and_cookies_stay_between_a_client_and_the_front() {
    run(async {
        for keys in ["", "keys = [\"env:ONE\"]"] {
            let setup = Setup::new(keys).await;
            let mut client = setup.client().await;
            let lines = "Authorization: Bearer key-of-ONE\r\nx-api-key: key-of-ONE\r\napi-key: key-of-ONE\r\n\
                         Proxy-Authorization: Basic eDp5\r\nCookie: s=1\r\nCookie: t=2\r\nX-Other: kept\r\n";
            client.send(post_with("/v1/messages", lines, ASK_ONE)).await;
            let mut engine = setup.engine().await;
            let (head, _) = engine.message().await;
            for name in ["authorization", "x-api-key", "api-key", "proxy-authorization", "cookie"] {
                assert_eq!(head.field(name), None, "{head:?}");
            }
            assert_eq!(head.field("x-other"), Some("kept"));
            let lines = "Set-Cookie: s=2\r\nset-cookie: t=3\r\nX-Other: kept\r\nContent-Length: 2\r\n";
            engine.send(format!("HTTP/1.1 200 OK\r\n{lines}\r\n{{}}")).await;
            let (head, _) = client.message().await;
            assert_eq!((head.field("set-cookie"), head.field("x-other")), (None, Some("kept")));
        }
    });
}

#[test]
fn all_models_are_listed_also_those_that_sleep() {
    run(async {
        let setup = Setup::new("").await;
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        client.send("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let (head, all) = client.json().await;
        assert_eq!((head.status(), head.field("content-type")), (200, Some("application/json")));
        assert_eq!((&all["object"], all["data"].as_array().unwrap().len()), (&"list".into(), 4));
        let two = all["data"][2].clone();
        assert_eq!((&two["id"], &two["object"]), (&"two".into(), &"model".into()));
        assert!(two["created"].is_u64() && two["owned_by"].is_string());
        assert_eq!(two["poorwill"], serde_json::json!({"ready": false, "stage": "asleep"}));
        let large = &all["data"][3];
        let own = serde_json::json!({"ready": false, "stage": "asleep", "alias_of": "two"});
        assert_eq!((&large["id"], &large["poorwill"]), (&"large".into(), &own));
        for (path, id) in [
            ("two", "two"),
            ("large", "large"),
            ("org/one", "org/one"),
            ("org%2Fone", "org/one"),
            ("small", "small"),
        ] {
            client.send(format!("GET /v1/models/{path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
            let (head, one) = client.json().await;
            assert_eq!((head.status(), &one["id"]), (200, &id.into()), "{path}");
        }
        client.send("GET /v1/models/three HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.json().await.0.status(), 404);
        client.send("HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let head = client.head().await;
        assert_eq!((head.status(), head.field("content-length").is_some()), (200, true));
        client.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn nothing_else_of_an_engine_is_reached() {
    run(async {
        let setup = Setup::new("").await;
        let tries = [
            ("POST", "/sleep", 404),
            ("POST", "/wake_up", 404),
            ("POST", "/collective_rpc", 404),
            ("GET", "/metrics", 404),
            ("GET", "/", 404),
            ("POST", "/v1", 404),
            ("POST", "/V1/completions", 404),
            ("POST", "//v1/completions", 404),
            ("POST", "/v1/", 400),
            ("POST", "/v1//sleep", 400),
            ("POST", "/v1/../sleep", 400),
            ("POST", "/v1/./sleep", 400),
            ("POST", "/v1/%2e%2e/sleep", 400),
            ("POST", "/v1/..%2fsleep", 400),
            ("POST", "/v1/a%5c..%5csleep", 400),
            ("POST", "/v1/%252e%252e/sleep", 400),
            ("POST", "/v1/a\\..\\sleep", 400),
            ("POST", "http://elsewhere/v1/completions", 400),
            ("POST", "https://front/v1/completions", 400),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models/two", 405),
            ("PUT", "/v1/completions", 405),
            ("OPTIONS", "/v1/completions", 405),
            ("TRACE", "/v1/completions", 405),
            ("CONNECT", "front:80", 405),
        ];
        for (method, path, status) in tries {
            let mut client = setup.client().await;
            client.send(post_with(path, "", ASK_ONE).replacen("POST", method, 1)).await;
            let (head, body) = client.json().await;
            assert_eq!(head.status(), status, "{method} {path}: {body}");
            assert!(body["error"]["message"].is_string() && body["error"]["type"].is_string(), "{body}");
            assert!(head.field("x-request-id").is_some());
            assert_eq!(head.field("allow").is_some(), status == 405);
        }
        let mut client = setup.client().await;
        for offered in ["websocket", "h2c, WebSocket", "websocket/13"] {
            let lines = format!("Connection: Upgrade\r\nUpgrade: {offered}\r\n");
            client.send(post_with("/v1/completions", &lines, ASK_ONE)).await;
            let (head, body) = client.json().await;
            assert_eq!(head.status(), 400, "{offered}");
            assert!(body["error"]["message"].as_str().unwrap().contains("WebSocket"), "{body}");
        }
        client.send(post_with("http://front/v1/completions", "", ASK_ONE)).await;
        // Only the last was for the engine, and is the first that it gets.
        assert_eq!(setup.engine().await.message().await.0.first, "POST /v1/completions HTTP/1.1");
        assert_eq!(setup.until(|_| true).await.admitted, 1);
    });
}

#[test]
fn a_client_with_a_key_is_accepted() {
    run(async {
        let setup = Setup::new("keys = [\"env:ONE\", \"env:TWO\"]").await;
        let mut client = setup.client().await;
        for (given, is_right) in [
            ("", false),
            ("Authorization: Bearer key-of-ONE\r\n", true),
            ("Authorization: bearer key-of-TWO\r\n", true),
            ("Authorization: Bearer key-of-THREE\r\n", false),
            ("Authorization: Bearer key-of-ON\r\n", false),
            ("Authorization: Basic key-of-ONE\r\n", false),
            ("Authorization: key-of-ONE\r\n", false),
            ("Authorization: Bearer\r\n", false),
            ("Authorization: Bearer key-of-ONE\r\nAuthorization: Bearer key-of-TWO\r\n", false),
            ("x-api-key: key-of-ONE\r\n", true),
            ("API-Key: key-of-TWO\r\n", true),
            ("x-api-key: key-of-THREE\r\n", false),
            ("x-api-key: Bearer key-of-ONE\r\n", false),
            ("x-api-key:\r\n", false),
            ("x-api-key: key-of-ONE\r\nx-api-key: key-of-TWO\r\n", false),
            ("x-api-key: key-of-ONE\r\nAuthorization: Bearer key-of-ONE\r\n", true),
            ("x-api-key: key-of-ONE\r\nAuthorization: Bearer key-of-TWO\r\n", false),
            ("x-api-key: key-of-ONE\r\napi-key: key-of-THREE\r\n", false),
            ("x-api-key: key-of-ONE\r\nAuthorization: Basic eDp5\r\n", false),
        ] {
            client.send(format!("GET /v1/models HTTP/1.1\r\nHost: a\r\n{given}\r\n")).await;
            let (head, body) = client.json().await;
            assert_eq!(head.status(), if is_right { 200 } else { 401 }, "{given}");
            assert_eq!(head.field("www-authenticate").is_some(), !is_right);
            assert!(!body.to_string().contains("key-of"), "{body}");
        }
        let mut client = setup.asking(ASK_ONE).await;
        assert_eq!(client.json().await.1["error"]["code"], "invalid_api_key");
        let mut client = setup.client().await;
        client.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn forms_go_to_the_engine_of_their_model() {
    run(async {
        let setup = Setup::new("").await;
        let kind = "Content-Type: multipart/form-data; boundary=\"x-1\"\r\n";
        let form = |name: &str| {
            format!(
                "--x-1\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                 Content-Type: audio/wav\r\n\r\nRIFF\r\n--x\r\n--x-1\r\n\
                 Content-Disposition: form-data; name=\"model\"\r\n\r\n{name}\r\n--x-1--\r\n"
            )
        };
        let asked = |path: &str, name: &str| {
            post_with(path, kind, &form(name)).replacen("Content-Type: application/json\r\n", "", 1)
        };
        for (path, name, wanted) in [
            ("/v1/audio/transcriptions", "org/one", "org/one"),
            ("/v1/audio/translations", "small", "org/one"),
            ("/v1/images/edits", "large", "/models/\"two\""),
            ("/v1/images/variations", "two", "/models/\"two\""),
        ] {
            let mut client = setup.client().await;
            client.send(asked(path, name)).await;
            let mut engine = setup.engine().await;
            let (head, body) = engine.message().await;
            assert_eq!(head.field("content-type"), Some("multipart/form-data; boundary=\"x-1\""));
            assert_eq!(String::from_utf8(body).unwrap(), form(wanted), "{path}");
            engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            assert_eq!(client.message().await.0.status(), 200);
        }
        let other = asked("/v1/audio/transcriptions", "org/one").replace("=\"model\"", "=\"mode2\"");
        for (text, status) in [
            (asked("/v1/audio/transcriptions", "three"), 404),
            (asked("/v1/chat/completions", "two"), 415),
            (other, 400),
        ] {
            let mut client = setup.client().await;
            client.send(text).await;
            assert_eq!(client.json().await.0.status(), status);
        }
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 4);
    });
}
