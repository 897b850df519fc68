//! The vLLM adapter's requests, and its reading of the answers.

use poorwill_rotate::config::EngineKind::Vllm;
use poorwill_rotate::engine::{EngineError, engine_of};
use poorwill_rotation_policy::EngineState;

use super::script::{Script, Scripted, completion, model, nowhere, ok};

/// Answers of a working vLLM, as version 0.20 or as a later one.
async fn vllm(is_later: bool, is_sleeping: bool) -> Script {
    Script::of(move |asked| match asked.line.as_str() {
        "GET /health" => ok(""),
        "GET /is_sleeping" => ok(&format!(r#"{{"is_sleeping":{is_sleeping}}}"#)),
        "POST /collective_rpc" => ok(r#"{"results":[null]}"#),
        "POST /v1/completions" => ok(r#"{"choices":[{"text":" three","finish_reason":"length"}]}"#),
        line if !is_later && line.starts_with("POST ") => ok(""),
        line if line.starts_with("POST /sleep") => ok(r#"{"status":"sleeping","level":1}"#),
        "POST /wake_up?tags=weights" => ok(r#"{"status":"sleeping","tags":["weights"]}"#),
        line if line.starts_with("POST /wake_up") => ok(r#"{"status":"awake","tags":null}"#),
        _ => Scripted::Text(404, r#"{"detail":"Not Found"}"#.to_owned()),
    })
    .await
}

#[tokio::test]
async fn each_call_sends_its_requests_in_order() {
    for is_later in [false, true] {
        for level in [1, 2] {
            let server = vllm(is_later, false).await;
            let engine = engine_of(&model(&server.url, Vllm, level)).unwrap();

            engine.sleep().await.unwrap();
            assert_eq!(server.asked(), [format!("POST /sleep?level={level}&mode=wait")]);

            engine.wake().await.unwrap();
            let wakes: &[&str] = match level {
                1 => &["POST /wake_up"],
                _ => &[
                    "POST /wake_up?tags=weights",
                    r#"POST /collective_rpc {"method":"reload_weights"}"#,
                    "POST /wake_up?tags=kv_cache",
                ],
            };
            assert_eq!(server.asked(), wakes);

            assert_eq!(engine.probe().await, Ok(EngineState::Awake));
            assert_eq!(server.asked(), ["GET /health", "GET /is_sleeping"]);

            assert_eq!(engine.is_awake().await, Ok(true));
            assert_eq!(server.asked(), ["GET /is_sleeping"]);

            assert_eq!(engine.generate(None).await.unwrap(), completion(" three"));
            let asked = server.asked();
            let (line, body) = asked[0].split_at("POST /v1/completions".len());
            assert_eq!((asked.len(), line), (1, "POST /v1/completions"));
            let wanted = serde_json::json!({
                "model": "Org/Large", "prompt": "One, two,", "max_tokens": 7, "temperature": 0, "seed": 0,
                "stream": false,
            });
            assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap(), wanted);
        }
    }
}

#[tokio::test]
async fn one_that_sleeps_is_found_asleep() {
    let server = vllm(true, true).await;
    let engine = engine_of(&model(&server.url, Vllm, 1)).unwrap();
    assert_eq!(engine.probe().await, Ok(EngineState::Asleep));
    assert_eq!(engine.is_awake().await, Ok(false));
}

#[tokio::test]
async fn only_an_unreachable_engine_is_gone() {
    // A host name with a label that is too long fails without a resolver.
    let no_name = format!("http://{}.invalid:8000", "a".repeat(64));
    for url in [nowhere().await, no_name] {
        let engine = engine_of(&model(&url, Vllm, 1)).unwrap();
        assert_eq!(engine.probe().await, Ok(EngineState::Gone), "{url}");
        let error = engine.is_awake().await.unwrap_err();
        assert!(matches!(error, EngineError::Unreachable { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("GET {url}/is_sleeping: ")), "{error}");
    }
    let starting = Script::of(|_| Scripted::Text(503, String::new())).await;
    let error = engine_of(&model(&starting.url, Vllm, 1)).unwrap().probe().await.unwrap_err();
    let request_line = format!("GET {}/health", starting.url);
    assert_eq!(error, EngineError::Refused { request_line, status: 503, message: "(nothing)".to_owned() });
}

#[tokio::test]
async fn without_development_mode_the_error_says_how_to_start_it() {
    let server = Script::of(|asked| match asked.line.as_str() {
        "GET /health" => ok(""),
        _ => Scripted::Text(404, r#"{"detail":"Not Found"}"#.to_owned()),
    })
    .await;
    let engine = engine_of(&model(&server.url, Vllm, 1)).unwrap();
    let errors = [
        engine.probe().await.unwrap_err(),
        engine.is_awake().await.unwrap_err(),
        engine.sleep().await.unwrap_err(),
        engine.wake().await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    }
}

#[tokio::test]
async fn one_that_never_sleeps_only_has_to_be_healthy() {
    let server = Script::of(|asked| match asked.line.as_str() {
        "GET /health" => ok(""),
        _ => Scripted::Text(404, String::new()),
    })
    .await;
    let mut model = model(&server.url, Vllm, 1);
    model.rules.can_sleep = false;
    let engine = engine_of(&model).unwrap();
    assert_eq!(engine.probe().await, Ok(EngineState::Awake));
    assert_eq!(engine.is_awake().await, Ok(true));
    assert_eq!(server.asked(), ["GET /health", "GET /health"]);
}

#[tokio::test]
async fn a_move_that_ended_elsewhere_is_an_error() {
    let odd = [r#"{"status":"dozing"}"#, r#"{"status":1}"#, "<html>welcome</html>"];
    for (answer, is_sleep) in odd
        .into_iter()
        .flat_map(|answer| [(answer, true), (answer, false)])
        .chain([(r#"{"status":"awake"}"#, true), (r#"{"status":"sleeping"}"#, false)])
    {
        for level in [1, 2] {
            let server = Script::of(move |_| ok(answer)).await;
            let engine = engine_of(&model(&server.url, Vllm, level)).unwrap();
            let moved = if is_sleep { engine.sleep().await } else { engine.wake().await };
            let error = moved.expect_err(answer);
            assert!(matches!(error, EngineError::Unexpected { .. }), "{answer}: {error}");
        }
    }
}

/// A level 2 wake that fails midway sends no further requests.
#[tokio::test]
async fn weights_that_were_not_loaded_are_not_gone_on_with() {
    let calls = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"];
    for (nth, fails) in calls.into_iter().enumerate() {
        let server = Script::of(move |asked| {
            if asked.line.ends_with(fails) { Scripted::Text(500, "no".to_owned()) } else { ok("") }
        })
        .await;
        let engine = engine_of(&model(&server.url, Vllm, 2)).unwrap();
        let error = engine.wake().await.unwrap_err();
        let request_line = format!("POST {}{fails}", server.url);
        assert_eq!(error, EngineError::Refused { request_line, status: 500, message: "no".to_owned() });
        assert_eq!(server.asked().len(), nth + 1);
    }
}

#[tokio::test]
async fn an_answer_without_is_sleeping_is_an_error() {
    for answer in ["", "null", "{}", "[]", r#"{"is_sleeping":"no"}"#, r#"{"is_sleeping":0}"#, "nope"] {
        let server = Script::of(move |_| ok(answer)).await;
        let engine = engine_of(&model(&server.url, Vllm, 1)).unwrap();
        for error in [engine.probe().await.unwrap_err(), engine.is_awake().await.unwrap_err()] {
            assert!(matches!(error, EngineError::Unexpected { .. }), "{answer}: {error}");
        }
    }
}
