//! `poorwill rotate validate`: which models pass, and the report about faulty ones.

use serde_json::{Value, json};

use super::fixture::{Fixture, Model, TOKENS, text_of};
use super::http;
use crate::support::Ran;

const PROMPT: &str = "Tell me of a tree.";

fn walked(ran: &Ran, model: &str) -> Value {
    let report = ran.json();
    let models = report["models"].as_array().unwrap();
    models.iter().find(|one| one["model"] == model).unwrap_or_else(|| panic!("{report}")).clone()
}

#[test]
fn honest_ones_pass() {
    let fixture = Fixture::of_two();
    let rotator = fixture.start(&[]);
    let ran = fixture.order(&["validate", "--requests", "3", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}\n{}", rotator.log());
    crate::json::expect("poorwill rotate validate", &ran.json());
    assert_eq!(ran.json()["requests"], 3);
    assert_eq!(ran.json()["models"].as_array().unwrap().len(), 2);
    for name in ["amber", "birch"] {
        let walked = walked(&ran, name);
        let is = |key: &str| walked[key].clone();
        assert_eq!([is("verdict"), is("right"), is("garbage")], [json!("pass"), json!(3), json!(0)]);
        assert!(walked["sleep_s"].is_f64() && walked["wake_s"].is_f64() && walked.get("because").is_none());
        let now = fixture.now(name);
        assert_eq!((&now["starts"], &now["failures"]), (&json!(1), &json!(0)));
    }
    let ran = fixture.order(&["validate", "--requests", "1"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(
        ran.stdout.contains("amber") && ran.stdout.contains("birch") && ran.stdout.contains("pass"),
        "{ran:?}"
    );
    for step in [
        "amber: ready after ",
        "amber: answered 1 prompts",
        "birch: cycle 1 of 1: asleep after ",
        "birch: pass",
    ] {
        assert!(ran.stderr.lines().any(|line| line.starts_with(step)), "`{step}` is not in: {}", ran.stderr);
    }
    rotator.end();
    fixture.assert_empty();
}

/// Each sleep of its passes, and what stays in use grows.
#[test]
fn leaks_fail_in_several_cycles() {
    // A process of the host takes some MiB more for itself.
    let mut models = vec![Model::new("amber"), Model::faulty("birch", "leaks")];
    models.iter_mut().for_each(|model| model.lines = "[model.rules]\nslack = \"10MiB\"\n".to_owned());
    let fixture = Fixture::new("512MiB", models);
    let rotator = fixture.start(&[]);
    let ran = fixture.order(&["validate", "--requests", "1", "--cycles", "5", "--json"]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (1, "error: not valid: birch\n"),
        "{ran:?}\n{}",
        rotator.log()
    );
    assert_eq!(
        (&walked(&ran, "amber")["verdict"], &walked(&ran, "amber")["right"]),
        (&json!("pass"), &json!(5))
    );
    let birch = walked(&ran, "birch");
    assert!(
        birch["verdict"] == "fail" && birch["because"].as_str().unwrap().starts_with("it leaks: "),
        "{birch}"
    );
    let cycles = birch["cycles"].as_array().unwrap();
    assert_eq!(cycles.len(), 5);
    for cycle in cycles {
        assert!(cycle["sleep_s"].is_f64() && cycle["wake_s"].is_f64(), "{birch}");
        assert!(cycle["asleep_bytes"][0].as_u64() > Some(0), "{birch}");
    }
    rotator.end();
}

/// Who is quarantined is not waited for, however long a start might take.
#[test]
fn a_model_that_is_given_up_ends_it() {
    let fixture = Fixture::new("512MiB", vec![Model::faulty("birch", "says-asleep")]);
    let config = fixture
        .config()
        .replace("pause_min = \"100ms\"\npause_max = \"1s\"", "pause_min = \"1h\"\npause_max = \"1h\"");
    let rotator = fixture.start_with(&config, &[]);
    let ran = fixture.order(&["validate", "--json"]);
    let walked = walked(&ran, "birch");
    let because = walked["because"].as_str().unwrap();
    assert!(because.contains("will not be ready: it is quarantined"), "{walked}\n{}", rotator.log());
    rotator.end();
}

#[test]
fn liars_do_not_pass_though_no_answer_is_wrong() {
    let mut cedar = Model::faulty("cedar", "keeps-memory");
    // It keeps it for ever.
    cedar.lines = "[model.rules]\nrelease_max = \"3s\"\n".to_owned();
    let models = vec![Model::new("amber"), Model::faulty("birch", "gibberish"), cedar];
    let fixture = Fixture::new("1GiB", models);
    let rotator = fixture.start(&[]);
    let ran = fixture.order(&["validate", "--requests", "3", "--json"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(ran.stderr, "error: not valid: birch, cedar\n");
    assert_eq!(walked(&ran, "amber")["verdict"], "pass");
    for name in ["birch", "cedar"] {
        let walked = walked(&ran, name);
        // The service started it again, so its answers were right.
        assert!(walked["verdict"] == "fail" && walked["right"] == 3 && walked["garbage"] == 0, "{walked}");
        assert!(walked["because"].as_str().unwrap().contains("started again"), "{walked}");
        assert_eq!(fixture.now(name)["starts"], 2, "{}", rotator.log());
    }
    // Who looks now and then may have missed why.
    assert!(rotator.log().contains("its canary was wrong"), "{}", rotator.log());
    for Model { name, .. } in &fixture.models {
        assert_eq!([fixture.say(name, PROMPT)], fixture.truth(name, &[PROMPT], TOKENS)[..]);
    }
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn garbage_that_a_weak_canary_lets_through_is_found() {
    let mut fixture = Fixture::new("512MiB", vec![Model::faulty("birch", "gibberish")]);
    // A letter that is in what it says when it is well, and when it is not.
    let (mut child, port) = fixture.mock("birch", &["--fault", "gibberish"]);
    let ask = |path: &str, body: &Value| http::ask(port, "POST", path, &[], &body.to_string()).unwrap();
    let canary = json!({ "model": "birch", "prompt": PROMPT, "max_tokens": 60 });
    let right = text_of(&ask("/v1/completions", &canary));
    assert_eq!(ask("/sleep?level=1", &json!({})).status, 200);
    assert_eq!(ask("/wake_up", &json!({})).status, 200);
    let gibberish = text_of(&ask("/v1/completions", &canary));
    child.kill().unwrap();
    child.wait().unwrap();
    let letter = gibberish.chars().find(|c| c.is_ascii_lowercase() && right.contains(*c)).unwrap();
    fixture.models[0].lines =
        format!("[model.canary]\nprompt = \"{PROMPT}\"\ntokens = 60\nexpect = \"{letter}\"\n");
    let rotator = fixture.start(&[]);
    let ran = fixture.order(&["validate", "--requests", "2", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (1, "error: not valid: birch\n"), "{}", rotator.log());
    let walked = walked(&ran, "birch");
    assert!(walked["verdict"] == "garbage" && walked["garbage"] == 2 && walked["right"] == 0, "{walked}");
    assert!(walked["because"].as_str().unwrap().contains("question 1"), "{walked}");
    rotator.end();
}
