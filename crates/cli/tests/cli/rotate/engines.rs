//! Engines that are not asked for completions, or have another API for their operator than vLLM's.

use serde_json::{Value, json};

use super::fixture::{Fixture, Model, Rotator, until};
use super::http;

/// Others need not wait for one that has answered.
const NO_GRACE: &str = "[model.rules]\ngrace = \"0s\"\n";

/// An engine that serves nothing else, and a request to it with the place of the answer's content.
struct Served {
    model: Model,
    path: &'static str,
    body: Value,
    content: &'static str,
}

impl Served {
    fn new(name: &'static str, api: &'static str) -> Self {
        let messages = json!([{ "role": "user", "content": "Tell me of a tree." }]);
        let (path, body, content) = match api {
            "embeddings" => ("/v1/embeddings", json!({ "input": "a tree" }), "/data/0/embedding"),
            "rerank" => {
                ("/v1/rerank", json!({ "query": "a tree", "documents": ["an oak", "a car"] }), "/results")
            }
            "chat" => ("/v1/chat/completions", json!({ "messages": messages }), "/choices/0/message/content"),
            "messages" => {
                ("/v1/messages", json!({ "messages": messages, "max_tokens": 9 }), "/content/0/text")
            }
            other => panic!("{other} has no request here"),
        };
        let more = vec!["--serves", api, "--tokens-per-s", "2000"];
        let model = Model { more, lines: NO_GRACE.to_owned(), ..Model::new(name) };
        Self { model, path, body, content }
    }

    /// The status of a client's answer, and the content if it is one.
    fn ask(&self, fixture: &Fixture) -> (u16, Value) {
        let mut body = self.body.clone();
        body["model"] = json!(self.model.name);
        let answer = http::ask(fixture.front, "POST", self.path, &[], &body.to_string()).unwrap();
        if answer.status != 200 {
            return (answer.status, Value::Null);
        }
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        (200, body.pointer(self.content).unwrap_or_else(|| panic!("{answer:?}")).clone())
    }
}

fn fixture_of(gpu: &'static str, all: &[Served]) -> Fixture {
    Fixture::new(gpu, all.iter().map(|one| one.model.clone()).collect())
}

fn is_stage(fixture: &Fixture, rotator: &Rotator, name: &str, stage: &str) {
    until(rotator, &format!("{name} is {stage}"), || fixture.now(name)["stage"] == stage);
}

