//! Faults of both kinds of engine, and the resulting errors.

use std::process::Command;

use poorwill_rotate::config::EngineKind::{Sglang, Vllm};
use poorwill_rotate::engine::{Engine, EngineError, engine_of};

use super::script::{Raw, Received, Script, Scripted, Seen, Then, completion, model, nowhere, ok};

/// Environment variable of a test that runs again in its own process: the engine's address.
const CHILD: &str = "POORWILL_TEST_ENGINE";

/// Every call, as far as whether it fails.
async fn all_calls(engine: &dyn Engine) -> Vec<(&'static str, Result<(), EngineError>)> {
    vec![
        ("look", engine.probe().await.map(|_| ())),
        ("sleep", engine.sleep().await),
        ("wake", engine.wake().await),
        ("is_awake", engine.is_awake().await.map(|_| ())),
        ("generate", engine.generate(None).await.map(|_| ())),
    ]
}

/// The errors of every call, of both kinds, at both levels.
async fn all_errors(url: &str) -> Vec<EngineError> {
    let mut errors = Vec::new();
    for kind in [Vllm, Sglang] {
        for level in [1, 2] {
            let engine = engine_of(&model(url, kind, level)).unwrap();
            for (call, outcome) in all_calls(engine.as_ref()).await {
                let error = outcome.expect_err(call);
                let text = error.to_string();
                assert!(text.contains(url), "{call}: {text}");
                assert!(!text.contains(char::is_control), "{call}: {text:?}");
                assert!(text.chars().count() < 600, "{call}: {text}");
                errors.push(error);
            }
        }
    }
    errors
}

#[tokio::test]
async fn an_unreachable_engine_is_an_error_except_for_a_probe() {
    let url = nowhere().await;
    for kind in [Vllm, Sglang] {
        let engine = engine_of(&model(&url, kind, 1)).unwrap();
        for (call, outcome) in all_calls(engine.as_ref()).await {
            match outcome {
                Ok(()) => assert_eq!(call, "look"),
                Err(EngineError::Unreachable { reason, .. }) => {
                    assert!(reason.contains("refused"), "{reason}");
                }
                Err(other) => panic!("{call}: {other}"),
            }
        }
    }
}

#[tokio::test]
async fn refusals_quote_the_beginning_of_their_message() {
    let long = format!("out of \x1b[31mmemory\r\n\0{}", "ö\n".repeat(600_000));
    for status in [400, 401, 500, 502, 503] {
        let text = long.clone();
        let server = Script::of(move |_| Scripted::Text(status, text.clone())).await;
        for error in all_errors(&server.url).await {
            let EngineError::Refused { status: answered, message, .. } = &error else { panic!("{error}") };
            assert_eq!(*answered, status);
            assert!(message.starts_with("out of  [31mmemory") && message.ends_with('…'), "{message}");
        }
    }
}

#[tokio::test]
async fn a_refusal_that_breaks_off_is_still_one() {
    let raw = Raw::of(b"HTTP/1.1 500 No\r\ncontent-length: 100\r\n\r\nbecause", Then::Close).await;
    for error in all_errors(&raw.url).await {
        let EngineError::Refused { status, message, .. } = &error else { panic!("{error}") };
        assert_eq!((*status, message.as_str()), (500, "because"));
    }
}

#[tokio::test]
async fn connections_that_break_are_no_answer() {
    let table: &[&[u8]] = &[
        b"",
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"is_sl",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"is_",
        b"\x00\xff\xfe nothing like HTTP\r\n\r\n",
    ];
    for bytes in table {
        let raw = Raw::of(bytes, Then::Close).await;
        for error in all_errors(&raw.url).await {
            assert!(matches!(error, EngineError::Unreachable { .. }), "{bytes:?}: {error}");
        }
    }
}

#[tokio::test]
async fn an_answer_without_an_end_is_read_for_so_long_only() {
    for head in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"] {
        let mut raw = Raw::of(head.as_bytes(), Then::SendOn).await;
        for error in all_errors(&raw.url).await {
            assert!(matches!(error, EngineError::Unexpected { .. }), "{error}");
            assert!(error.to_string().contains("more than 1048576 bytes"), "{error}");
            raw.sees(Seen::End).await;
        }
    }
    let raw = Raw::of(b"HTTP/1.1 500 No\r\n\r\n", Then::SendOn).await;
    for error in all_errors(&raw.url).await {
        let EngineError::Refused { message, .. } = &error else { panic!("{error}") };
        assert_eq!(message.chars().count(), 301);
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let elsewhere = Script::of(|_| ok("{}")).await;
    let url = elsewhere.url.clone();
    let server = Script::of(move |_| Scripted::Elsewhere(url.clone())).await;
    for error in all_errors(&server.url).await {
        assert!(matches!(error, EngineError::Refused { status: 307, .. }), "{error}");
    }
    assert!(elsewhere.asked().is_empty());
}

