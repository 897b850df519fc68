//! Pages in browsers, and paths.

use super::setup::{Setup, Wire, answer, post_with, run};

const ASK: &str = r#"{"model":"org/one"}"#;
const PATH: &str = "/v1/chat/completions";

/// With this host and these lines.
async fn asked(setup: &Setup, host: &str, lines: &str) -> Wire {
    let mut client = setup.client().await;
    client.send(post_with(PATH, lines, ASK).replacen("Host: front", &format!("Host: {host}"), 1)).await;
    client
}

async fn refused(setup: &Setup, host: &str, lines: &str, code: &str) {
    let (head, body) = asked(setup, host, lines).await.json().await;
    assert_eq!((head.status(), &body["error"]["code"]), (403, &code.into()), "{host} {lines}");
    assert_eq!(head.field("access-control-allow-origin"), None);
}

/// The head of the answer, whose engine allows all pages.
async fn served(setup: &Setup, host: &str, lines: &str) -> super::setup::Head {
    let mut client = asked(setup, host, lines).await;
    let mut engine = setup.engine().await;
    assert_eq!(engine.message().await.0.field("origin"), None);
    let cors =
        "\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\nVary: Accept\r\n";
    engine.send(answer("{}").replacen("\r\n", cors, 1)).await;
    let (head, _) = client.message().await;
    assert_eq!(
        (head.status(), head.field("access-control-allow-credentials")),
        (200, None),
        "{host} {lines}"
    );
    head
}

#[test]
fn pages_of_other_sites_are_refused_without_keys() {
    run(async {
        let setup = Setup::local("").await;
        for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "a@localhost"]
        {
            refused(&setup, host, "", "forbidden_host").await;
        }
        for lines in [
            "Origin: http://evil.example\r\n",
            "Origin: null\r\n",
            "Origin: http://localhost:3000\r\n",
            "Origin: http://localhost\r\nOrigin: http://evil.example\r\n",
            "Sec-Fetch-Site: cross-site\r\n",
            "Sec-Fetch-Site: same-site\r\n",
        ] {
            refused(&setup, "localhost", lines, "forbidden_origin").await;
        }
        let mut client = setup.client().await;
        client.send("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n").await;
        assert_eq!(client.json().await.0.status(), 403);
        for (host, lines) in [
            ("localhost:8080", ""),
            ("127.0.0.1", ""),
            ("[::1]:8080", ""),
            ("localhost:8080", "Origin: http://localhost:8080\r\nSec-Fetch-Site: same-origin\r\n"),
        ] {
            let head = served(&setup, host, lines).await;
            assert_eq!(head.field("access-control-allow-origin"), None);
        }
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 4);
    });
}

#[test]
fn a_front_with_keys_answers_to_any_name() {
    run(async {
        let setup = Setup::local("keys = [\"env:ONE\"]").await;
        let lines = "Origin: https://chat.example\r\nAuthorization: Bearer key-of-ONE\r\n";
        let head = served(&setup, "gpu.example", lines).await;
        // The browser keeps it from the page.
        assert_eq!(head.field("access-control-allow-origin"), None);
        let mut client = asked(&setup, "gpu.example", "Origin: https://chat.example\r\n").await;
        assert_eq!(client.json().await.0.status(), 401);
    });
}

