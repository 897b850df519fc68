//! Engines' own paths, where the configuration opens them.

use super::setup::{Setup, Verdict, Wire, last_answer, run};

async fn ask(client: &mut Wire, method: &str, path: &str, lines: &str) {
    client.send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{lines}\r\n")).await;
}

#[test]
fn paths_of_engines_are_reached_only_if_configured() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        for path in ["/engines/two/sleep", "/engines/two", "/engines/"] {
            ask(&mut client, "GET", path, "").await;
            let (head, said) = client.json().await;
            assert_eq!((head.status(), &said["error"]["code"]), (404, &"unknown_path".into()), "{path}");
            assert!(said["error"]["message"].as_str().unwrap().contains("passthrough"), "{said}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}

#[test]
fn any_request_goes_to_the_engine_of_its_path() {
    run(async {
        let setup = Setup::new("passthrough = true").await;
        let mut client = setup.client().await;
        for (method, path, wanted) in [
            ("GET", "/engines/two/", "/"),
            ("GET", "/engines/large/a//b/?x=%20", "/a//b/?x=%20"),
            ("DELETE", "/engines/org/one/x", "/x"),
            ("PUT", "/engines/org%2Fone/a%2Fb", "/a%2Fb"),
            ("OPTIONS", "/engines/small/.a", "/.a"),
            ("PATCH", "/engines/two/v1/models", "/v1/models"),
        ] {
            let is_short = method == "GET" && wanted == "/";
            let body = "Content-Type: text/plain\r\nCookie: a=b\r\nContent-Length: 2\r\n";
            ask(&mut client, method, path, if is_short { "" } else { body }).await;
            client.send(if is_short { "" } else { "hi" }).await;
            let (head, body) = setup.answered(last_answer("page")).await;
            assert_eq!(head.first, format!("{method} {wanted} HTTP/1.1"));
            assert_eq!(body, if is_short { &b""[..] } else { b"hi" });
            assert_eq!(head.field("cookie"), None);
            assert_eq!(client.message().await.1, b"page", "{path}");
        }
        for (there, wanted) in [
            ("/a/?b".to_owned(), "/engines/two/a/?b"),
            (format!("http://{}/a", setup.engine.local_addr().unwrap()), "/engines/two/a"),
            ("a".to_owned(), "a"),
            ("https://elsewhere/a".to_owned(), "https://elsewhere/a"),
            ("//elsewhere/a".to_owned(), "//elsewhere/a"),
        ] {
            ask(&mut client, "GET", "/engines/two/a", "").await;
            let lines = format!("Location: {there}\r\nConnection: close\r\nContent-Length: 0\r\n");
            setup.answered(format!("HTTP/1.1 307 Go\r\n{lines}\r\n")).await;
            assert_eq!(client.message().await.0.field("location"), Some(wanted));
        }
        ask(&mut client, "GET", "/engines/org%2Fone?a=b", "").await;
        let head = client.message().await.0;
        assert_eq!((head.status(), head.field("location")), (307, Some("/engines/org%2Fone/?a=b")));
        for (method, path, status) in
            [("GET", "/engines/three/x", 404), ("GET", "/engines/", 404), ("TRACE", "/engines/two/", 405)]
        {
            ask(&mut client, method, path, "").await;
            assert_eq!(client.json().await.0.status(), status, "{path}");
        }
        let seen = setup.until(|seen| seen.running == 0).await;
        assert_eq!((seen.admitted, seen.suspects), (11, 0));
    });
}

#[test]
fn an_open_page_wakes_no_model() {
    run(async {
        let setup = Setup::new("passthrough = true").await;
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        let socket = "Sec-Fetch-Mode: websocket\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a2V5\r\n";
        for lines in ["Sec-Fetch-Mode: cors\r\n", "Sec-Fetch-Mode: no-cors\r\n", socket] {
            ask(&mut client, "GET", "/engines/two/props", lines).await;
            let (head, said) = client.json().await;
            assert_eq!((head.status(), &said["error"]["code"]), (503, &"not_ready".into()), "{lines}");
        }
        assert_eq!(setup.until(|_| true).await.waiting, 0);
        for (method, path, lines) in [
            ("GET", "/engines/two/", "Sec-Fetch-Mode: navigate\r\n"),
            ("POST", "/engines/two/completion", "Sec-Fetch-Mode: cors\r\n"),
            ("GET", "/engines/two/props", ""),
            // This one is ready.
            ("GET", "/engines/small/props", "Sec-Fetch-Mode: cors\r\n"),
        ] {
            let mut client = setup.client().await;
            ask(&mut client, method, path, lines).await;
            setup.until(|seen| seen.waiting == 1).await;
            drop(client);
            setup.until(|seen| seen.waiting == 0).await;
        }
    });
}

#[test]
fn keys_and_websockets_are_as_elsewhere() {
    run(async {
        let setup = Setup::new("passthrough = true\nkeys = [\"env:ONE\"]").await;
        let mut client = setup.client().await;
        ask(&mut client, "GET", "/engines/two/", "").await;
        assert_eq!(client.json().await.0.status(), 401);
        let lines = "Authorization: Bearer key-of-ONE\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                     Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a2V5\r\n";
        ask(&mut client, "GET", "/engines/two/ws?clientId=1", lines).await;
        let mut engine = setup.engine().await;
        let head = engine.head().await;
        assert_eq!((head.first.as_str(), head.field("authorization")), ("GET /ws?clientId=1 HTTP/1.1", None));
        engine.send("HTTP/1.1 101 Go\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").await;
        assert_eq!(client.head().await.status(), 101);
        client.send("hi").await;
        assert_eq!(engine.bytes(2).await, b"hi");
        let local = Setup::local("passthrough = true").await;
        let mut page = local.client().await;
        page.send("GET /engines/two/ HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n")
            .await;
        assert_eq!(page.json().await.0.status(), 403);
    });
}
