//! Stored responses go to the model that made them.

use poorwill_front::affinity::{Affinity, hash};
use poorwill_front::backend::Refusal;

use super::setup::{END, EVENTS, Setup, Verdict, Wire, chunk, last_answer, post_with, run};

const KEYS: &str =
    "keys = [{ source = \"env:ONE\", name = \"one\" }, { source = \"env:TWO\", name = \"two\" }]";
const ONE: &str = "Authorization: Bearer key-of-ONE\r\n";
const TWO: &str = "Authorization: Bearer key-of-TWO\r\n";

/// A client whose response was made.
async fn made(setup: &Setup, lines: &str, ask: &str, id: &str) -> Wire {
    let mut client = setup.client().await;
    client.send(post_with("/v1/responses", lines, ask)).await;
    setup.answered(last_answer(&format!("{{\"id\":\"{id}\",\"object\":\"response\"}}"))).await;
    assert_eq!(client.message().await.0.status(), 200);
    client
}

async fn ask(client: &mut Wire, method: &str, path: &str, lines: &str) {
    client.send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{lines}\r\n")).await;
}

#[test]
fn a_stored_response_is_asked_of_its_model() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = made(&setup, "", r#"{"model":"two","input":"x"}"#, "resp_1").await;
        for (method, path) in [
            ("GET", "/v1/responses/resp_1?include=a&stream=true"),
            ("HEAD", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1/input_items?limit=2"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("DELETE", "/v1/responses/resp_1"),
        ] {
            let body =
                if method == "POST" { "Content-Length: 0\r\nX-Other: kept\r\nCookie: a=b\r\n" } else { "" };
            ask(&mut client, method, path, body).await;
            let said = last_answer("{}");
            let said = if method == "HEAD" { said.trim_end_matches("{}") } else { &said };
            let (head, sent) = setup.answered(said).await;
            assert_eq!((head.first, sent), (format!("{method} {path} HTTP/1.1"), Vec::new()));
            assert!(!head.fields.iter().any(|(name, _)| name == "cookie"));
            let head = client.head().await;
            assert_eq!(head.status(), 200, "{method} {path}");
            if method != "HEAD" {
                client.bytes(2).await;
            }
        }
        // It waits for its model as any request, and the engine's own words pass.
        setup.refuse(Refusal::NoMemory, None);
        ask(&mut client, "GET", "/v1/responses/resp_1", "").await;
        let (head, said) = client.json().await;
        assert_eq!((head.status(), &said["error"]["code"]), (503, &"no_room".into()));
        assert!(said["error"]["message"].as_str().unwrap().contains("`two`"), "{said}");
        setup.say(Verdict::Admit);
        ask(&mut client, "GET", "/v1/responses/resp_1", "").await;
        setup.answered(last_answer("{\"gone\":\"resp_1\"}").replacen("200 OK", "404 Not Found", 1)).await;
        let (head, said) = client.json().await;
        assert_eq!((head.status(), &said["gone"]), (404, &"resp_1".into()));
        // An engine that keeps none knows no such path, and says nothing of this response.
        for status in ["404 Not Found", "405 No", "501 No"] {
            ask(&mut client, "GET", "/v1/responses/resp_1", "").await;
            setup.answered(last_answer("{\"detail\":\"Not Found\"}").replacen("200 OK", status, 1)).await;
            let (head, said) = client.json().await;
            assert_eq!((head.status(), &said["error"]["code"]), (404, &"response_not_kept".into()));
            assert!(said["error"]["message"].as_str().unwrap().contains("`two`"), "{said}");
        }
    });
}

#[test]
fn a_streamed_response_is_known_from_its_first_event() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        client.send(post_with("/v1/responses", "", r#"{"model":"small","stream":true}"#)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        let created =
            "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_2\"";
        engine.send(chunk(created)).await;
        client.head().await;
        // What has come passes, also a part of an event.
        assert_eq!(client.chunk().await.unwrap(), created);
        engine.send(chunk("}}\n\n")).await;
        assert_eq!(client.chunk().await.unwrap(), "}}\n\n");
        let mut other = setup.client().await;
        ask(&mut other, "POST", "/v1/responses/resp_2/cancel", "").await;
        let mut second = setup.engine().await;
        assert_eq!(second.message().await.0.first, "POST /v1/responses/resp_2/cancel HTTP/1.1");
        second.send(last_answer("{}")).await;
        assert_eq!(other.message().await.0.status(), 200);
        engine.send(END).await;
        assert_eq!(client.chunk().await, None);
    });
}

