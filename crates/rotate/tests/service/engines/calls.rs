//! Engines of the kind `http`, by the paths of their configuration, and engines of any kind that never sleep.

use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_rotate::config::EngineKind::{Http, Sglang, Vllm};
use poorwill_rotate::config::{Config, Model};
use poorwill_rotate::engine::{EngineError, engine_of};
use poorwill_rotation_policy::EngineState;

use super::script::{Received, Script, Scripted, completion, model, nowhere, ok};

const COMPLETION: &str = r#"{"choices":[{"text":" three","finish_reason":"stop"}]}"#;

/// A model of the kind `http` with these lines under `[model.http]`.
fn http_model(url: &str, lines: &str) -> Model {
    let text = format!(
        "[[model]]\nname = \"one\"\nurl = \"{url}\"\nengine = \"http\"\ncommand = [\"a\"]\n[model.http]\n{lines}"
    );
    Config::parse(&text, &|_| Ok(String::new())).unwrap().models.remove(0)
}

const OLLAMA: &str = r#"
health = "/api/version"
sleep = { call = "POST /api/generate", body = { model = "one", keep_alive = 0 } }
wake = { call = "POST /api/generate", body = { model = "one" } }
asleep = { call = "GET /api/ps", at = "/models", is = [] }
"#;

#[tokio::test]
async fn the_calls_of_the_configuration_are_sent() {
    let has_model = AtomicBool::new(true);
    let server = Script::of(move |asked: &Received| match asked.line.as_str() {
        "GET /api/version" => ok(r#"{"version":"0.5.1"}"#),
        "POST /api/generate" => {
            has_model.store(asked.body["keep_alive"].is_null(), Ordering::SeqCst);
            ok("{}")
        }
        "GET /api/ps" if has_model.load(Ordering::SeqCst) => ok(r#"{"models":[{"name":"one"}]}"#),
        "GET /api/ps" => ok(r#"{"models":[]}"#),
        "POST /v1/completions" => ok(COMPLETION),
        _ => Scripted::Text(404, String::new()),
    })
    .await;
    let engine = engine_of(&http_model(&server.url, OLLAMA)).unwrap();
    assert_eq!(engine.probe().await, Ok(EngineState::Awake));
    assert_eq!(server.asked(), ["GET /api/version", "GET /api/ps"]);
    engine.sleep().await.unwrap();
    assert_eq!(server.asked(), [r#"POST /api/generate {"keep_alive":0,"model":"one"}"#]);
    assert_eq!(engine.probe().await, Ok(EngineState::Asleep));
    assert_eq!(engine.is_awake().await, Ok(false));
    server.asked();
    engine.wake().await.unwrap();
    assert_eq!(server.asked(), [r#"POST /api/generate {"model":"one"}"#]);
    assert_eq!(engine.is_awake().await, Ok(true));
    assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));

    let nowhere = engine_of(&http_model(&nowhere().await, OLLAMA)).unwrap();
    assert_eq!(nowhere.probe().await, Ok(EngineState::Gone));
    assert!(matches!(nowhere.is_awake().await, Err(EngineError::Unreachable { .. })));
}

#[tokio::test]
async fn every_method_is_sent() {
    let server = Script::of(|_| ok(r#"{"is_sleeping":true}"#)).await;
    for (written, sent) in [
        ("\"GET /a?b=c\"", "GET /a?b=c"),
        ("\"PUT /a\"", "PUT /a"),
        ("\"PATCH /a\"", "PATCH /a"),
        ("\"DELETE /a\"", "DELETE /a"),
        ("{ call = \"POST /a\" }", "POST /a"),
        ("{ call = \"POST /a\", body = { b = [1, 2.5, true, \"c\"] } }", r#"POST /a {"b":[1,2.5,true,"c"]}"#),
    ] {
        let lines = format!("sleep = {written}\nwake = \"POST /wake\"\nasleep = \"GET /state\"");
        let engine = engine_of(&http_model(&server.url, &lines)).unwrap();
        engine.sleep().await.unwrap();
        assert_eq!(server.asked(), [sent]);
        assert_eq!(engine.is_awake().await, Ok(false));
        assert_eq!(server.asked(), ["GET /state"]);
    }
}

#[tokio::test]
async fn a_state_that_cannot_be_read_is_an_error_with_its_key() {
    for (answer, lines, words) in [
        ("{}", "", "\"/is_sleeping\" that compares with true"),
        (r#"{"is_sleeping":"yes"}"#, "", "compares with true"),
        (r#"{"state":1}"#, "at = \"/state\"\nis = \"unloaded\"", "compares with \"unloaded\""),
        ("", "", "compares with true"),
        ("{", "", "no JSON"),
    ] {
        let server = Script::of(move |_| ok(answer)).await;
        let lines = format!(
            "sleep = \"POST /s\"\nwake = \"POST /w\"\n[model.http.asleep]\ncall = \"GET /state\"\n{lines}"
        );
        let error = engine_of(&http_model(&server.url, &lines)).unwrap().probe().await.unwrap_err();
        assert!(matches!(error, EngineError::Unexpected { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    for (at, is, answer, is_awake) in [
        ("", "true", "true", false),
        ("", "true", "false", true),
        ("/data/0/status/value", "\"unloaded\"", r#"{"data":[{"status":{"value":"unloaded"}}]}"#, false),
        ("/data/0/status/value", "\"unloaded\"", r#"{"data":[{"status":{"value":"loaded"}}]}"#, true),
        ("/n", "0", r#"{"n":0}"#, false),
        ("/n", "0", r#"{"n":2}"#, true),
    ] {
        let server = Script::of(move |_| ok(answer)).await;
        let lines = format!(
            "sleep = \"POST /s\"\nwake = \"POST /w\"\nasleep = {{ call = \"GET /state\", at = \"{at}\", is = {is} }}"
        );
        let engine = engine_of(&http_model(&server.url, &lines)).unwrap();
        assert_eq!(engine.is_awake().await, Ok(is_awake), "{at} {answer}");
    }
}

#[tokio::test]
async fn a_call_that_is_not_served_is_an_error_with_its_key() {
    for status in [404, 405, 501] {
        let server = Script::of(move |asked: &Received| match asked.line.as_str() {
            "GET /api/version" => ok("{}"),
            _ => Scripted::Text(status, "Not Found".to_owned()),
        })
        .await;
        let engine = engine_of(&http_model(&server.url, OLLAMA)).unwrap();
        for (key, error) in [
            ("sleep", engine.sleep().await.unwrap_err()),
            ("wake", engine.wake().await.unwrap_err()),
            ("asleep", engine.is_awake().await.unwrap_err()),
            ("asleep", engine.probe().await.unwrap_err()),
        ] {
            assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(&format!("mend {key} under [model.http]")), "{error}");
        }
    }
    // Other errors may pass.
    let server = Script::of(|_| Scripted::Text(503, "loading".to_owned())).await;
    let engine = engine_of(&http_model(&server.url, OLLAMA)).unwrap();
    for error in [engine.sleep().await.unwrap_err(), engine.probe().await.unwrap_err()] {
        assert!(matches!(error, EngineError::Refused { status: 503, .. }), "{error}");
    }
}

#[tokio::test]
async fn an_engine_without_calls_is_awake_if_healthy() {
    let server = Script::of(|asked: &Received| match asked.line.as_str() {
        "GET /" => ok("Ollama is running"),
        "POST /v1/completions" => ok(COMPLETION),
        _ => Scripted::Text(404, String::new()),
    })
    .await;
    let error = engine_of(&http_model(&server.url, "")).unwrap().probe().await.unwrap_err();
    assert!(error.to_string().contains("say another as health under [model.http]"), "{error}");
    let model = http_model(&server.url, "health = \"/\"");
    assert!(!model.rules.can_sleep);
    let engine = engine_of(&model).unwrap();
    server.asked();
    assert_eq!(engine.probe().await, Ok(EngineState::Awake));
    assert_eq!(engine.is_awake().await, Ok(true));
    assert_eq!(server.asked(), ["GET /", "GET /"]);
    assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
    server.asked();
    for outcome in [engine.sleep().await, engine.wake().await] {
        assert!(matches!(outcome, Err(EngineError::Unsupported { .. })), "{outcome:?}");
    }
    assert!(server.asked().is_empty());
}

/// Older servers, and servers of other makes, have nothing else.
#[tokio::test]
async fn only_the_health_of_an_engine_that_never_sleeps_is_asked() {
    let server = Script::of(|asked: &Received| match asked.line.as_str() {
        "GET /health" => ok(""),
        "POST /v1/completions" => ok(COMPLETION),
        _ => Scripted::Text(404, String::new()),
    })
    .await;
    for kind in [Vllm, Sglang, Http] {
        let mut never = model(&server.url, kind, 1);
        never.rules.can_sleep = false;
        let engine = engine_of(&never).unwrap();
        assert_eq!(engine.probe().await, Ok(EngineState::Awake));
        assert_eq!(engine.is_awake().await, Ok(true));
        assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
        let mut asked = server.asked();
        assert!(asked.pop().unwrap().starts_with("POST /v1/completions"), "{kind:?}: {asked:?}");
        // Others may list what they are for.
        let list = (kind == Http).then_some("GET /v1/models");
        let expected: Vec<&str> = ["GET /health"; 2].into_iter().chain(list).collect();
        assert_eq!(asked, expected, "{kind:?}");
    }
}

/// As after `sleeps = false` was added while it slept.
#[tokio::test]
async fn one_that_sleeps_already_can_be_woken_though_it_never_sleeps_again() {
    let server = Script::of(|_| ok("")).await;
    let mut never = model(&server.url, Vllm, 1);
    never.rules.can_sleep = false;
    engine_of(&never).unwrap().wake().await.unwrap();
    assert_eq!(server.asked(), ["POST /wake_up"]);
}
