//! Kinds of canary: which is asked, and how answers are read.

use poorwill_rotate::config::CanaryKind::{self, Chat, Completion, Embedding, Get, Rerank};
use poorwill_rotate::config::EngineKind::{Http, Vllm};
use poorwill_rotate::config::Model;
use poorwill_rotate::engine::{Answer, Content, EngineError, engine_of};

use super::script::{Received, Script, Scripted, model, nowhere, ok};

const TEXT: &str = r#"{"choices":[{"text":" three","finish_reason":"length"}]}"#;
const MESSAGE: &str = r#"{"choices":[{"message":{"content":"three"},"finish_reason":"stop"}]}"#;
const VECTOR: &str = r#"{"data":[{"index":0,"embedding":[0.5,-1]}]}"#;
const SCORES: &str = r#"{"results":[{"index":1,"relevance_score":0.1},{"index":0,"relevance_score":0.9}]}"#;

fn all() -> [(CanaryKind, &'static str, &'static str, Content); 4] {
    [
        (Completion, "POST /v1/completions", TEXT, Content::Text(" three".to_owned())),
        (Chat, "POST /v1/chat/completions", MESSAGE, Content::Text("three".to_owned())),
        (Embedding, "POST /v1/embeddings", VECTOR, Content::Vector(vec![0.5, -1.0])),
        (Rerank, "POST /v1/rerank", SCORES, Content::Scores(vec![0.9, 0.1])),
    ]
}

