//! The SGLang adapter, with a mock that ends like the real engine on requests that it cannot handle.

use std::sync::{Arc, Mutex};

use poorwill_rotate::config::EngineKind::Sglang;
use poorwill_rotate::engine::{Engine, EngineError, engine_of};
use poorwill_rotation_policy::EngineState;
use serde_json::{Value, json};

use super::script::{Received, Script, Scripted, completion, model, nowhere, ok};

/// The mock's state.
#[derive(Debug)]
pub(crate) struct State {
    version: String,
    pub(crate) has_memory: bool,
    has_weights: bool,
    /// Whether weights are in host memory, too.
    has_backup: bool,
    /// A request ended it.
    pub(crate) has_ended: bool,
    /// How many more flushes it refuses.
    busy: usize,
    /// Whether it knows only the paths of older versions.
    is_older: bool,
    /// Its start settings.
    settings: Value,
    /// Which request from now on fails, and how.
    pub(crate) fault: Option<(usize, Fault)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Refused,
    /// It acts, and answers with an error.
    DoneAndRefused,
    NoAnswer,
    DoneAndNoAnswer,
    /// It acts, and its answer breaks off.
    DoneAndBroken,
}

impl State {
    pub(crate) fn new() -> Self {
        Self {
            version: "default".to_owned(),
            has_memory: true,
            has_weights: true,
            has_backup: true,
            has_ended: false,
            busy: 0,
            is_older: false,
            settings: json!({
                "enable_memory_saver": true, "enable_weights_cpu_backup": true, "tokenizer_worker_num": 1,
                "api_key": "hunter2",
            }),
            fault: None,
        }
    }

    /// Whether a move of it began and did not complete, by its own words.
    pub(crate) fn is_moving(&self) -> bool {
        self.version.starts_with("poorwill:moving:")
    }

    pub(crate) fn answer(&mut self, asked: &Received) -> Scripted {
        let fault = match &mut self.fault {
            Some((0, fault)) => Some(*fault),
            Some((left, _)) => {
                *left -= 1;
                None
            }
            None => None,
        };
        if fault.is_some() {
            self.fault = None;
        }
        match fault {
            Some(Fault::Refused) => return Scripted::Text(500, "no".to_owned()),
            Some(Fault::NoAnswer) => return Scripted::Nothing,
            _ => {}
        }
        let message = self.act(asked);
        match fault {
            Some(Fault::DoneAndRefused) => Scripted::Text(500, "no".to_owned()),
            Some(Fault::DoneAndNoAnswer) => Scripted::Nothing,
            Some(Fault::DoneAndBroken) => Scripted::Broken,
            _ => message,
        }
    }

