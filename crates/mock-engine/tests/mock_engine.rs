//! The mock engine over real sockets: its paths, its streams, its memory, and each of its faults.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod apis;
mod client;

use std::num::NonZeroU32;
use std::time::Duration;

use http::{Method, StatusCode};
use poorwill_mock_engine::{Ended, Fault, FaultSpec, MockEngine, MockEngineError, serve};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::client::{Client, RequestBuilder, Response};

const BYTES: u64 = 8 << 20;

/// Waited for what must not happen: without the defect, it would happen much sooner.
const SETTLE: Duration = Duration::from_millis(200);

/// Limit for what must happen: nothing takes as long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A mock engine served in this process.
struct Served {
    url: String,
    client: Client,
    end: Option<oneshot::Sender<()>>,
    ended: JoinHandle<Result<Ended, MockEngineError>>,
}

impl Served {
    async fn without_faults() -> Self {
        Self::with_faults(&[]).await
    }

    async fn with_faults(faults: &[Fault]) -> Self {
        Self::of(MockEngine { faults: faults.iter().copied().map(FaultSpec::always).collect(), ..fast() })
            .await
    }

    async fn of(options: MockEngine) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (end, shutdown) = oneshot::channel();
        let ended = tokio::spawn(serve(options, listener, async {
            // A failed test drops the sender.
            let _ = shutdown.await;
        }));
        Self { url, client: Client::new(), end: Some(end), ended }
    }

    async fn get(&self, path: &str) -> Response {
        self.client.request(Method::GET, &format!("{}{path}", self.url)).send().await.unwrap()
    }

    async fn get_json(&self, path: &str) -> Value {
        self.get(path).await.json().await
    }

    fn posting(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.request(Method::POST, &format!("{}{path}", self.url)).json(body)
    }

    async fn post(&self, path: &str, body: &Value) -> Response {
        self.posting(path, body).send().await.unwrap()
    }

    /// A command without a body, which must succeed.
    async fn command(&self, path: &str) -> Value {
        let answer = self.client.request(Method::POST, &format!("{}{path}", self.url)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        answer.json().await
    }

    async fn cycle(&self, level: u8) {
        self.command(&format!("/sleep?level={level}")).await;
        self.command("/wake_up").await;
    }

    async fn is_sleeping(&self) -> bool {
        self.get_json("/is_sleeping").await["is_sleeping"].as_bool().unwrap()
    }

    /// The text that it generates for a prompt.
    async fn text(&self) -> String {
        let answer = self.post("/v1/completions", &prompt(12)).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let answer: Value = answer.json().await;
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    async fn set_faults(&self, faults: &Value) -> Response {
        self.client
            .request(Method::PUT, &format!("{}/mock/faults", self.url))
            .json(faults)
            .send()
            .await
            .unwrap()
    }

    /// The value of the metrics line that contains `part`.
    async fn metric(&self, part: &str) -> u64 {
        let text = self.get("/metrics").await.text().await;
        let line = text.lines().find(|line| !line.starts_with('#') && line.contains(part));
        let value = line.and_then(|line| line.rsplit(' ').next()).unwrap_or_else(|| panic!("{part}: {text}"));
        value.parse().unwrap()
    }

    async fn held_bytes(&self) -> u64 {
        self.metric("mock:held_bytes").await
    }

    /// Waits until a metric has this value.
    async fn until(&self, part: &str, value: u64) {
        let is_so = async {
            while self.metric(part).await != value {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIMEOUT, is_so).await.unwrap_or_else(|_| panic!("{part} is never {value}"));
    }

    /// Shuts it down, and returns how it ended.
    async fn ended(mut self) -> Ended {
        drop(self.end.take());
        timeout(TIMEOUT, self.ended).await.unwrap().unwrap().unwrap()
    }

    /// How it ended without a shutdown.
    async fn crashed(self) -> Ended {
        timeout(TIMEOUT, self.ended).await.unwrap().unwrap().unwrap()
    }
}

fn fast() -> MockEngine {
    MockEngine { tokens_per_s: NonZeroU32::new(100_000).unwrap(), ..MockEngine::new("one", BYTES) }
}

fn prompt(tokens: u32) -> Value {
    json!({ "model": "one", "prompt": "Once upon a time", "max_tokens": tokens })
}

/// A request that lasts as long as a test.
fn long(stream: bool) -> Value {
    json!({ "prompt": "x", "max_tokens": 30_000, "ignore_eos": true, "stream": stream })
}

/// The values of a stream's `data:` lines, and whether it ended with `[DONE]`.
fn events(stream: &str) -> (Vec<Value>, bool) {
    assert!(stream.ends_with("\n\n"), "{stream}");
    let data: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let is_done = data.last() == Some(&"[DONE]");
    let values =
        data.iter().filter(|data| **data != "[DONE]").map(|data| serde_json::from_str(data).unwrap());
    (values.collect(), is_done)
}

async fn assert_error(answer: Response, status: u16, word: &str) {
    assert_eq!(answer.status().as_u16(), status, "{word}");
    let body: Value = answer.json().await;
    let error = &body["error"];
    assert_eq!(error["code"], status, "{body}");
    assert!(error["type"].is_string() && error.as_object().unwrap().contains_key("param"), "{body}");
    assert!(error["message"].as_str().unwrap().contains(word), "`{word}` is not in: {body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_reports_its_model() {
    let served = Served::without_faults().await;
    assert_eq!(served.get("/health").await.status(), StatusCode::OK);
    let models = served.get_json("/v1/models").await;
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("one")));
    assert!(!served.is_sleeping().await);
    assert!(served.held_bytes().await >= BYTES);
    for (part, value) in [
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 0),
        ("sleep_state=\"awake\"", 1),
        ("sleep_state=\"discard_all\"", 0),
    ] {
        assert_eq!(served.metric(part).await, value, "{part}");
    }
    served.text().await;
    assert_eq!(served.metric("vllm:generation_tokens_total").await, 12);
    assert_eq!(served.metric("vllm:prompt_tokens_total").await, 4);
    assert_eq!(served.metric("finished_reason=\"length\"").await, 1);
    assert_eq!(served.ended().await, Ended::Shutdown);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_releases_all_and_a_wake_restores_it() {
    let served = Served::without_faults().await;
    let text = served.text().await;
    for mode in ["", "&mode=abort", "&mode=wait", "&mode=keep"] {
        assert_eq!(
            served.command(&format!("/sleep?level=1{mode}")).await,
            json!({ "status": "sleeping", "level": 1 })
        );
        assert!(served.is_sleeping().await);
        assert_eq!((served.held_bytes().await, served.metric("weights_offloaded").await), (0, 1));
        // A second sleep does nothing, and reports nothing.
        served.command("/sleep").await;
        assert_eq!(served.command("/wake_up").await, json!({ "status": "awake", "tags": null }));
        assert!(!served.is_sleeping().await && served.held_bytes().await >= BYTES);
        served.command("/wake_up").await;
        assert_eq!(served.text().await, text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_of_level_two_are_reloaded_or_missing() {
    let served = Served::without_faults().await;
    let text = served.text().await;
    served.command("/sleep?level=2").await;
    assert_eq!((served.held_bytes().await, served.metric("discard_all").await), (0, 1));
    let reload = json!({ "method": "reload_weights" });
    assert_error(served.post("/collective_rpc", &reload).await, 500, "wake_up?tags=weights").await;
    served.command("/wake_up").await;
    assert!(!served.is_sleeping().await && served.held_bytes().await >= BYTES);
    assert_ne!(served.text().await, text);
    let answer: Value = served.post("/collective_rpc", &reload).await.json().await;
    assert_eq!(answer, json!({ "results": [null] }));
    assert_eq!(served.text().await, text);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_wakes_by_tags() {
    let served = Served::without_faults().await;
    let text = served.text().await;
    served.command("/sleep?level=2").await;
    let woken = served.command("/wake_up?tags=weights").await;
    assert_eq!(woken, json!({ "status": "sleeping", "tags": ["weights"] }));
    let held_bytes = served.held_bytes().await;
    assert!((BYTES / 2..BYTES).contains(&held_bytes), "{held_bytes}");
    assert!(served.is_sleeping().await);
    served.post("/collective_rpc", &json!({ "method": "reload_weights" })).await;
    assert_error(served.post("/v1/completions", &prompt(1)).await, 503, "asleep").await;
    // Neither sleeps, so vLLM does nothing.
    assert_eq!(served.command("/wake_up?tags=weights").await["status"], "sleeping");
    assert_eq!(served.command("/wake_up?tags=kv_cache").await["status"], "awake");
    assert_eq!(served.text().await, text);
    served.command("/sleep?level=0").await;
    assert!(served.is_sleeping().await && served.held_bytes().await >= BYTES);
    assert_eq!(served.command("/wake_up?tags=scheduling").await["status"], "awake");
    served.command("/sleep").await;
    assert_eq!(served.command("/wake_up?tags=weights&tags=kv_cache").await["status"], "awake");
    assert_eq!(served.text().await, text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleeping_engine_refuses_requests() {
    let served = Served::without_faults().await;
    served.command("/sleep").await;
    for (path, body) in [
        ("/v1/completions", prompt(1)),
        ("/v1/completions", long(true)),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "x" }] })),
        ("/v1/responses", json!({ "input": "x", "stream": true })),
        ("/v1/embeddings", json!({ "input": "x" })),
    ] {
        assert_error(served.post(path, &body).await, 503, "asleep").await;
    }
    assert_eq!(served.get("/health").await.status(), StatusCode::OK);
    assert_eq!(served.get("/v1/models").await.status(), StatusCode::OK);
    assert_eq!(served.metric("vllm:num_requests_waiting").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_request_gives_the_same_bytes() {
    let [first, second] = [Served::without_faults().await, Served::without_faults().await];
    for (path, mut body) in [
        ("/v1/completions", prompt(9)),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "x" }] })),
        ("/v1/responses", json!({ "input": "x" })),
        ("/v1/embeddings", json!({ "input": "x" })),
    ] {
        for is_streamed in [false, true] {
            body["stream"] = json!(is_streamed);
            body["seed"] = json!(17);
            let bytes = first.post(path, &body).await.bytes().await;
            second.cycle(1).await;
            for served in [&first, &second] {
                assert_eq!(served.post(path, &body).await.bytes().await, bytes, "{path}");
            }
        }
    }
    let other = Served::of(MockEngine { model: "two".into(), ..fast() }).await;
    let answer: Value = other.post("/v1/completions", &long(false)).await.json().await;
    assert_eq!(answer["model"], "two");
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert!(!text.starts_with(&first.text().await));
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_openais() {
    let served = Served::without_faults().await;
    let ask = |body: Value| served.posting("/v1/completions", &body).header("x-request-id", "r").send();
    let whole: Value = ask(prompt(3)).await.unwrap().json().await;
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(
        whole,
        json!({
            "id": "cmpl-r", "object": "text_completion", "created": 0, "model": "one",
            "choices": [{ "index": 0, "text": text, "logprobs": null, "finish_reason": "length" }],
            "usage": { "prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7 },
        })
    );
    let mut body = prompt(3);
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let stream = ask(body).await.unwrap();
    assert_eq!(stream.headers()["content-type"], "text/event-stream; charset=utf-8");
    // Byte by byte.
    let words: Vec<&str> = text.split(' ').collect();
    let chunk = |choices: &str, usage: &str| {
        format!(
            "data: {{\"choices\":[{choices}],\"created\":0,\"id\":\"cmpl-r\",\"model\":\"one\",\
             \"object\":\"text_completion\"{usage}}}\n\n"
        )
    };
    let token = |text: String, finish: &str| {
        let choice =
            format!("{{\"finish_reason\":{finish},\"index\":0,\"logprobs\":null,\"text\":\"{text}\"}}");
        chunk(&choice, "")
    };
    let expected = [
        token(words[0].to_owned(), "null"),
        token(format!(" {}", words[1]), "null"),
        token(format!(" {}", words[2]), "\"length\""),
        chunk("", ",\"usage\":{\"completion_tokens\":3,\"prompt_tokens\":4,\"total_tokens\":7}"),
        "data: [DONE]\n\n".to_owned(),
    ];
    assert_eq!(stream.text().await, expected.concat());

    let several = json!({ "prompt": ["a b", "c"], "max_tokens": 1_000 });
    let several: Value = served.post("/v1/completions", &several).await.json().await;
    let choices = several["choices"].as_array().unwrap();
    assert_eq!((choices.len(), &several["usage"]["prompt_tokens"]), (2, &json!(3)));
    assert!(choices.iter().all(|choice| choice["finish_reason"] == "stop"));
    assert_ne!(choices[0]["text"], choices[1]["text"]);
    for tokens in [json!([1, 2, 3]), json!([[1, 2], [3]])] {
        let body = json!({ "prompt": tokens });
        let answer: Value = served.post("/v1/completions", &body).await.json().await;
        assert_eq!(answer["usage"]["prompt_tokens"], 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_are_openais() {
    let served = Served::without_faults().await;
    let part = json!({ "type": "text", "text": "who are you" });
    let mut body = json!({ "model": "one", "messages": [{ "role": "user", "content": [part] }] });
    let whole: Value = served.post("/v1/chat/completions", &body).await.json().await;
    let choice = &whole["choices"][0];
    assert_eq!((&whole["object"], &choice["finish_reason"]), (&json!("chat.completion"), &json!("stop")));
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(whole["usage"]["prompt_tokens"], 6);
    body["stream"] = json!(true);
    let stream = served.post("/v1/chat/completions", &body).await.text().await;
    let (events, is_done) = events(&stream);
    assert!(is_done && events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let output: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(choice["message"]["content"], output);
    let finishes: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    let (last, before) = finishes.split_last().unwrap();
    assert!(*last == "stop" && before.iter().all(|finish| finish.is_null()));
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_openais() {
    let served = Served::without_faults().await;
    let mut body = json!({ "input": [{ "role": "user", "content": "x" }], "instructions": "be brief" });
    let whole: Value = served.post("/v1/responses", &body).await.json().await;
    let text = &whole["output"][0]["content"][0]["text"];
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert!(text.as_str().unwrap().len() > 20 && whole["usage"]["output_tokens"].as_u64().unwrap() > 20);
    body["stream"] = json!(true);
    let stream = served.post("/v1/responses", &body).await.text().await;
    let (events, is_done) = events(&stream);
    assert!(!is_done, "this interface has no [DONE]");
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
        assert!(stream.contains(&format!("event: {}\n", event["type"].as_str().unwrap())));
    }
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    assert_eq!(events[0]["response"]["status"], "in_progress");
    let output: String =
        of("response.output_text.delta").iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!((text, &of("response.output_text.done")[0]["text"]), (&json!(output), text));
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["usage"]), (&json!("response.completed"), &whole["usage"]));
    assert_eq!(&last["response"]["output"][0]["content"][0]["text"], text);
    body["max_output_tokens"] = json!(2);
    let stream = served.post("/v1/responses", &body).await.text().await;
    assert!(stream.contains("event: response.incomplete\n") && stream.contains("max_output_tokens"));
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_are_openais() {
    let served = Served::without_faults().await;
    let mut body = json!({ "input": ["a", "b c"] });
    let floats: Value = served.post("/v1/embeddings", &body).await.json().await;
    let numbers = |at: usize| floats["data"][at]["embedding"].as_array().unwrap().clone();
    assert_eq!((numbers(0).len(), &floats["usage"]["total_tokens"]), (32, &json!(3)));
    assert_ne!(numbers(0), numbers(1));
    body["encoding_format"] = json!("base64");
    let coded: Value = served.post("/v1/embeddings", &body).await.json().await;
    // 32 numbers of 4 bytes, in threes.
    assert_eq!(coded["data"][1]["embedding"].as_str().unwrap().len(), 172);
    served.command("/sleep?level=2").await;
    served.command("/wake_up").await;
    let corrupt: Value = served.post("/v1/embeddings", &body).await.json().await;
    assert_ne!(corrupt["data"], coded["data"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_get_an_explanation() {
    let served = Served::without_faults().await;
    let chat = "/v1/chat/completions";
    for (path, body, status, word) in [
        ("/v1/completions", "", 400, "cannot be read"),
        ("/v1/completions", r#"{"prompt": "#, 400, "cannot be read"),
        ("/v1/completions", "[1]", 400, "cannot be read"),
        ("/v1/completions", "{}", 400, "prompt"),
        ("/v1/completions", r#"{"prompt": []}"#, 400, "prompt"),
        ("/v1/completions", r#"{"prompt": 7}"#, 400, "cannot be read"),
        ("/v1/completions", r#"{"prompt": "x", "max_tokens": -1}"#, 400, "-1"),
        ("/v1/completions", r#"{"prompt": "x", "max_tokens": 0}"#, 400, "at least 1"),
        ("/v1/completions", r#"{"prompt": "x", "max_tokens": 40000}"#, 400, "32768"),
        ("/v1/completions", r#"{"prompt": "x", "n": 2}"#, 400, "one choice"),
        ("/v1/completions", r#"{"prompt": "x", "model": "two"}"#, 404, "`two` does not exist"),
        (chat, r#"{"messages": []}"#, 400, "messages"),
        (chat, r#"{"messages": [{"content": "x"}]}"#, 400, "role"),
        (chat, r#"{"messages": "x"}"#, 400, "cannot be read"),
        ("/v1/responses", r#"{"input": ""}"#, 400, "input"),
        ("/v1/embeddings", r#"{"input": "x", "encoding_format": "hex"}"#, 400, "hex"),
        ("/collective_rpc", "{}", 400, "method"),
        ("/collective_rpc", r#"{"method": "x"}"#, 500, "`x`"),
        ("/sleep?level=3", "", 400, "level"),
        ("/sleep?mode=now", "", 400, "mode"),
        ("/v1/nothing", "", 404, "/v1/nothing"),
        ("/health", "", 405, "POST"),
    ] {
        let request =
            served.client.request(Method::POST, &format!("{}{path}", served.url)).body(body).send().await;
        assert_error(request.unwrap(), status, word).await;
    }
    assert!(!served.is_sleeping().await);
    assert_eq!(served.metric("vllm:num_requests_running").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_ends_when_its_client_disconnects() {
    let slow = MockEngine { tokens_per_s: NonZeroU32::new(20).unwrap(), ..fast() };
    let served = Served::of(slow).await;
    let mut stream = served.post("/v1/completions", &long(true)).await;
    assert!(stream.chunk().await.unwrap().unwrap().starts_with(b"data: {"));
    assert_eq!(served.metric("vllm:num_requests_running").await, 1);
    drop(stream);
    served.until("mock:clients_gone_total", 1).await;
    served.until("vllm:num_requests_running", 0).await;
    let waiting = tokio::spawn(served.posting("/v1/completions", &long(false)).send());
    served.until("vllm:num_requests_running", 1).await;
    waiting.abort();
    served.until("mock:clients_gone_total", 2).await;
    assert_eq!(served.metric("finished_reason=\"abort\"").await, 2);
    let generated = served.metric("vllm:generation_tokens_total").await;
    sleep(SETTLE).await;
    assert_eq!(served.metric("vllm:generation_tokens_total").await, generated);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_aborts_requests_or_waits_for_them() {
    let paced = MockEngine { tokens_per_s: NonZeroU32::new(200).unwrap(), ..fast() };
    let served = Served::of(paced).await;
    let some = json!({ "prompt": "x", "max_tokens": 50, "ignore_eos": true, "stream": true });
    for (mode, body, finish) in [("abort", long(true), "abort"), ("wait", some, "length")] {
        let mut stream = served.post("/v1/completions", &body).await;
        let begun = stream.chunk().await.unwrap().unwrap();
        served.command(&format!("/sleep?mode={mode}")).await;
        assert!(served.is_sleeping().await && served.held_bytes().await == 0);
        assert_eq!(served.metric("vllm:num_requests_running").await, 0);
        let rest = stream.text().await;
        let (events, is_done) = events(&(std::str::from_utf8(&begun).unwrap().to_owned() + &rest));
        let last = &events.last().unwrap()["choices"][0]["finish_reason"];
        assert_eq!((last, is_done), (&json!(finish), true), "{mode}");
        assert!(mode == "abort" || events.len() == 50);
        served.command("/wake_up").await;
    }
    assert_eq!(served.metric("mock:clients_gone_total").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_that_keeps_requests_lets_them_continue() {
    let paced = MockEngine { tokens_per_s: NonZeroU32::new(200).unwrap(), ..fast() };
    let served = Served::of(paced).await;
    let mut stream = served.post("/v1/completions", &long(true)).await;
    let mut output = stream.chunk().await.unwrap().unwrap().to_vec();
    served.command("/sleep?mode=keep").await;
    assert_eq!((served.held_bytes().await, served.metric("vllm:num_requests_running").await), (0, 1));
    let generated = served.metric("vllm:generation_tokens_total").await;
    sleep(SETTLE).await;
    assert_eq!(served.metric("vllm:generation_tokens_total").await, generated);
    served.command("/wake_up").await;
    let count = |output: &[u8]| std::str::from_utf8(output).unwrap().matches("data: ").count();
    while u64::try_from(count(&output)).unwrap() < generated + 10 {
        output.extend(timeout(TIMEOUT, stream.chunk()).await.unwrap().unwrap().unwrap());
    }
    let (events, _) = events(std::str::from_utf8(&output).unwrap());
    let output: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    let undisturbed = json!({ "prompt": "x", "max_tokens": events.len(), "ignore_eos": true });
    let other: Value =
        Served::without_faults().await.post("/v1/completions", &undisturbed).await.json().await;
    assert_eq!(other["choices"][0]["text"], output);
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_are_set_at_run_time() {
    let served = Served::without_faults().await;
    assert_eq!(served.get_json("/mock/faults").await, json!([]));
    let faults = json!(["says-asleep", "slow=0.5"]);
    assert_eq!(served.set_faults(&faults).await.json::<Value>().await, faults);
    assert_eq!(served.get_json("/mock/faults").await, faults);
    assert!(served.is_sleeping().await);
    for invalid in [json!(["says-awake"]), json!(["slow=2"]), json!({}), json!([1])] {
        assert_eq!(served.set_faults(&invalid).await.status(), StatusCode::BAD_REQUEST);
    }
    assert_error(served.set_faults(&json!(["x"])).await, 400, "keeps-memory").await;
    assert_eq!(served.get_json("/mock/faults").await, faults);
    served.set_faults(&json!([])).await;
    assert!(!served.is_sleeping().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_seed_injects_the_same_faults() {
    let mut rows = Vec::new();
    for seed in [3, 3, 4] {
        let faults = vec![FaultSpec::with_probability(Fault::Refuses, 0.5).unwrap()];
        let served = Served::of(MockEngine { faults, seed, ..fast() }).await;
        let mut row = Vec::new();
        for _ in 0..32 {
            let answer =
                served.client.request(Method::POST, &format!("{}/wake_up", served.url)).send().await.unwrap();
            row.push(answer.status().as_u16());
        }
        rows.push(row);
    }
    assert!(rows[0] == rows[1] && rows[0] != rows[2]);
    assert!(rows[0].contains(&200) && rows[0].contains(&500));
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_memory() {
    for (fault, asleep_bytes) in [(Fault::KeepsMemory, BYTES), (Fault::KeepsSome, BYTES / 2)] {
        let served = Served::with_faults(&[fault]).await;
        let text = served.text().await;
        served.command("/sleep").await;
        assert!(served.is_sleeping().await);
        assert_eq!(served.held_bytes().await, asleep_bytes, "{fault}");
        served.command("/wake_up").await;
        assert_eq!((served.held_bytes().await, served.text().await), (BYTES, text), "{fault}");
    }
    let served = Served::with_faults(&[Fault::Leaks]).await;
    for cycles in 1..=3 {
        served.cycle(1).await;
        assert_eq!(served.metric("mock:leaked_bytes").await, cycles * (4 << 20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_waking() {
    let served = Served::without_faults().await;
    let text = served.text().await;
    let wake_with = async |fault: Fault| {
        served.command("/sleep").await;
        served.set_faults(&json!([fault.name()])).await;
        assert_eq!(served.command("/wake_up").await["status"], "awake", "{fault}");
    };
    wake_with(Fault::WakesByHalf).await;
    assert!(served.is_sleeping().await && served.held_bytes().await == BYTES / 2);
    assert_error(served.post("/v1/completions", &prompt(1)).await, 503, "asleep").await;
    for (fault, held_bytes) in [(Fault::WakesEmpty, 0), (Fault::Gibberish, BYTES)] {
        served.set_faults(&json!([])).await;
        served.command("/wake_up").await;
        wake_with(fault).await;
        assert!(!served.is_sleeping().await);
        assert_eq!(served.held_bytes().await, held_bytes, "{fault}");
        let output = served.text().await;
        assert!(
            !text.split(' ').any(|word| output.split(' ').any(|other| other == word)),
            "{fault}: {output}"
        );
    }
    // One cycle without faults restores the text.
    served.set_faults(&json!([])).await;
    served.cycle(1).await;
    assert_eq!(served.text().await, text);
    // Reloaded weights are wrong, too.
    served.set_faults(&json!(["gibberish"])).await;
    served.cycle(2).await;
    served.post("/collective_rpc", &json!({ "method": "reload_weights" })).await;
    assert_ne!(served.text().await, text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_does_nothing() {
    let served = Served::with_faults(&[Fault::Refuses]).await;
    for path in ["/sleep", "/wake_up"] {
        assert_error(served.post(path, &json!({})).await, 500, "refuse").await;
    }
    assert!(!served.is_sleeping().await && served.held_bytes().await == BYTES);
    served.text().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unhealthy_engine_says_so() {
    let served = Served::with_faults(&[Fault::Unhealthy]).await;
    assert_eq!(served.get("/health").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_error(served.post("/v1/completions", &prompt(1)).await, 500, "device has failed").await;
    served.set_faults(&json!([])).await;
    assert_eq!(served.get("/health").await.status(), StatusCode::OK);
    served.text().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_may_answer_requests_and_not_its_health() {
    let served = Served::with_faults(&[Fault::HangsInHealth]).await;
    let mut health =
        tokio::spawn(served.client.request(Method::GET, &format!("{}/health", served.url)).send());
    served.until("fault=\"hangs-in-health\"", 1).await;
    served.text().await;
    assert!(timeout(SETTLE, &mut health).await.is_err());
    served.set_faults(&json!([])).await;
    assert_eq!(health.await.unwrap().unwrap().status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hang_ends_when_its_fault_is_cleared() {
    for (fault, path) in [
        (Fault::HangsInSleep, "/sleep"),
        (Fault::HangsInWake, "/wake_up"),
        (Fault::HangsInAnswer, "/v1/completions"),
        (Fault::HangsInAnswer, "/v1/embeddings"),
    ] {
        let served = Served::with_faults(&[fault]).await;
        let body = json!({ "prompt": "x", "input": "x", "max_tokens": 3 });
        let mut request = tokio::spawn(served.posting(path, &body).send());
        served.until(&format!("fault=\"{fault}\""), 1).await;
        assert!(timeout(SETTLE, &mut request).await.is_err(), "{fault} answers");
        assert_eq!(served.get("/health").await.status(), StatusCode::OK);
        assert!(!served.is_sleeping().await);
        served.set_faults(&json!([])).await;
        let answer = timeout(TIMEOUT, request).await.unwrap().unwrap().unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{fault}");
        assert_eq!(served.is_sleeping().await, fault == Fault::HangsInSleep);
    }
    // A sleep completes even if its client disconnects.
    let served = Served::with_faults(&[Fault::HangsInSleep]).await;
    let request = tokio::spawn(served.posting("/sleep", &json!({})).send());
    served.until("fault=\"hangs-in-sleep\"", 1).await;
    request.abort();
    served.set_faults(&json!([])).await;
    served.until("mock:held_bytes", 0).await;
}

// On one thread: earlier tokens are sent before the crash.
#[tokio::test]
async fn a_crash_breaks_the_connections() {
    let served = Served::with_faults(&[Fault::CrashesInStream]).await;
    let body = json!({ "prompt": "x", "max_tokens": 20, "stream": true });
    let mut stream = served.post("/v1/completions", &body).await;
    let mut output = Vec::new();
    let is_broken = loop {
        match stream.chunk().await {
            Ok(Some(chunk)) => output.extend(chunk),
            Ok(None) => break false,
            Err(_) => break true,
        }
    };
    let (events, is_done) = events(std::str::from_utf8(&output).unwrap());
    assert!(is_broken && !is_done && (1..20).contains(&events.len()), "{events:?}");
    let url = served.url.clone();
    assert_eq!(served.crashed().await, Ended::Crashed(Fault::CrashesInStream));
    assert!(Client::new().request(Method::GET, &url).send().await.is_err());

    for (fault, path) in [(Fault::CrashesInSleep, "/sleep"), (Fault::CrashesInWake, "/wake_up")] {
        let served = Served::without_faults().await;
        if fault == Fault::CrashesInWake {
            served.command("/sleep").await;
        }
        served.set_faults(&json!([fault.name()])).await;
        assert!(served.posting(path, &json!({})).send().await.is_err(), "{fault}");
        assert_eq!(served.crashed().await, Ended::Crashed(fault));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_requests_end() {
    let paced = MockEngine { tokens_per_s: NonZeroU32::new(200).unwrap(), grace: TIMEOUT, ..fast() };
    let mut served = Served::of(paced).await;
    let body = json!({ "prompt": "x", "max_tokens": 20, "stream": true });
    let mut stream = served.post("/v1/completions", &body).await;
    stream.chunk().await.unwrap();
    drop(served.end.take());
    assert!(stream.text().await.ends_with("data: [DONE]\n\n"));
    assert_eq!(served.ended().await, Ended::Shutdown);

    let served = Served::of(MockEngine { grace: Duration::ZERO, ..fast() }).await;
    served.set_faults(&json!(["hangs-in-answer"])).await;
    let request = tokio::spawn(served.posting("/v1/completions", &prompt(1)).send());
    served.until("vllm:num_requests_running", 1).await;
    assert_eq!(served.ended().await, Ended::Shutdown);
    assert!(request.await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn too_little_memory_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = serve(MockEngine::new("one", 1), listener, std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("cannot hold 1 B"), "{error}");
}
