//! The names of requests in a whole rotation: what engines get, and what clients see.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::routing::{get, post};
use axum::{Json, Router};
use poorwill_rotate::config::Config;
use poorwill_rotate::run::{self, Running};
use poorwill_rotation_policy::{ModelId, StageName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Longer than any test takes.
const WATCHDOG: Duration = Duration::from_secs(120);

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(WATCHDOG, test).await.expect("the test hangs") });
}

/// An engine that answers with what it got, but never to a body with `hang`.
async fn engine(number: usize, is_asleep: bool, hangs: mpsc::UnboundedSender<usize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asleep = Arc::new(AtomicBool::new(is_asleep));
    let state = Arc::clone(&asleep);
    let router = Router::new()
        .route("/health", get(|| async {}))
        .route(
            "/is_sleeping",
            get(move || async move { Json(json!({"is_sleeping": state.load(Ordering::Acquire)})) }),
        )
        .route("/wake_up", post(move || async move { asleep.store(false, Ordering::Release) }))
        .fallback(move |body: String| async move {
            if body.contains("hang") {
                hangs.send(number).unwrap();
                std::future::pending::<()>().await;
            }
            Json(json!({"engine": number, "body": body}))
        });
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

struct Rotation {
    running: Running,
    urls: Vec<String>,
    hanging: mpsc::UnboundedReceiver<usize>,
}

impl Rotation {
    /// With an engine for each of `asleep`, whose URLs stand in `text` as `URL0`, `URL1` and so on.
    async fn of(asleep: &[bool], text: &str) -> Self {
        let (hangs, hanging) = mpsc::unbounded_channel();
        let mut urls = Vec::new();
        for (number, is_asleep) in asleep.iter().enumerate() {
            urls.push(engine(number, *is_asleep, hangs.clone()).await);
        }
        let running = run::begin(config(&urls, text), None).await.unwrap();
        let rotation = Self { running, urls, hanging };
        rotation.until(|stages| !stages.contains(&StageName::Unknown)).await;
        rotation
    }

    async fn until(&self, is_so: impl Fn(&[StageName]) -> bool) {
        let settled = [StageName::Unknown, StageName::Asleep, StageName::Ready];
        loop {
            let stages: Vec<_> =
                self.running.service().stages().into_iter().map(|(_, stage)| stage).collect();
            if stages.iter().all(|stage| settled.contains(stage)) && is_so(&stages) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        let (status, text) = send(self.running.front(), &format!("GET {path}"), "", "").await;
        (status, serde_json::from_str(&text).unwrap())
    }

    /// The engine that answers, and what it got.
    async fn ask(&self, body: &str) -> (u64, String) {
        self.ask_as("application/json", "/v1/chat/completions", body).await
    }

    async fn ask_as(&self, kind: &str, path: &str, body: &str) -> (u64, String) {
        let (status, text) =
            send(self.running.front(), &format!("POST {path}"), &format!("Content-Type: {kind}\r\n"), body)
                .await;
        assert_eq!(status, 200, "{body}: {text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        (answer["engine"].as_u64().unwrap(), answer["body"].as_str().unwrap().to_owned())
    }
}

fn config(urls: &[String], text: &str) -> Config {
    let text = urls
        .iter()
        .enumerate()
        .fold(text.to_owned(), |text, (nth, url)| text.replace(&format!("URL{nth}"), url));
    // All models fit at the same time.
    let text = text.replace("canary.kind", "need = \"1GiB\"\ncanary.kind");
    let listeners = "[memory]\nmeasure = \"processes\"\ngpu = \"64GiB\"\n[front]\nlisten = \"127.0.0.1:0\"\n\
                     [control]\nlisten = \"127.0.0.1:0\"\n";
    Config::parse(&format!("{listeners}{text}"), &|_| Err("no secrets here".to_owned())).unwrap()
}

async fn send(to: SocketAddr, line: &str, fields: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(to).await.unwrap();
    stream.write_all(request(line, fields, body).as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn request(line: &str, fields: &str, body: &str) -> String {
    format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{fields}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

const QWEN: &str = r#"
    [[model]]
    name = "qwen"
    aliases = ["q"]
    adapters = ["sql-lora", "org/poems"]
    served_as = "Org/Qwen"
    url = "URL0"
    strip = ["temperature"]
    parameters = { top_k = 1 }
    canary.kind = "none"
    [model.variants."qwen:high"]
    chat_template_kwargs = { reasoning_effort = "high" }
    [model.variants.q]
    top_k = 2
    [model.variants.sql-lora]
    stop = [";"]
"#;

#[test]
fn an_engine_gets_its_own_name_or_that_of_an_adapter() {
    run(async {
        let rotation = Rotation::of(&[false], QWEN).await;
        for (asked, wanted) in [
            (r#"{"model":"qwen", "x":1}"#, r#"{"top_k":1,"model":"Org/Qwen", "x":1}"#),
            (r#"{"temperature":0,"model":"q"}"#, r#"{"top_k":2,"model":"Org/Qwen"}"#),
            (r#"{"model":"sql-lora","temperature":0}"#, r#"{"stop":[";"],"top_k":1,"model":"sql-lora"}"#),
            (r#"{"model":"org/poems"}"#, r#"{"top_k":1,"model":"org/poems"}"#),
            (
                r#"{"top_k":9,"model":"qwen:high"}"#,
                r#"{"chat_template_kwargs":{"reasoning_effort":"high"},"top_k":1,"model":"Org/Qwen"}"#,
            ),
        ] {
            assert_eq!(rotation.ask(asked).await, (0, wanted.to_owned()), "{asked}");
        }
        // Forms have no JSON to change.
        let form = |name: &str| {
            format!("--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{name}\r\n--x--\r\n")
        };
        for (name, wanted) in [("sql-lora", "sql-lora"), ("q", "Org/Qwen")] {
            let kind = "multipart/form-data; boundary=x";
            let got = rotation.ask_as(kind, "/v1/audio/transcriptions", &form(name)).await;
            assert_eq!(got, (0, form(wanted)));
        }
        // Operators may say any name of a model.
        for name in ["qwen", "q", "qwen:high", "sql-lora", "org%2Fpoems"] {
            let line = format!("POST /rotate/models/{name}/pin");
            let (status, text) = send(rotation.running.control(), &line, "", "").await;
            let model: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((status, &model["name"]), (202, &json!("qwen")), "{name}");
            assert_eq!(model["adapters"], json!(["sql-lora", "org/poems"]));
            assert_eq!(model["aliases"], json!(["q", "qwen:high"]));
        }
    });
}

#[test]
fn the_list_shows_every_name_and_what_is_known_of_it() {
    run(async {
        let text = format!(
            "{QWEN}\n{}",
            r#"
            [[model]]
            name = "phi"
            display_name = "Phi 4"
            description = "Small."
            url = "URL1"
            canary.kind = "none"
            [model.metadata]
            max_model_len = 16384
            architecture = { input_modalities = ["text", "image"] }

            [[model]]
            name = "secret"
            aliases = ["secret-alias"]
            listed = false
            url = "URL2"
            canary.kind = "none"

            [[selector]]
            name = "any"
            targets = ["phi", "sql-lora"]
            description = "Any."
            metadata = { max_model_len = 8192 }
            "#
        );
        let rotation = Rotation::of(&[false, true, true], &text).await;
        let (status, list) = rotation.get("/v1/models").await;
        let ids: Vec<_> =
            list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
        assert_eq!(
            (status, ids),
            (200, vec!["qwen", "q", "qwen:high", "sql-lora", "org/poems", "phi", "any"])
        );
        let entry = |nth: usize| {
            let mut entry = list["data"][nth].clone();
            assert!(entry["created"].is_u64());
            entry.as_object_mut().unwrap().remove("created");
            entry
        };
        let common = |id: &str, own: Value| json!({"id": id, "object": "model", "owned_by": "poorwill", "poorwill": own});
        assert_eq!(entry(0), common("qwen", json!({"ready": true, "stage": "ready"})));
        assert_eq!(
            entry(2),
            common("qwen:high", json!({"ready": true, "stage": "ready", "alias_of": "qwen"}))
        );
        assert_eq!(
            entry(4),
            common("org/poems", json!({"ready": true, "stage": "ready", "adapter_of": "qwen"}))
        );
        let mut phi = common("phi", json!({"ready": false, "stage": "asleep"}));
        phi["name"] = "Phi 4".into();
        phi["description"] = "Small.".into();
        phi["max_model_len"] = 16384.into();
        phi["architecture"] = json!({"input_modalities": ["text", "image"]});
        assert_eq!(entry(5), phi);
        let targets = json!({"ready": true, "stage": "ready", "targets": ["phi", "sql-lora"]});
        let mut any = common("any", targets);
        any["description"] = "Any.".into();
        any["max_model_len"] = 8192.into();
        assert_eq!(entry(6), any);
        for name in ["sql-lora", "org/poems", "org%2Fpoems", "qwen:high", "any", "secret", "secret-alias"] {
            let (status, one) = rotation.get(&format!("/v1/models/{name}")).await;
            assert_eq!((status, &one["id"]), (200, &json!(name.replace("%2F", "/"))), "{one}");
        }
        assert_eq!(rotation.ask(r#"{"model":"secret-alias"}"#).await.0, 2);
        let (status, error) = rotation.get("/v1/models/none").await;
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(status, 404);
        assert!(message.ends_with("there are: qwen, sql-lora, org/poems, phi, any"), "{message}");
    });
}

/// Two models, and a selector with these lines.
fn two_models(lines: &str) -> String {
    let model = |name: &str, url: &str| {
        format!(
            "[[model]]\nname = \"{name}\"\nadapters = [\"{name}-lora\"]\nurl = \"{url}\"\ncanary.kind = \"none\"\n"
        )
    };
    format!("{}{}[[selector]]\nname = \"any\"\n{lines}\n", model("a", "URL0"), model("b", "URL1"))
}

#[test]
fn a_selector_chooses_for_each_request() {
    run(async {
        let ask = r#"{"model":"any"}"#;
        let text = two_models("targets = [\"a\", \"b-lora\"]");
        let rotation = Rotation::of(&[true, false], &text).await;
        rotation.until(|stages| stages == [StageName::Asleep, StageName::Ready]).await;
        // The adapter's model is ready.
        assert_eq!(rotation.ask(ask).await, (1, r#"{"model":"b-lora"}"#.to_owned()));
        // Another choice by a changed configuration.
        let changed = two_models("strategy = \"first\"\ntargets = [\"a\", \"b-lora\"]");
        rotation.running.service().reload(config(&rotation.urls, &changed)).await.unwrap();
        assert_eq!(rotation.ask(ask).await, (0, r#"{"model":"a"}"#.to_owned()));
        // Both are ready now.
        rotation.running.service().reload(config(&rotation.urls, &text)).await.unwrap();
        rotation.until(|stages| stages == [StageName::Ready; 2]).await;
        assert_eq!(rotation.ask(ask).await.0, 0);
        // It has no engine of its own to command.
        let (status, _) = send(rotation.running.control(), "POST /rotate/models/any/wake", "", "").await;
        assert_eq!(status, 404);
        assert!(rotation.running.service().find("any").is_none());
        let without = text.split("[[selector]]").next().unwrap();
        rotation.running.service().reload(config(&rotation.urls, without)).await.unwrap();
        assert_eq!(rotation.get("/v1/models/any").await.0, 404);
    });
}

#[test]
fn a_request_counts_for_its_target_until_it_ends() {
    run(async {
        let text = two_models("strategy = \"spillover\"\nrequests = 1\ntargets = [\"a\", \"b\"]");
        let mut rotation = Rotation::of(&[false, false], &text).await;
        rotation.until(|stages| stages == [StageName::Ready; 2]).await;
        let ask = r#"{"model":"any"}"#;
        assert_eq!(rotation.ask(ask).await.0, 0);
        // One by the model's own name counts, too.
        let mut client = TcpStream::connect(rotation.running.front()).await.unwrap();
        let line = "POST /v1/completions";
        let hang = request(line, "Content-Type: application/json\r\n", r#"{"model":"a","prompt":"hang"}"#);
        client.write_all(hang.as_bytes()).await.unwrap();
        assert_eq!(rotation.hanging.recv().await, Some(0));
        for _ in 0..3 {
            assert_eq!(rotation.ask(ask).await.0, 1);
        }
        drop(client);
        while rotation.ask(ask).await.0 != 0 {}
    });
}

/// The answer's status and body.
async fn choose(rotation: &Rotation, body: &str) -> (u16, Value) {
    let (status, text) = send(rotation.running.control(), "POST /rotate/profile", "", body).await;
    (status, serde_json::from_str(&text).unwrap())
}

#[test]
fn the_names_of_a_profile_come_before_all_others() {
    run(async {
        let profiles =
            "[profile.coding]\na = \"b-lora\"\nfast = \"any\"\nb = \"\"\n[profile.other]\nfast = \"b\"\n";
        let text = two_models("targets = [\"a\"]") + profiles;
        let rotation = Rotation::of(&[false, false], &text).await;
        let service = rotation.running.service();
        let body = |name: &str| format!("{{\"model\":\"{name}\"}}");
        assert_eq!(rotation.ask(&body("a")).await, (0, body("a")));
        assert_eq!((rotation.get("/v1/models/fast").await.0, service.profile()), (404, None));

        assert_eq!(choose(&rotation, r#"{"profile": "coding"}"#).await, (200, json!({"profile": "coding"})));
        assert_eq!(rotation.ask(&body("a")).await, (1, body("b-lora")));
        // A stored response is the model's own.
        assert_eq!(service.route_of_model("a").unwrap().model.name, "a");
        assert_eq!(service.route_of_model("b").unwrap().model.name, "b");
        assert!(service.route_of_model("fast").is_none());
        // What a name stands for is not looked up in the profile again.
        assert_eq!(rotation.ask(&body("fast")).await, (0, body("a")));
        assert_eq!(rotation.get("/v1/models/b").await.0, 404);
        let (_, list) = rotation.get("/v1/models").await;
        let names = list["data"].as_array().unwrap().iter();
        let names: Vec<_> =
            names.map(|one| (one["id"].clone(), one["poorwill"]["alias_of"].clone())).collect();
        let own = |name: &str| (json!(name), Value::Null);
        let wanted = [
            own("a-lora"),
            own("b-lora"),
            own("any"),
            (json!("a"), json!("b-lora")),
            (json!("fast"), json!("any")),
        ];
        assert_eq!(names, wanted);
        // Operators mean the models themselves.
        assert_eq!(service.find("a").unwrap().0, ModelId(0));
        let status = service.snapshot().await;
        assert_eq!(status.profile.as_deref(), Some("coding"));

        // It stays while the configuration has it.
        service.reload(config(&rotation.urls, &text)).await.unwrap();
        assert_eq!(rotation.ask(&body("a")).await.0, 1);
        assert_eq!(choose(&rotation, r#"{"profile": "other"}"#).await.0, 200);
        assert_eq!(rotation.ask(&body("fast")).await, (1, body("b")));
        assert_eq!(rotation.ask(&body("a")).await.0, 0);
        for (wrong, status, words) in [
            (r#"{"profile": "none"}"#, 404, "there is no profile `none`; there are: coding, other"),
            ("{}", 400, "{\"profile\": null}"),
            ("", 400, "{\"profile\": \"NAME\"}"),
        ] {
            let (got, error) = choose(&rotation, wrong).await;
            let message = error["error"]["message"].as_str().unwrap();
            assert!(got == status && message.contains(words), "{got} {message}");
        }
        assert_eq!(service.profile().as_deref(), Some("other"));
        assert_eq!(choose(&rotation, r#"{"profile": null}"#).await, (200, json!({"profile": null})));
        assert_eq!(rotation.get("/v1/models/fast").await.0, 404);
        service.set_profile(Some("other")).unwrap();
        let without = text.split("[profile.other]").next().unwrap();
        service.reload(config(&rotation.urls, without)).await.unwrap();
        assert_eq!(service.profile(), None);
    });
}

#[test]
fn no_target_gets_more_than_its_share_at_once() {
    run(async {
        let text = two_models("strategy = \"spillover\"\nrequests = 1\ntargets = [\"a\", \"b\"]");
        let rotation = Rotation::of(&[false, false], &text).await;
        let service = rotation.running.service();
        let held = [AtomicUsize::new(0), AtomicUsize::new(0)];
        // As many as the targets may have, so each has its own whenever both ask.
        let take_turns = || {
            for _ in 0..50_000 {
                let one = service.route("any").unwrap();
                assert_eq!(held[one.id.0].fetch_add(1, Ordering::AcqRel), 0);
                held[one.id.0].fetch_sub(1, Ordering::AcqRel);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(take_turns);
            take_turns();
        });
        assert_eq!(service.route("any").unwrap().id, ModelId(0));
    });
}