    fn act(&mut self, asked: &Received) -> Scripted {
        let line = asked.line.as_str();
        let is_later = ["GET /model_info", "GET /server_info"].contains(&line);
        if self.has_ended || (self.is_older && is_later) {
            return Scripted::Text(if self.has_ended { 500 } else { 404 }, String::new());
        }
        match line {
            "GET /model_info" | "GET /get_model_info" => {
                ok(&json!({"model_path": "/models/large", "weight_version": self.version}).to_string())
            }
            "GET /server_info" | "GET /get_server_info" => ok(&self.settings.to_string()),
            "POST /update_weight_version" => {
                assert_eq!(asked.body["abort_all_requests"], json!(false));
                self.version = asked.body["new_version"].as_str().unwrap().to_owned();
                ok(r#"{"success":true}"#)
            }
            "POST /flush_cache" if self.busy > 0 => {
                self.busy -= 1;
                Scripted::Text(400, "there are requests".to_owned())
            }
            "POST /flush_cache" => ok("Cache flushed."),
            "POST /release_memory_occupation" => {
                assert_eq!(asked.body, json!({}));
                self.has_ended = !self.has_memory || self.busy > 0;
                self.has_memory = false;
                self.has_weights = self.has_backup;
                ok("null")
            }
            "POST /resume_memory_occupation" => {
                assert_eq!(asked.body, json!({}));
                self.has_ended = self.has_memory;
                self.has_memory = true;
                ok("null")
            }
            "POST /update_weights_from_disk" => {
                assert_eq!(asked.body["model_path"], json!("/models/large"));
                self.has_ended = !self.has_memory;
                self.has_weights = true;
                ok(r#"{"success":true,"message":"Succeeded"}"#)
            }
            "GET /health" => {
                self.has_ended = !self.has_memory;
                ok("")
            }
            "POST /v1/completions" => {
                self.has_ended = !self.has_memory;
                let text = if self.has_weights { " three" } else { "!!!!!!!" };
                ok(&json!({"choices": [{"text": text, "finish_reason": "length"}]}).to_string())
            }
            _ => Scripted::Text(404, String::new()),
        }
    }
}

struct Fake {
    server: Script,
    state: Arc<Mutex<State>>,
}

impl Fake {
    async fn of(change: impl FnOnce(&mut State)) -> Self {
        let mut state = State::new();
        change(&mut state);
        let state = Arc::new(Mutex::new(state));
        let its = Arc::clone(&state);
        Self { server: Script::of(move |asked| its.lock().unwrap().answer(asked)).await, state }
    }

    /// Another process that uses it.
    fn engine(&self, level: u8) -> Arc<dyn Engine> {
        engine_of(&model(&self.server.url, Sglang, level)).unwrap()
    }

    /// Paths, without methods and bodies.
    fn asked(&self) -> Vec<String> {
        self.server.asked().iter().map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect()
    }
}

fn message(error: &EngineError, what: &str) {
    let is_named = matches!(error, EngineError::Unexpected { .. } | EngineError::Unsupported { .. });
    assert!(is_named, "{error}");
    assert!(error.to_string().contains(what) && !error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test]
async fn each_call_sends_its_requests_in_order() {
    for level in [1, 2] {
        let fake = Fake::of(|state| state.has_backup = level == 1).await;
        let engine = fake.engine(level);
        assert_eq!(engine.probe().await, Ok(EngineState::Awake));
        assert_eq!(fake.asked(), ["/model_info", "/health", "/server_info"]);

        engine.sleep().await.unwrap();
        let set = ["/update_weight_version", "/model_info"];
        let release =
            ["/model_info", "/flush_cache", set[0], set[1], "/release_memory_occupation", set[0], set[1]];
        assert_eq!(fake.asked(), release);
        assert!(!fake.state.lock().unwrap().has_memory);

        assert_eq!(engine.probe().await, Ok(EngineState::Asleep));
        assert_eq!(fake.asked(), ["/model_info", "/server_info"]);
        assert_eq!(engine.is_awake().await, Ok(false));
        assert_eq!(fake.asked(), ["/model_info"]);

        engine.wake().await.unwrap();
        let mut resume = vec!["/model_info", set[0], set[1], "/resume_memory_occupation"];
        resume.extend((level == 2).then_some("/update_weights_from_disk"));
        resume.extend(set);
        assert_eq!(fake.asked(), resume);

        assert_eq!(engine.is_awake().await, Ok(true));
        assert_eq!(fake.asked(), ["/model_info", "/health"]);
        assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
        let state = fake.state.lock().unwrap();
        assert!(state.has_memory && !state.has_ended && state.version == "default", "{state:?}");
    }
}

#[tokio::test]
async fn older_ones_are_asked_by_the_names_that_they_know() {
    let fake = Fake::of(|state| state.is_older = true).await;
    let engine = fake.engine(1);
    assert_eq!(engine.probe().await, Ok(EngineState::Awake));
    engine.sleep().await.unwrap();
    assert_eq!(engine.probe().await, Ok(EngineState::Asleep));
    engine.wake().await.unwrap();
    assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
}

/// No request would end a real engine, also if another rotation continues.
#[tokio::test]
async fn nothing_is_requested_twice() {
    let fake = Fake::of(|state| state.version = "step-7".to_owned()).await;
    fake.engine(1).wake().await.unwrap();
    fake.engine(1).sleep().await.unwrap();
    fake.engine(1).sleep().await.unwrap();
    assert_eq!(fake.engine(1).probe().await, Ok(EngineState::Asleep));
    message(&fake.engine(1).generate(None).await.unwrap_err(), "it sleeps");
    fake.engine(1).wake().await.unwrap();
    fake.engine(1).wake().await.unwrap();
    assert_eq!(fake.engine(1).probe().await, Ok(EngineState::Awake));
    let state = fake.state.lock().unwrap();
    assert!(state.has_memory && !state.has_ended && state.version == "step-7", "{state:?}");
}

#[tokio::test]
async fn one_that_was_started_again_is_awake() {
    let fake = Fake::of(|_| {}).await;
    let engine = fake.engine(1);
    engine.sleep().await.unwrap();
    *fake.state.lock().unwrap() = State::new();
    assert_eq!(engine.probe().await, Ok(EngineState::Awake));
    assert_eq!(engine.is_awake().await, Ok(true));
    engine.wake().await.unwrap();
    assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
    assert!(!fake.state.lock().unwrap().has_ended);
}

#[tokio::test]
async fn a_sleep_waits_for_running_requests() {
    let fake = Fake::of(|state| state.busy = 2).await;
    fake.engine(1).sleep().await.unwrap();
    let flushes = fake.asked().iter().filter(|path| *path == "/flush_cache").count();
    assert_eq!(flushes, 3);
    assert!(!fake.state.lock().unwrap().has_ended);
}

/// Each request of each move fails in turn, in each way. The next probe reports the truth, or that it is unknown.
#[tokio::test]
async fn no_failure_misleads() {
    let faults = [Fault::Refused, Fault::DoneAndRefused, Fault::NoAnswer, Fault::DoneAndNoAnswer];
    let (mut unknown, mut known) = (0, 0);
    for level in [1, 2] {
        for is_wake in [false, true] {
            for fault in faults {
                for nth in 0.. {
                    let mut fake = Fake::of(|state| state.has_backup = level == 1).await;
                    let engine = fake.engine(level);
                    if is_wake {
                        engine.sleep().await.unwrap();
                        fake = fake.renewed().await;
                    }
                    fake.state.lock().unwrap().fault = Some((nth, fault));
                    let engine = fake.engine(level);
                    let moved = if is_wake { engine.wake() } else { engine.sleep() };
                    let moved = fake.until_answered_or_hung(moved, nth, fault).await;
                    if fake.state.lock().unwrap().fault.take().is_some() {
                        // It has no request with that number.
                        assert_eq!(moved, Some(Ok(())));
                        assert!(nth > 4);
                        break;
                    }
                    assert!(!matches!(moved, Some(Ok(()))), "{fault:?} of request {nth}");
                    let found = fake.engine(level).probe().await;
                    let state = fake.state.lock().unwrap();
                    assert!(!state.has_ended, "{fault:?} of request {nth}: {state:?}");
                    match found {
                        Ok(EngineState::Awake) => assert!(state.has_memory && state.has_weights, "{state:?}"),
                        Ok(EngineState::Asleep) => assert!(!state.has_memory, "{state:?}"),
                        Ok(EngineState::Gone | EngineState::Hibernating) => panic!("it is there"),
                        Ok(EngineState::Moving) => {
                            unknown += 1;
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    }
                    known += 1;
                }
            }
        }
    }
    assert!(unknown > 0 && known > 0, "{unknown} unknown, {known} known");
}

impl Fake {
    /// The same engine with an empty record.
    async fn renewed(self) -> Self {
        let its = Arc::clone(&self.state);
        let server = Script::of(move |asked| its.lock().unwrap().answer(asked)).await;
        Self { server, state: self.state }
    }

    /// The result of a move; `None` if the request with that number is not answered, and the move is dropped.
    async fn until_answered_or_hung(
        &mut self,
        moved: impl Future<Output = Result<(), EngineError>>,
        nth: usize,
        fault: Fault,
    ) -> Option<Result<(), EngineError>> {
        if [Fault::Refused, Fault::DoneAndRefused].contains(&fault) {
            return Some(moved.await);
        }
        let hung = async {
            for _ in 0..=nth {
                self.server.came().await;
            }
        };
        tokio::select! {
            biased;
            moved = moved => Some(moved),
            () = hung => None,
        }
    }
}

#[tokio::test]
async fn an_engine_that_cannot_sleep_is_an_error_that_says_how_to_start_it() {
    let table = [
        (1, "enable_memory_saver", json!(false), Some("--enable-memory-saver")),
        (2, "enable_memory_saver", json!(false), Some("--enable-memory-saver")),
        (1, "enable_weights_cpu_backup", json!(false), Some("--enable-weights-cpu-backup")),
        (2, "enable_weights_cpu_backup", json!(false), None),
        (1, "tokenizer_worker_num", json!(4), Some("--tokenizer-worker-num 1")),
        (1, "something_else", json!(false), None),
    ];
    for (level, key, value, wanted) in table {
        let fake = Fake::of(|state| state.settings[key] = value).await;
        match (fake.engine(level).probe().await, wanted) {
            (Err(error), Some(wanted)) => message(&error, wanted),
            (found, None) => assert_eq!(found, Ok(EngineState::Awake), "{key}"),
            (found, _) => panic!("{key} at level {level}: {found:?}"),
        }
    }
}

#[tokio::test]
async fn answers_of_other_servers_are_errors() {
    let url = nowhere().await;
    assert_eq!(engine_of(&model(&url, Sglang, 1)).unwrap().probe().await, Ok(EngineState::Gone));
    let table = [
        ("", "not SGLang's model information"),
        ("[1]", "not SGLang's model information"),
        ("{\"weight_version\":7}", "not SGLang's model information"),
        ("{\"model_path\":\"/models/large\"}", "from 0.5.1 on"),
        ("{", "no JSON"),
    ];
    for (answer, wanted) in table {
        let server = Script::of(move |_| ok(answer)).await;
        let engine = engine_of(&model(&server.url, Sglang, 1)).unwrap();
        for error in [
            engine.probe().await.unwrap_err(),
            engine.is_awake().await.unwrap_err(),
            engine.sleep().await.unwrap_err(),
            engine.wake().await.unwrap_err(),
            engine.generate(None).await.unwrap_err(),
        ] {
            message(&error, wanted);
        }
    }
    // Its settings contain its keys.
    for settings in [json!("hunter2"), json!(["hunter2"])] {
        let fake = Fake::of(|state| state.settings = settings).await;
        message(&fake.engine(1).probe().await.unwrap_err(), "not SGLang's server information");
    }
}

/// A weight version that changes by itself would mislead its reader.
#[tokio::test]
async fn a_weight_version_that_changes_stops_a_sleep_before_it_begins() {
    let server = Script::of(|asked| match asked.line.as_str() {
        "GET /model_info" => ok(r#"{"model_path":"/models/large","weight_version":"default"}"#),
        _ => ok("{}"),
    })
    .await;
    let engine = engine_of(&model(&server.url, Sglang, 1)).unwrap();
    message(&engine.sleep().await.unwrap_err(), "no other program may set it");
    assert!(!server.asked().iter().any(|line| line.contains("release")));
}

#[tokio::test]
async fn weights_that_were_not_read_again_are_an_error() {
    let mark = "poorwill:asleep:default";
    let marked = Arc::new(Mutex::new(mark.to_owned()));
    let server = Script::of(move |asked| {
        let mut version = marked.lock().unwrap();
        match asked.line.as_str() {
            "GET /model_info" => ok(&json!({"model_path": "/m", "weight_version": *version}).to_string()),
            "POST /update_weight_version" => {
                *version = asked.body["new_version"].as_str().unwrap().to_owned();
                ok("{}")
            }
            "POST /update_weights_from_disk" => ok(r#"{"success":false,"message":"no such file"}"#),
            _ => ok("null"),
        }
    })
    .await;
    let engine = engine_of(&model(&server.url, Sglang, 2)).unwrap();
    message(&engine.wake().await.unwrap_err(), "no such file");
    message(&engine.is_awake().await.unwrap_err(), "no such file");
    message(&engine.generate(None).await.unwrap_err(), "start it again");
}