#[test]
fn an_allowed_page_gets_what_its_browser_asks_for() {
    run(async {
        for (lines, key) in [
            ("origins = [\"https://chat.example\", \"app://notes\"]", ""),
            ("origins = [\"*\"]", ""),
            ("origins = [\"https://chat.example\"]\nkeys = [\"env:ONE\"]", "x-api-key: key-of-ONE\r\n"),
        ] {
            let setup = Setup::local(lines).await;
            let page = "Origin: https://chat.example\r\nSec-Fetch-Site: cross-site\r\n";
            let mut client = setup.client().await;
            client
                .send(format!(
                    "OPTIONS {PATH} HTTP/1.1\r\nHost: localhost\r\n{page}Access-Control-Request-Method: POST\r\n\
                     Access-Control-Request-Headers: authorization, content-type\r\n\r\n"
                ))
                .await;
            let (head, _) = client.message().await;
            assert_eq!(head.status(), 204, "{lines}");
            let allows = |name: &str| head.field(&format!("access-control-{name}"));
            assert_eq!(allows("allow-origin"), Some("https://chat.example"));
            assert_eq!(allows("allow-headers"), Some("authorization, content-type"));
            assert!(allows("allow-methods").unwrap().contains("POST"));
            let head = served(&setup, "localhost", &format!("{page}{key}")).await;
            assert_eq!(head.field("access-control-allow-origin"), Some("https://chat.example"));
            assert!(head.field("access-control-expose-headers").unwrap().contains("x-request-id"));
            assert!(head.fields.contains(&("vary".to_owned(), "Origin".to_owned())), "{head:?}");
            // Errors can be read, too.
            client.send(format!("GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n{page}\r\n")).await;
            let (head, _) = client.json().await;
            assert_eq!(head.field("access-control-allow-origin"), Some("https://chat.example"));
            // The name still counts.
            if key.is_empty() {
                let (head, _) = asked(&setup, "chat.example", page).await.json().await;
                assert_eq!(head.status(), 403);
            }
        }
        let setup = Setup::local("origins = [\"https://chat.example\"]").await;
        let mut client = setup.client().await;
        client
            .send(
                "OPTIONS /v1/responses/resp_1 HTTP/1.1\r\nHost: localhost\r\nOrigin: https://chat.example\r\n\
                 Access-Control-Request-Method: DELETE\r\n\r\n",
            )
            .await;
        let (head, _) = client.message().await;
        assert_eq!(head.status(), 204);
        assert!(head.field("access-control-allow-methods").unwrap().contains("DELETE"));
        refused(&setup, "localhost", "Origin: https://other.example\r\n", "forbidden_origin").await;
        let head = served(&setup, "localhost", "").await;
        assert!(head.fields.contains(&("vary".to_owned(), "Origin".to_owned())), "{head:?}");
    });
}

#[test]
fn bodies_have_to_be_json_by_their_type() {
    run(async {
        let setup = Setup::local("").await;
        for (kind, origin, is_right) in [
            ("Content-Type: application/json\r\n", false, true),
            ("Content-Type: Application/JSON; charset=utf-8\r\n", true, true),
            ("content-type: application/vnd.api+json\r\n", false, true),
            ("", false, true),
            ("", true, false),
            ("Content-Type: text/plain\r\n", false, false),
            ("Content-Type: text/plain;charset=application/json\r\n", false, false),
            ("Content-Type: application/x-www-form-urlencoded\r\n", false, false),
            ("Content-Type: application/jsonp\r\n", false, false),
            ("Content-Type: application/json\r\nContent-Type: text/plain\r\n", false, false),
            ("Content-Type:\r\n", false, false),
        ] {
            let mut client = setup.client().await;
            let lines = if origin { "Origin: http://localhost\r\n" } else { "" };
            let text = post_with(PATH, lines, ASK).replacen("Host: front", "Host: localhost", 1);
            client.send(text.replacen("Content-Type: application/json\r\n", kind, 1)).await;
            if is_right {
                let mut engine = setup.engine().await;
                engine.message().await;
                engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
                assert_eq!(client.message().await.0.status(), 200, "{kind}");
            } else {
                let (head, body) = client.json().await;
                assert_eq!(head.status(), 415, "{kind}");
                assert!(body["error"]["message"].as_str().unwrap().contains("application/json"), "{body}");
            }
        }
    });
}

#[test]
fn only_listed_paths_reach_an_engine() {
    run(async {
        let listed = [
            "chat/completions",
            "completions",
            "embeddings",
            "responses",
            "responses/compact",
            "messages",
            "messages/count_tokens",
            "rerank",
            "score",
            "classify",
            "pooling",
            "moderations",
            "audio/speech",
            "images/generations",
        ];
        let setup = Setup::new("paths = [\"/v1/tokenize\", \"/v1/mine/\"]").await;
        for path in listed.into_iter().chain(["tokenize", "mine/a/b", "tokenize?x=1"]) {
            let mut client = setup.client().await;
            client.send(post_with(&format!("/v1/{path}"), "", ASK)).await;
            let mut engine = setup.engine().await;
            assert_eq!(engine.message().await.0.first, format!("POST /v1/{path} HTTP/1.1"));
            engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            assert_eq!(client.message().await.0.status(), 200, "{path}");
        }
        let admitted = setup.until(|_| true).await.admitted;
        for path in ["chats", "completions/render", "completion%73", "tokenize/a", "mine", "Completions"] {
            let mut client = setup.client().await;
            client.send(post_with(&format!("/v1/{path}"), "", ASK)).await;
            let (head, body) = client.json().await;
            assert_eq!((head.status(), &body["error"]["code"]), (404, &"unknown_path".into()), "{path}");
            assert!(body["error"]["message"].as_str().unwrap().contains("`paths`"), "{body}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, admitted);
    });
}
