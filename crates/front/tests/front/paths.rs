//! Which paths of engines clients reach, and where these requests name their model.

use super::setup::{Setup, Wire, last_answer, post_with, run};

async fn get(client: &mut Wire, method: &str, path: &str) {
    client.send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
}

/// The engine's line, and its body, for a request that is forwarded.
async fn forwarded(setup: &Setup, client: &mut Wire, ask: &str) -> (String, Vec<u8>) {
    client.send(ask).await;
    let (head, body) = setup.answered(last_answer("{}")).await;
    assert_eq!(client.message().await.0.status(), 200, "{ask}");
    (head.first, body)
}

#[test]
fn what_clients_of_other_servers_call_reaches_the_engine() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        let body = r#"{"model":"small","input":"x"}"#;
        for path in [
            "/infill",
            "/completion",
            "/rerank",
            "/v1/reranking",
            "/v2/rerank",
            "/v2/chat",
            "/v1/embed",
            "/tokenize",
            "/apply-template",
            "/api/chat",
            "/api/embed",
            "/sdapi/v1/txt2img",
            "/sdapi/v1/extra-single-image",
        ] {
            let (line, sent) = forwarded(&setup, &mut client, &post_with(path, "", body)).await;
            assert_eq!(line, format!("POST {path} HTTP/1.1"));
            assert_eq!(sent, br#"{"model":"org/one","input":"x"}"#);
        }
    });
}

#[test]
fn a_query_names_the_model_where_no_body_does() {
    run(async {
        let setup = Setup::new("paths = [\"/labels/\"]").await;
        let mut client = setup.client().await;
        for path in ["/props", "/v1/audio/voices", "/sdapi/v1/samplers", "/labels/all"] {
            for method in ["GET", "HEAD"] {
                get(&mut client, method, &format!("{path}?a=b&model=large")).await;
                let (head, _) = setup.answered(last_answer("").replacen("200", "204", 1)).await;
                assert_eq!(head.first, format!("{method} {path}?a=b&model=/models/%22two%22 HTTP/1.1"));
                assert_eq!(client.head().await.status(), 204);
            }
            for (query, status) in [("", 400), ("?model=", 400), ("?model=a&model=b", 400), ("?model=x", 404)]
            {
                get(&mut client, "GET", &format!("{path}{query}")).await;
                let (head, said) = client.json().await;
                assert_eq!(
                    (head.status(), &said["error"]["param"]),
                    (status, &"model".into()),
                    "{path}{query}"
                );
            }
        }
        // A body that names one counts; else it stays as it is.
        for (body, line) in [
            (r#"{"prompt":"x"}"#, "POST /infill?model=/models/%22two%22 HTTP/1.1"),
            (r#"{"model":"small"}"#, "POST /infill?model=two HTTP/1.1"),
        ] {
            let asked = forwarded(&setup, &mut client, &post_with("/infill?model=two", "", body)).await;
            let sent = body.replace("small", "org/one").into_bytes();
            assert_eq!(asked, (line.to_owned(), sent));
        }
        client.send(post_with("/infill", "", r#"{"prompt":"x"}"#)).await;
        let (head, said) = client.json().await;
        assert_eq!((head.status(), &said["error"]["param"]), (400, &"model".into()));
        // What only answers a body is not read.
        get(&mut client, "GET", "/v1/chat/completions?model=two").await;
        assert_eq!(client.json().await.0.field("allow"), Some("POST"));
    });
}

/// A prefix opens none of them, and no way of writing does.
#[test]
fn administration_is_not_reached() {
    run(async {
        let setup = Setup::new("paths = [\"/api/\", \"/sdapi/\", \"/models/\"]").await;
        let mut client = setup.client().await;
        for path in [
            "/sleep",
            "/wake_up",
            "/collective_rpc",
            "/release_memory_occupation",
            "/slots/0",
            "/api/pull",
            "/api/%70ull",
            "/API/PULL",
            "/api/delete",
            "/sdapi/v1/options",
            "/sdapi/v1/interrupt",
            "/sdapi/v1/refresh-loras",
            "/sdapi/v1/unload-checkpoint",
            "/sdapi/v1/train/embedding",
            "/sdapi/v1/%73erver-stop",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/models/unload",
            "/rotate/reload",
            "/metrics",
        ] {
            for method in ["POST", "GET", "DELETE"] {
                let body = r#"{"model":"two"}"#;
                client
                    .send(post_with(&format!("{path}?model=two"), "", body).replacen("POST", method, 1))
                    .await;
                let status = client.json().await.0.status();
                assert!(matches!(status, 404 | 405), "{method} {path}: {status}");
            }
        }
        client.send(post_with("/props?model=two", "", r#"{"model":"two"}"#)).await;
        assert_eq!(client.json().await.0.status(), 405);
        for path in ["/sdapi/v1/../v1/options", "/sdapi/%2e%2e/sleep", "/models//unload", "/api/./pull"] {
            client.send(post_with(path, "", r#"{"model":"two"}"#)).await;
            assert_eq!(client.json().await.0.status(), 400, "{path}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}

/// Its clients make images and read lists. Other paths need an operator's word.
#[test]
fn little_of_stable_diffusion_is_open() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        for (method, path, status) in [
            ("POST", "/sdapi/v1/samplers", 405),
            ("POST", "/sdapi/v1/progress", 405),
            ("GET", "/sdapi/v1/txt2img", 405),
            ("POST", "/sdapi/v1/skip", 404),
            ("POST", "/sdapi/v1/options", 404),
            ("GET", "/sdapi/v1/options", 404),
            ("POST", "/sdapi/v1/scripts", 404),
            ("GET", "/sdapi/v1/scripts", 404),
        ] {
            let ask = post_with(&format!("{path}?model=two"), "", r#"{"model":"two"}"#);
            client.send(ask.replacen("POST", method, 1)).await;
            assert_eq!(client.json().await.0.status(), status, "{method} {path}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}

#[test]
fn paths_below_an_engine_do_not_climb() {
    run(async {
        let setup = Setup::new("passthrough = true").await;
        let mut client = setup.client().await;
        for path in ["/../../metrics", "/a/..", "/.", "/%2e%2e/a", "/a%2F..%2Fb", "/a%5c..", "/%zz"] {
            get(&mut client, "GET", &format!("/engines/two{path}")).await;
            assert_eq!(client.json().await.0.status(), 400, "{path}");
        }
        assert_eq!(setup.until(|_| true).await.admitted, 0);
    });
}

#[test]
fn ollamas_clients_get_a_list_and_no_comments() {
    run(async {
        let setup = Setup::new("keep_alive = \"1ms\"").await;
        let mut client = setup.client().await;
        get(&mut client, "GET", "/api/tags").await;
        let (head, said) = client.json().await;
        let names: Vec<&str> =
            said["models"].as_array().unwrap().iter().map(|one| one["model"].as_str().unwrap()).collect();
        assert_eq!((head.status(), names), (200, vec!["org/one", "small", "two", "large"]));
        // Its streams are lines of JSON, in which a comment would be an error.
        setup.say(super::setup::Verdict::Wait);
        client.send(post_with("/api/chat", "", r#"{"model":"two","stream":true}"#)).await;
        setup.until(|seen| seen.waiting == 1).await;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        setup.say(super::setup::Verdict::Admit);
        setup.answered(last_answer("{\"done\":true}\n")).await;
        assert_eq!(client.message().await.1, b"{\"done\":true}\n");
    });
}