#[tokio::test]
async fn a_dropped_call_closes_the_connection() {
    // Before its head, and in the middle of its body.
    for bytes in ["", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"] {
        for kind in [Vllm, Sglang] {
            let mut raw = Raw::of(bytes.as_bytes(), Then::Wait).await;
            let engine = engine_of(&model(&raw.url, kind, 2)).unwrap();
            for call in [engine.sleep(), engine.wake()] {
                tokio::select! {
                    biased;
                    outcome = call => panic!("{outcome:?}"),
                    () = raw.sees(Seen::Request) => {}
                }
                raw.sees(Seen::End).await;
            }
        }
    }
}

#[tokio::test]
async fn a_completion_has_to_be_one() {
    let good = r#"{"choices":[{"text":" three","finish_reason":"stop"}]}"#;
    let table = [
        (good, None),
        ("", Some("no choices[0].text")),
        ("three", Some("no JSON")),
        ("[]", Some("no choices[0].text")),
        (r#"{"choices":[]}"#, Some("no choices[0].text")),
        (r#"{"choices":[{"text":7,"finish_reason":"stop"}]}"#, Some("no choices[0].text")),
        (r#"{"choices":[{"text":" three"}]}"#, Some("no choices[0].finish_reason")),
        (r#"{"choices":[{"text":" three","finish_reason":null}]}"#, Some("no choices[0].finish_reason")),
        (r#"{"choices":[{"text":"","finish_reason":"length"}]}"#, Some("completion is empty")),
        (r#"{"choices":[{"text":" thr","finish_reason":"abort"}]}"#, Some("ended with `abort`")),
        (r#"{"choices":[{"text":" thr","finish_reason":"error"}]}"#, Some("ended with `error`")),
    ];
    for (answer, wanted) in table {
        for kind in [Vllm, Sglang] {
            let server = Script::of(move |asked: &Received| match asked.line.as_str() {
                "POST /v1/completions" => ok(answer),
                _ => ok(r#"{"model_path":"/m","weight_version":"default"}"#),
            })
            .await;
            let outcome = engine_of(&model(&server.url, kind, 1)).unwrap().generate(None).await;
            match (outcome, wanted) {
                (Ok(answer), None) => assert_eq!(answer, completion(" three")),
                (Err(error @ EngineError::Unexpected { .. }), Some(wanted)) => {
                    assert!(error.to_string().contains(wanted), "{error}");
                }
                (outcome, _) => panic!("{answer}: {outcome:?}"),
            }
        }
    }
}

#[test]
fn an_invalid_engine_is_refused_at_once() {
    for (url, level) in [("http://127.0.0.1:1", 0), ("http://127.0.0.1:1", 3), ("https://127.0.0.1:1", 1)] {
        for kind in [Vllm, Sglang] {
            let error = engine_of(&model(url, kind, level)).unwrap_err();
            assert!(matches!(error, EngineError::Unexpected { .. }), "{error}");
            assert!(error.to_string().starts_with("the engine of model `large`: "), "{error}");
        }
    }
}

/// Runs again in a process whose environment has a proxy.
#[tokio::test]
async fn a_proxy_in_the_environment_is_not_gone_to() {
    if let Ok(url) = std::env::var(CHILD) {
        assert!(std::env::var_os("http_proxy").is_some() && std::env::var_os("no_proxy").is_none());
        assert_eq!(engine_of(&model(&url, Vllm, 1)).unwrap().is_awake().await, Ok(true));
        return;
    }
    let proxy = Script::of(|_| Scripted::Text(502, String::new())).await;
    let engine = Script::of(|_| ok(r#"{"is_sleeping":false}"#)).await;
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", "engines::faults::a_proxy_in_the_environment_is_not_gone_to"])
        .env(CHILD, &engine.url);
    for name in ["no_proxy", "NO_PROXY", "REQUEST_METHOD"] {
        child.env_remove(name);
    }
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        child.env(name, &proxy.url);
    }
    let output = tokio::task::spawn_blocking(move || child.output().unwrap()).await.unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && message.contains("1 passed"), "{message}");
    assert_eq!(engine.asked(), ["GET /is_sleeping"]);
    assert_eq!(proxy.asked(), [""; 0]);
}
