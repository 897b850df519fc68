//! What it serves to clients, and as which engine it acts for its operator.

use http::StatusCode;
use poorwill_mock_engine::{Api, Fault, Like, MockEngine};
use serde_json::{Value, json};

use super::{BYTES, Served, assert_error, events, fast};

async fn serving(serves: &[Api]) -> Served {
    Served::of(MockEngine { serves: serves.to_vec(), ..fast() }).await
}

async fn like(like: Like) -> Served {
    Served::of(MockEngine { like, ..fast() }).await
}

fn path_and_body(api: Api) -> (&'static str, Value) {
    let messages = json!([{ "role": "user", "content": "x" }]);
    match api {
        Api::Completions => ("/v1/completions", json!({ "prompt": "x" })),
        Api::Chat => ("/v1/chat/completions", json!({ "messages": messages })),
        Api::Responses => ("/v1/responses", json!({ "input": "x" })),
        Api::Embeddings => ("/v1/embeddings", json!({ "input": "x" })),
        Api::Rerank => ("/v1/rerank", json!({ "query": "x", "documents": ["x", "y"] })),
        Api::Messages => ("/v1/messages", json!({ "messages": messages, "max_tokens": 9 })),
        other => panic!("{other} has no request here"),
    }
}

async fn status(served: &Served, api: Api) -> StatusCode {
    let (path, body) = path_and_body(api);
    served.post(path, &body).await.status()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_serves_what_it_was_asked_to() {
    let usual = Served::without_faults().await;
    for api in Api::ALL {
        let expected = if Api::USUAL.contains(&api) { StatusCode::OK } else { StatusCode::NOT_FOUND };
        assert_eq!(status(&usual, api).await, expected, "{api}");
        let only = serving(&[api]).await;
        for other in Api::ALL {
            let expected = if other == api { StatusCode::OK } else { StatusCode::NOT_FOUND };
            assert_eq!(status(&only, other).await, expected, "{other} of {api}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_shows_wrong_weights() {
    let served = serving(&Api::ALL).await;
    let answers = async || {
        let mut all = Vec::new();
        for api in Api::ALL {
            let (path, body) = path_and_body(api);
            all.push(served.post(path, &body).await.bytes().await);
        }
        all
    };
    let right = answers().await;
    assert_eq!(right, answers().await);
    served.set_faults(&json!([Fault::Gibberish.name()])).await;
    served.cycle(1).await;
    let wrong = answers().await;
    for (at, api) in Api::ALL.into_iter().enumerate() {
        assert_ne!(right[at], wrong[at], "{api}");
    }
    served.set_faults(&json!([])).await;
    served.cycle(1).await;
    assert_eq!(right, answers().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_are_scored_and_in_order() {
    let served = serving(&[Api::Rerank]).await;
    let mut body = json!({ "model": "one", "query": "x", "documents": ["y", { "text": "x" }, "z"] });
    let ranked: Value = served.post("/v1/rerank", &body).await.json().await;
    let results = ranked["results"].as_array().unwrap();
    assert_eq!((results.len(), &results[0]["index"]), (3, &json!(1)), "the same text is first: {ranked}");
    assert_eq!(results[0]["document"]["text"], "x");
    let scores: Vec<f64> = results.iter().map(|one| one["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|one, other| one >= other), "{scores:?}");
    body["top_n"] = json!(1);
    let first: Value = served.post("/v1/rerank", &body).await.json().await;
    assert_eq!(first["results"], json!([results[0]]));
    for (body, words) in [
        (json!({ "query": "x", "documents": [] }), "documents must not be empty"),
        (json!({ "query": "", "documents": ["x"] }), "query"),
        (json!({ "query": "x" }), "documents"),
        (json!({ "query": "x", "documents": [7] }), "cannot be read"),
    ] {
        assert_error(served.post("/v1/rerank", &body).await, 400, words).await;
    }
    served.command("/sleep").await;
    assert_error(served.post("/v1/rerank", &body).await, 503, "asleep").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_anthropics() {
    let served = serving(&[Api::Messages]).await;
    let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "x" }] }]);
    let mut body = json!({ "model": "one", "system": "be brief", "messages": messages, "max_tokens": 3 });
    let whole: Value = served.post("/v1/messages", &body).await.json().await;
    let text = whole["content"][0]["text"].as_str().unwrap();
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    assert_eq!(whole["usage"]["output_tokens"], 3);
    body["stream"] = json!(true);
    let stream = served.post("/v1/messages", &body).await.text().await;
    let (events, is_done) = events(&stream);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let delta = "content_block_delta";
    let last = ["content_block_stop", "message_delta", "message_stop"];
    assert_eq!(kinds, [&["message_start", "content_block_start", delta, delta, delta], &last[..]].concat());
    assert!(!is_done && kinds.iter().all(|kind| stream.contains(&format!("event: {kind}\n"))));
    let streamed: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    assert_eq!(events[6]["delta"]["stop_reason"], "max_tokens");
    assert_eq!(events[0]["message"]["content"], json!([]));
    body["max_tokens"] = json!(500);
    body["stream"] = json!(false);
    let whole: Value = served.post("/v1/messages", &body).await.json().await;
    assert_eq!(whole["stop_reason"], "end_turn");
    for body in [json!({ "messages": messages }), json!({ "messages": [], "max_tokens": 1 })] {
        assert_error(served.post("/v1/messages", &body).await, 400, "m").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_like_llama_server_has_a_health_and_no_sleep() {
    let served = like(Like::LlamaServer).await;
    assert_eq!(served.get_json("/health").await, json!({ "status": "ok" }));
    served.text().await;
    assert_eq!(served.get("/is_sleeping").await.status(), StatusCode::NOT_FOUND);
    for path in ["/sleep", "/wake_up", "/collective_rpc", "/api/generate"] {
        assert_error(served.post(path, &json!({})).await, 404, path).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_like_ollama_unloads_and_loads_its_model() {
    let served = like(Like::Ollama).await;
    let text = served.text().await;
    for path in ["/health", "/is_sleeping"] {
        assert_eq!(served.get(path).await.status(), StatusCode::NOT_FOUND, "{path}");
    }
    for path in ["/", "/api/version"] {
        assert_eq!(served.get(path).await.status(), StatusCode::OK, "{path}");
    }
    assert_eq!(served.get_json("/api/ps").await["models"][0]["name"], "one");
    let generate = async |body: &Value| served.post("/api/generate", body).await;
    for keep_alive in [json!(0), json!("0")] {
        let unload = json!({ "model": "one", "keep_alive": keep_alive });
        let unloaded: Value = generate(&unload).await.json().await;
        assert_eq!((&unloaded["done"], &unloaded["done_reason"]), (&json!(true), &json!("unload")));
        assert_eq!(served.get_json("/api/ps").await, json!({ "models": [] }));
        assert_eq!(served.held_bytes().await, 0);
        let loaded: Value = generate(&json!({ "model": "one" })).await.json().await;
        assert_eq!(loaded["done_reason"], "load");
        assert!(served.held_bytes().await >= BYTES);
        assert_eq!(served.text().await, text);
    }
    assert_error(generate(&json!({ "model": "two" })).await, 404, "'two' not found").await;
    assert_error(generate(&json!({ "model": "one", "prompt": "x" })).await, 400, "/v1").await;
    served.set_faults(&json!([Fault::SaysAsleep.name()])).await;
    assert_eq!(served.get_json("/api/ps").await, json!({ "models": [] }));
    served.set_faults(&json!([Fault::Refuses.name()])).await;
    assert_error(generate(&json!({ "model": "one" })).await, 500, "refuse").await;
}