#[test]
fn what_was_not_stored_is_unknown() {
    run(async {
        let setup = Setup::new("").await;
        made(&setup, "", r#"{"model":"two","store":false}"#, "resp_1").await;
        let mut client = setup.client().await;
        client.send(post_with("/v1/responses", "", r#"{"model":"two"}"#)).await;
        setup.answered(last_answer("{\"id\":\"resp_3\"}").replacen("200 OK", "400 Bad", 1)).await;
        assert_eq!(client.message().await.0.status(), 400);
        for path in ["resp_1", "resp_1/input_items", "resp_2", "resp_3"] {
            ask(&mut client, "GET", &format!("/v1/responses/{path}"), "").await;
            let (head, said) = client.json().await;
            assert_eq!(
                (head.status(), &said["error"]["code"]),
                (404, &"response_not_found".into()),
                "{path}"
            );
        }
        for (method, path, status) in [
            ("PUT", "resp_1", 405),
            ("DELETE", "resp_1/input_items", 405),
            ("GET", "resp_1/cancel", 405),
            ("GET", "resp_1/other", 405),
            ("GET", "a%2Fb", 400),
        ] {
            ask(&mut client, method, &format!("/v1/responses/{path}"), "").await;
            assert_eq!(client.json().await.0.status(), status, "{method} {path}");
        }
        // A body with a model names it itself.
        client.send(post_with("/v1/responses/compact", "", r#"{"model":"two"}"#)).await;
        let (head, _) = setup.answered(last_answer("{}")).await;
        assert_eq!(head.first, "POST /v1/responses/compact HTTP/1.1");
        assert_eq!(setup.until(|_| true).await.admitted, 3);
    });
}

#[test]
fn a_response_belongs_to_the_name_of_its_key() {
    run(async {
        let setup = Setup::new(KEYS).await;
        let mut client = made(&setup, ONE, r#"{"model":"two"}"#, "resp_1").await;
        ask(&mut client, "GET", "/v1/responses/resp_1", TWO).await;
        assert_eq!(client.json().await.1["error"]["code"], "response_not_found");
        let next = r#"{"model":"two","previous_response_id":"resp_1"}"#;
        client.send(post_with("/v1/responses", TWO, next)).await;
        assert_eq!(client.json().await.1["error"]["code"], "response_not_found");
        ask(&mut client, "GET", "/v1/responses/resp_1", "").await;
        assert_eq!(client.json().await.0.status(), 401);
        ask(&mut client, "GET", "/v1/responses/resp_1", ONE).await;
        assert_eq!(setup.answered(last_answer("{}")).await.0.field("authorization"), None);
        assert_eq!(client.message().await.0.status(), 200);
        client.send(post_with("/v1/responses", ONE, next)).await;
        let (_, sent) = setup.answered(last_answer("{}")).await;
        assert!(sent.ends_with(br#","previous_response_id":"resp_1"}"#));
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn a_router_goes_where_a_response_was_made() {
    run(async {
        let setup = Setup::of_router().await;
        let mut client = made(&setup, "", r#"{"model":"two","input":"x"}"#, "resp_1").await;
        let url = format!("http://{}", setup.engine.local_addr().unwrap());
        let place = Some(hash(url.as_bytes()));
        let last = || setup.backend.fleet.lock().unwrap().affinities.pop().unwrap();
        let first = last();
        assert!(first.key.is_some() && first.place.is_none());
        let on = r#"{"model":"two","input":"x","previous_response_id":"resp_1"}"#;
        made(&setup, "", on, "resp_2").await;
        assert_eq!(last(), Affinity { place, ..first });
        ask(&mut client, "GET", "/v1/responses/resp_2", "").await;
        setup.answered(last_answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
        assert_eq!(last(), Affinity { place, key: None });
        // Another router made it, or it was too long ago.
        made(&setup, "", &on.replace("resp_1", "resp_0"), "resp_3").await;
        assert_eq!(last(), first);
    });
}