/// An engine that serves one kind, and answers others with `status`.
async fn serving(kind: CanaryKind, status: u16) -> Script {
    Script::of(move |asked: &Received| {
        match all().into_iter().find(|(of, line, ..)| *of == kind && *line == asked.line) {
            Some((_, _, answer, _)) => ok(answer),
            None => Scripted::Text(status, r#"{"message":"The model does not support this API"}"#.to_owned()),
        }
    })
    .await
}

fn with_kind(url: &str, kind: CanaryKind) -> Model {
    let mut model = model(url, Vllm, 1);
    model.canary.kind = Some(kind);
    model
}

/// The lines without their bodies.
fn lines(script: &Script) -> Vec<String> {
    let line = |asked: String| asked.split(" {").next().unwrap_or_default().to_owned();
    script.asked().into_iter().map(line).collect()
}

/// An engine for embeddings may answer completions, too, with random text.
#[tokio::test]
async fn what_an_engine_says_it_is_for_is_asked_first() {
    for (list, first) in [
        (r#"{"data":[{"id":"served","capabilities":["embed"]}]}"#, Embedding),
        (
            r#"{"models":[{"name":"served","capabilities":["embedding"]}],"data":[{"id":"served"}]}"#,
            Embedding,
        ),
        (r#"{"data":[{"id":"served","capabilities":["rerank"]}]}"#, Rerank),
        (r#"{"data":[{"id":"served","capabilities":["completion","embedding"]}]}"#, Completion),
        (r#"{"data":[{"id":"other","capabilities":["embed"]}]}"#, Completion),
        ("no JSON", Completion),
    ] {
        let script = Script::of(move |asked: &Received| {
            let answer = all().into_iter().find(|(_, line, ..)| *line == asked.line);
            answer.map_or(ok(list), |(_, _, answer, _)| ok(answer))
        });
        let script = script.await;
        let mut model = model(&script.url, Http, 1);
        model.served_as = "served".to_owned();
        let answer = engine_of(&model).unwrap().generate(None).await.unwrap();
        assert_eq!(answer.kind, first, "{list}");
        model.canary.hint = Some(Embedding);
        assert_eq!(engine_of(&model).unwrap().generate(None).await.unwrap().kind, Embedding);
        assert_eq!(engine_of(&model).unwrap().generate(Some(Chat)).await.unwrap().kind, Chat);
    }
}

#[tokio::test]
async fn an_unset_kind_is_found_by_asking() {
    for status in [404, 405, 501, 400] {
        for (nth, (kind, line, _, content)) in all().into_iter().enumerate() {
            let script = serving(kind, status).await;
            let engine = engine_of(&model(&script.url, Vllm, 1)).unwrap();
            assert_eq!(engine.generate(None).await, Ok(Answer { kind, content }), "{status}");
            assert_eq!(lines(&script).len(), nth + 1);

            engine.generate(Some(kind)).await.unwrap();
            assert_eq!(lines(&script), [line], "a known kind is asked first");
        }
    }
}

#[tokio::test]
async fn a_set_kind_is_the_only_one() {
    for (kind, line, _, content) in all() {
        let script = serving(kind, 404).await;
        let engine = engine_of(&with_kind(&script.url, kind)).unwrap();
        assert_eq!(engine.generate(None).await, Ok(Answer { kind, content }));
        let other = if kind == Chat { Completion } else { Chat };
        let other = engine_of(&with_kind(&script.url, other)).unwrap();
        let error = other.generate(Some(kind)).await.unwrap_err();
        assert!(matches!(error, EngineError::Refused { status: 404, .. }), "{error}");
        assert_eq!(lines(&script)[0], line);
    }
}

#[tokio::test]
async fn a_known_kind_is_the_only_one() {
    for (kind, line, ..) in all() {
        let script = serving(if kind == Chat { Rerank } else { Chat }, 404).await;
        let error = engine_of(&model(&script.url, Vllm, 1)).unwrap().generate(Some(kind)).await.unwrap_err();
        assert!(matches!(error, EngineError::Refused { status: 404, .. }), "{error}");
        assert_eq!(lines(&script), [line]);
    }
}

#[tokio::test]
async fn other_errors_are_not_asked_around() {
    for status in [400, 401, 500, 503] {
        let script = Script::of(move |_| Scripted::Text(status, "out of memory".to_owned())).await;
        let error = engine_of(&model(&script.url, Vllm, 1)).unwrap().generate(None).await.unwrap_err();
        assert!(matches!(error, EngineError::Refused { .. }), "{error}");
        assert_eq!(lines(&script), ["POST /v1/completions"]);
    }
}

#[tokio::test]
async fn an_engine_that_serves_none_is_an_error_with_what_helps() {
    let script = serving(Get, 404).await;
    let mut model = model(&script.url, Vllm, 1);
    let text = engine_of(&model).unwrap().generate(None).await.unwrap_err().to_string();
    for part in ["/v1/completions: it answered 404", "/v1/rerank: 404", "`kind`", "served_as"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(lines(&script).len(), 4);
    // Only texts can contain a text.
    model.canary.expect = Some("three".to_owned());
    engine_of(&model).unwrap().generate(None).await.unwrap_err();
    assert_eq!(lines(&script), ["POST /v1/completions", "POST /v1/chat/completions"]);
}

#[tokio::test]
async fn a_page_has_to_be_there() {
    let script = Script::of(|asked: &Received| match asked.line.as_str() {
        "GET /status?full=1" => ok("fine"),
        _ => Scripted::Text(404, String::new()),
    })
    .await;
    let mut model = with_kind(&script.url, Get);
    model.canary.path = Some("/status?full=1".to_owned());
    let content = Content::Text("fine".to_owned());
    assert_eq!(engine_of(&model).unwrap().generate(None).await, Ok(Answer { kind: Get, content }));
    model.canary.path = Some("/other".to_owned());
    let error = engine_of(&model).unwrap().generate(None).await.unwrap_err();
    assert!(matches!(error, EngineError::Refused { status: 404, .. }), "{error}");
}

#[tokio::test]
async fn none_sends_nothing() {
    let model = with_kind(&nowhere().await, CanaryKind::None);
    let answer = engine_of(&model).unwrap().generate(None).await.unwrap();
    assert_eq!(answer.agrees_with(&answer), Ok(()));
}

#[tokio::test]
async fn wrong_answers_are_errors() {
    let table = [
        (Embedding, "{}", "no data[0].embedding"),
        (Embedding, r#"{"data":[{"embedding":[0,0.0]}]}"#, "no number other than 0"),
        (Embedding, r#"{"data":[{"embedding":[]}]}"#, "no number other than 0"),
        (Embedding, r#"{"data":[{"embedding":[0.5,null]}]}"#, "other than numbers"),
        (Embedding, r#"{"data":[{"embedding":[NaN]}]}"#, "no JSON"),
        (Rerank, "{}", "no results"),
        (Rerank, r#"{"results":[{"index":0,"relevance_score":1}]}"#, "each of two documents"),
        (Rerank, r#"{"results":[{"index":0},{"index":1}]}"#, "each of two documents"),
        (Chat, TEXT, "no choices[0].message.content"),
        (Chat, r#"{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}"#, "is empty"),
        (Chat, r#"{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}"#, "`abort`"),
    ];
    for (kind, answer, reason) in table {
        let script = Script::of(move |_| ok(answer)).await;
        let outcome = engine_of(&with_kind(&script.url, kind)).unwrap().generate(None).await;
        let error = outcome.expect_err(answer);
        assert!(matches!(error, EngineError::Unexpected { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}