#[test]
fn engines_of_every_kind_take_turns() {
    let mut talk = Served::new("dogwood", "messages");
    // No kind of canary is asked by messages.
    talk.model.lines += "[model.canary]\nkind = \"get\"\npath = \"/health\"\n";
    let all = [
        Served::new("amber", "embeddings"),
        Served::new("birch", "rerank"),
        Served::new("cedar", "chat"),
        talk,
    ];
    let fixture = fixture_of("128MiB", &all);
    let rotator = fixture.start(&[]);
    let [first, second] = [(); 2].map(|()| all.iter().map(|one| one.ask(&fixture)).collect::<Vec<_>>());
    assert!(first.iter().all(|(status, _)| *status == 200), "{first:?}\n{}", rotator.log());
    assert_eq!(first, second, "{}", rotator.log());
    for Served { model: Model { name, .. }, .. } in &all {
        let now = fixture.now(name);
        assert_eq!((&now["starts"], &now["failures"]), (&json!(1), &json!(0)), "{now}\n{}", rotator.log());
    }
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn gibberish_of_vectors_and_scores_is_found_by_the_canary() {
    let all = [Served::new("amber", "embeddings"), Served::new("birch", "rerank")];
    let fixture = fixture_of("512MiB", &all);
    let rotator = fixture.start(&[]);
    for (one, found) in all.iter().zip(["its embedding has a cosine of", "its scores are"]) {
        let name = one.model.name;
        let right = one.ask(&fixture);
        assert_eq!(right.0, 200, "{}", rotator.log());
        one.model.faults(&["gibberish"]);
        fixture.order(&["sleep", name]).succeeded();
        is_stage(&fixture, &rotator, name, "asleep");
        // The engine is started again, and has no fault then.
        assert_eq!(one.ask(&fixture), right, "{}", rotator.log());
        assert_eq!(fixture.now(name)["starts"], 2, "{}", rotator.log());
        assert!(rotator.log().contains(found), "{}", rotator.log());
    }
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_sleeps_by_its_own_calls_or_is_stopped_and_started() {
    let mut fixture = Fixture::of_two();
    let [amber, birch] = &mut fixture.models[..] else { panic!("two models") };
    amber.more = vec!["--like", "ollama"];
    amber.lines = "engine = \"http\"\n[model.http]\nhealth = \"/api/version\"\n\
                   sleep = { call = \"POST /api/generate\", body = { model = \"amber\", keep_alive = 0 } }\n\
                   wake = { call = \"POST /api/generate\", body = { model = \"amber\" } }\n\
                   asleep = { call = \"GET /api/ps\", at = \"/models\", is = [] }\n"
        .to_owned()
        + NO_GRACE;
    birch.more = vec!["--like", "llama-server"];
    let log = fixture.folder.join("stopped");
    fixture.models[1].lines = format!(
        "engine = \"http\"\nstop_command = [\"sh\", \"-c\", \"echo $0 >> {}; kill -s INT $0\", \"${{PID}}\"]\n{NO_GRACE}",
        log.display()
    );
    let rotator = fixture.start(&[]);
    let mut texts = Vec::new();
    for name in ["amber", "birch", "amber", "birch", "amber"] {
        texts.push(fixture.say(name, "Tell me of a tree."));
    }
    assert!(texts[0] == texts[2] && texts[2] == texts[4] && texts[1] == texts[3], "{texts:?}");
    for (name, starts) in [("amber", 1), ("birch", 2)] {
        let now = fixture.now(name);
        assert_eq!((&now["engine"], &now["starts"]), (&json!("http"), &json!(starts)), "{}", rotator.log());
        assert_eq!(now["failures"], 0, "{}", rotator.log());
    }
    assert_eq!(fixture.now("birch")["stage"], "cold");
    let stops = std::fs::read_to_string(log).unwrap();
    assert_eq!(stops.lines().count(), 2, "{stops}");
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_of_another_kind_than_before_serves_once_the_configuration_says_so() {
    let before = Served::new("amber", "embeddings");
    let mut fixture = fixture_of("512MiB", std::slice::from_ref(&before));
    let rotator = fixture.start(&[]);
    assert_eq!(before.ask(&fixture).0, 200, "{}", rotator.log());
    rotator.end();

    let after = Served::new("amber", "chat");
    fixture.models[0].more.clone_from(&after.model.more);
    let rotator = fixture.start(&[]);
    assert_eq!(after.ask(&fixture).0, 503, "{}", rotator.log());
    let log = rotator.log();
    for words in
        ["no longer serves", "/v1/embeddings: it answered 404", "amber.first-answer", "[model.canary]"]
    {
        assert!(log.contains(words), "{words}: {log}");
    }
    fixture.models[0].lines += "[model.canary]\nkind = \"chat\"\n";
    fixture.write();
    fixture.order(&["reload"]).succeeded();
    until(&rotator, "it is served", || after.ask(&fixture).0 == 200);
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn declared_needs_decide_who_is_awake() {
    let mut fixture = Fixture::of_two();
    fixture.models.iter_mut().for_each(|model| model.lines = NO_GRACE.to_owned());
    let config = fixture.config().replace("\"processes\"", "\"declared\"");
    fixture.folder.write("rotation.toml", &config);
    let rotator = fixture.start_with(&config, &[]);
    for (asked, other) in [("amber", "birch"), ("birch", "amber"), ("amber", "birch")] {
        fixture.say(asked, "Tell me of a tree.");
        is_stage(&fixture, &rotator, asked, "ready");
        let stage = &fixture.now(other)["stage"];
        assert!(
            ["cold", "asleep"].contains(&stage.as_str().unwrap()),
            "{other} is {stage}\n{}",
            rotator.log()
        );
        let gpu = &fixture.status()["gpus"][0];
        assert_eq!(gpu["is_measured"], json!(false), "{gpu}");
        assert_eq!((&gpu["total_bytes"], &gpu["free_bytes"]), (&json!(128 << 20), &json!(48 << 20)), "{gpu}");
    }
    let shown = fixture.order(&["status"]).succeeded();
    assert!(shown.contains("declared, not measured"), "{shown}");
    assert!(rotator.end().contains("nothing is measured, and needs are believed"));
    fixture.assert_empty();
}
