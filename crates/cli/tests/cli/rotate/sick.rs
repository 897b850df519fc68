//! Engines that hang, say that they are not healthy, are slow, or end: each request gets an answer or a refusal in words,
//! and another copy comes up where one is needed.

use std::thread;

use serde_json::json;

use super::fixture::{self, Fixture, Model, Rotator, until};
use super::http::{self, Answer};

const PROMPT: &str = "Tell me of a harbour.";
const LINES: &str = "[model.rules]\nlook_every = \"200ms\"\ndrain_max = \"5s\"\n";

fn fixture() -> (Fixture, String) {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    fixture.models[0].lines = LINES.to_owned();
    let truth = fixture.truth("amber", &[PROMPT], fixture::TOKENS).remove(0);
    (fixture, truth)
}

/// The right answer, or an error that says what happened.
fn assert_served_or_refused(answer: std::io::Result<Answer>, truth: &str, rotator: &Rotator) {
    let answer = answer.unwrap_or_else(|error| panic!("{error}\n{}", rotator.log()));
    if answer.status == 200 {
        assert_eq!(fixture::text_of(&answer), truth, "{}", rotator.log());
    } else {
        assert!([500, 502, 503].contains(&answer.status), "{answer:?}\n{}", rotator.log());
        assert!(answer.body.contains("\"message\":\""), "{answer:?}");
    }
}

/// It has another engine, which answers.
fn comes_back(fixture: &Fixture, rotator: &Rotator, before: u32, truth: &str) {
    assert_eq!(fixture.say_at_last("amber", PROMPT), truth, "{}", rotator.log());
    assert!(fixture.now("amber")["starts"].as_u64() > Some(1), "{}", rotator.log());
    assert_ne!(fixture.engine("amber"), Some(before));
    assert!(!fixture.processes().contains(&before), "the old engine is left");
}

#[test]
fn a_stopped_engine_is_killed_and_its_requests_are_answered() {
    let (mut fixture, truth) = fixture();
    fixture.models[0].lines += "stop_max = \"20s\"\n";
    let rotator = fixture.start(&[]);
    assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
    let engine = fixture.engine("amber").unwrap();
    fixture::signal("STOP", engine);
    thread::scope(|scope| {
        let asked = scope.spawn(|| fixture.ask("amber", PROMPT));
        until(&rotator, "looks fail", || rotator.log().contains("3 looks in sequence failed"));
        assert_served_or_refused(asked.join().unwrap(), &truth, &rotator);
        comes_back(&fixture, &rotator, engine, &truth);
    });
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_that_says_it_is_not_healthy_is_replaced() {
    let (fixture, truth) = fixture();
    let rotator = fixture.start(&[]);
    assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
    let engine = fixture.engine("amber").unwrap();
    fixture.models[0].faults(&["unhealthy"]);
    let mut answers = Vec::new();
    until(&rotator, "its engine is given up", || {
        answers.push(fixture.ask("amber", PROMPT));
        fixture.now("amber")["starts"].as_u64() > Some(1)
    });
    answers.into_iter().for_each(|answer| assert_served_or_refused(answer, &truth, &rotator));
    comes_back(&fixture, &rotator, engine, &truth);
    let log = rotator.end();
    assert!(log.contains("it answered 503"), "{log}");
    fixture.assert_empty();
}

#[test]
fn an_engine_whose_answers_flow_may_be_late_at_looks() {
    let (mut fixture, truth) = fixture();
    fixture.models[0].more = vec!["--tokens-per-s", "5"];
    let rotator = fixture.start(&[]);
    assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
    let body =
        json!({ "model": "amber", "prompt": PROMPT, "max_tokens": 900, "min_tokens": 900, "stream": true });
    let key = format!("Bearer {}", fixture::KEY);
    let headers = [("authorization", &*key)];
    let stream = http::send(fixture.front, "POST", "/v1/completions", &headers, &body.to_string()).unwrap();
    until(&rotator, "its answer flows", || fixture.now("amber")["running"] == 1);
    fixture.models[0].faults(&["hangs-in-health"]);
    // Three would be enough.
    until(&rotator, "looks are late", || fixture.models[0].injected("hangs-in-health") >= 5);
    fixture.models[0].faults(&[]);
    drop(stream);
    assert_eq!(fixture.say_at_last("amber", PROMPT), truth, "{}", rotator.log());
    assert_eq!(fixture.now("amber")["starts"], 1, "{}", rotator.log());
    assert!(!rotator.log().contains("looks in sequence failed"), "{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_that_ends_in_an_answer_is_replaced() {
    let (fixture, truth) = fixture();
    let rotator = fixture.start(&[]);
    assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
    let engine = fixture.engine("amber").unwrap();
    fixture.models[0].faults(&["crashes-in-stream"]);
    // An answer that had begun breaks off. The next one is another engine's.
    if let Ok(answer) = fixture.ask("amber", PROMPT) {
        assert_served_or_refused(Ok(answer), &truth, &rotator);
    }
    assert_eq!(fixture.say_at_last("amber", PROMPT), truth, "{}", rotator.log());
    comes_back(&fixture, &rotator, engine, &truth);
    rotator.end();
    fixture.assert_empty();
}

/// Text and errors of a stream's events.
fn read_stream(events: &str) -> (String, bool) {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<serde_json::Value> = events.filter_map(|data| serde_json::from_str(data).ok()).collect();
    let text = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    (text, events.iter().any(|event| event["error"]["code"] == "untrue"))
}

#[test]
fn a_canary_beside_requests_lets_no_wrong_answer_end_well() {
    let mut fixture = Fixture::of_two();
    for model in &mut fixture.models {
        model.lines = "[model.canary]\nwhen = \"beside\"\n".to_owned();
    }
    let truth = fixture.truth("amber", &[PROMPT], fixture::TOKENS).remove(0);
    let rotator = fixture.start(&[]);
    for _ in 0..3 {
        assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
        fixture.say("birch", PROMPT);
    }
    let starts = |name| fixture.now(name)["starts"].as_u64().unwrap();
    assert_eq!([starts("amber"), starts("birch")], [1, 1], "{}", rotator.log());
    // Each was asked before its first requests once, behind its start.
    assert_eq!(
        rotator.log().matches("stage=\"canary\"").count() + rotator.log().matches("stage=canary").count(),
        2,
        "{}",
        rotator.log()
    );
    let key = format!("Bearer {}", fixture::KEY);
    let body = json!({ "model": "amber", "prompt": PROMPT, "max_tokens": fixture::TOKENS, "stream": true, "temperature": 0 });
    for nth in 2..5 {
        // Only its next wake.
        fixture.models[0].faults(&["gibberish"]);
        if nth % 2 == 0 {
            // Nothing of it has passed when the canary differs, so the next engine answers.
            assert_eq!(fixture.say("amber", PROMPT), truth, "{}", rotator.log());
        } else {
            let headers = [("authorization", &*key)];
            let answer =
                http::ask(fixture.front, "POST", "/v1/completions", &headers, &body.to_string()).unwrap();
            let (text, is_untrue) = read_stream(&answer.body);
            assert!(text == truth || is_untrue, "{answer:?}\n{}", rotator.log());
            assert_eq!(fixture.say_at_last("amber", PROMPT), truth, "{}", rotator.log());
        }
        assert_eq!(starts("amber"), nth, "{}", rotator.log());
        fixture.say("birch", PROMPT);
    }
    assert!(rotator.log().contains("its canary was wrong"), "{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}
