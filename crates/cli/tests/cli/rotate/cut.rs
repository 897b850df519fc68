//! Turns that are cut in the middle of answers: kept streams go on where they were, and end in words where they cannot.

use std::io::Read as _;
use std::net::TcpStream;
use std::thread;

use serde_json::{Value, json};

use super::fixture::{self, Fixture, Rotator, until};
use super::http;

const PROMPT: &str = "Tell me of a harbour.";
const TOKENS: u32 = 150;
/// Two turns of each and more for an answer.
const PACE: [&str; 2] = ["--tokens-per-s", "100"];
const LINES: &str = "[model.rules]\nslice_max = \"200ms\"\nturn_per_swap = 0\ndrain_max = \"60s\"\n";

/// One of two fits. What each says.
fn fixture() -> (Fixture, [String; 2]) {
    let mut fixture = Fixture::of_two();
    for model in &mut fixture.models {
        model.more = PACE.to_vec();
        model.lines = LINES.to_owned();
    }
    let truth = |name| fixture.truth(name, &[PROMPT], TOKENS).remove(0);
    let truths = [truth("amber"), truth("birch")];
    (fixture, truths)
}

fn body(model: &str, is_stream: bool) -> String {
    json!({ "model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": is_stream })
        .to_string()
}

/// The text of an answer, and whether it ended well.
fn asked(fixture: &Fixture, model: &str, is_stream: bool) -> (String, bool) {
    let answer = http::ask(fixture.front, "POST", "/v1/completions", &[], &body(model, is_stream)).unwrap();
    if !is_stream {
        return (fixture::text_of(&answer), true);
    }
    let text = text_so_far(&answer.body);
    (text, answer.body.trim_end().ends_with("data: [DONE]"))
}

/// How many of its turns were cut.
fn cuts(fixture: &Fixture, model: &str) -> u64 {
    let metrics = http::ask(fixture.control, "GET", "/metrics", &[], "").unwrap().body;
    let line = metrics.lines().find(|line| {
        line.starts_with("poorwill_rotate_cuts_total") && line.contains(&format!("model=\"{model}\""))
    });
    line.unwrap_or_else(|| panic!("{metrics}")).rsplit(' ').next().unwrap().parse().unwrap()
}

fn starts(fixture: &Fixture) -> [Value; 2] {
    ["amber", "birch"].map(|name| fixture.now(name)["starts"].clone())
}

#[test]
fn streams_and_whole_answers_of_two_models_go_on_over_cut_turns() {
    let (fixture, truths) = fixture();
    let rotator = fixture.start(&[]);
    // Each always has requests.
    let endless = ["amber", "birch"].map(|model| begin(&fixture, model));
    thread::scope(|scope| {
        let each = [("amber", true), ("birch", true), ("amber", false), ("birch", false)];
        let fixture = &fixture;
        let all =
            each.map(|(model, is_stream)| (model, scope.spawn(move || asked(fixture, model, is_stream))));
        for (model, one) in all {
            let truth = &truths[usize::from(model == "birch")];
            assert_eq!(one.join().unwrap(), (truth.clone(), true), "{}", rotator.log());
        }
    });
    until(&rotator, "both are cut", || ["amber", "birch"].iter().all(|model| cuts(&fixture, model) > 0));
    drop(endless);
    assert_eq!(starts(&fixture), [json!(1), json!(1)], "{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}

/// A stream without an end.
fn begin(fixture: &Fixture, model: &str) -> TcpStream {
    let body =
        json!({ "model": model, "prompt": PROMPT, "max_tokens": 30_000, "ignore_eos": true, "stream": true });
    http::send(fixture.front, "POST", "/v1/completions", &[], &body.to_string()).unwrap()
}

/// Reads on until a token has come.
fn first_token(stream: &mut TcpStream) -> String {
    let mut said = String::new();
    while text_so_far(&said).is_empty() {
        let mut part = [0; 4096];
        let len = stream.read(&mut part).unwrap();
        assert!(len > 0, "{said}");
        said += std::str::from_utf8(&part[..len]).unwrap();
    }
    said
}

/// Streams of the first, which is asleep with it and has said something, and of the second, which has a turn without an end.
fn cut_streams(fixture: &Fixture, rotator: &Rotator) -> ([TcpStream; 2], String) {
    let mut first = begin(fixture, "amber");
    let said = first_token(&mut first);
    let second = begin(fixture, "birch");
    until(rotator, "the other has its turn", || fixture.now("birch")["running"] == 1);
    assert_eq!(fixture.now("amber")["kept"], 1, "{}", rotator.log());
    ([first, second], said)
}

fn long_turns(fixture: &mut Fixture) {
    fixture.models[1].lines = LINES.replace("200ms", "1h");
}

#[test]
fn a_client_that_leaves_while_its_model_sleeps_leaves_nothing_behind() {
    let (mut fixture, truths) = fixture();
    long_turns(&mut fixture);
    let rotator = fixture.start(&[]);
    let ([first, second], _) = cut_streams(&fixture, &rotator);
    drop(first);
    until(&rotator, "it has left", || fixture.now("amber")["running"] == 0);
    assert_eq!(fixture.now("amber")["kept"], 0);
    drop(second);
    assert_eq!(asked(&fixture, "amber", true), (truths[0].clone(), true), "{}", rotator.log());
    assert_eq!(starts(&fixture), [json!(1), json!(1)], "{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_that_ends_with_kept_requests_tells_their_clients_and_comes_again() {
    let (mut fixture, truths) = fixture();
    long_turns(&mut fixture);
    let rotator = fixture.start(&[]);
    let ([mut first, second], mut said) = cut_streams(&fixture, &rotator);
    fixture::signal("KILL", fixture.engine("amber").unwrap());
    // It ends with an error event, and breaks off.
    let _broken = first.read_to_string(&mut said);
    assert!(said.contains("\"code\":\"aborted\"") && !said.contains("[DONE]"), "{said}\n{}", rotator.log());
    assert_eq!(fixture.now("birch")["running"], 1, "{}", rotator.log());
    drop(second);
    let text = fixture.say_at_last("amber", PROMPT);
    assert!(truths[0].starts_with(&text), "{text}\n{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}

/// The text of a stream's events so far.
fn text_so_far(events: &str) -> String {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    events.filter_map(|event| Some(event["choices"][0]["text"].as_str()?.to_owned())).collect()
}

#[test]
fn no_wrong_token_passes_behind_a_wake_that_spoiled_kept_requests() {
    for when in ["before", "beside"] {
        let (mut fixture, truths) = fixture();
        long_turns(&mut fixture);
        let word = truths[0].split_whitespace().next().unwrap();
        let expect = if when == "before" { format!("expect = {word:?}\n") } else { String::new() };
        fixture.models[0].lines +=
            &format!("[model.canary]\nprompt = {PROMPT:?}\nwhen = \"{when}\"\n{expect}");
        let rotator = fixture.start(&[]);
        // It is known then what batches change.
        assert!(truths[0].starts_with(&fixture.say("amber", PROMPT)), "{}", rotator.log());
        let ([mut first, second], mut said) = cut_streams(&fixture, &rotator);
        fixture.models[0].faults(&["gibberish"]);
        drop(second);
        let _broken = first.read_to_string(&mut said);
        let text = text_so_far(&said);
        let is_right = truths[0].starts_with(&text) || text.starts_with(&truths[0]);
        assert!(is_right && !said.contains("[DONE]"), "{said}\n{}", rotator.log());
        let code = if when == "before" { "aborted" } else { "untrue" };
        assert!(said.contains(&format!("\"code\":\"{code}\"")), "{said}\n{}", rotator.log());
        until(&rotator, "the log says why", || rotator.log().contains("its canary was wrong"));
        rotator.end();
        fixture.assert_empty();
    }
}

#[test]
fn an_engine_that_cannot_keep_requests_answers_them_first() {
    let (mut fixture, truths) = fixture();
    fixture.models[0].more.extend(["--fault", "keeps-no-requests"]);
    let rotator = fixture.start(&[]);
    let before = thread::scope(|scope| {
        let first = scope.spawn(|| asked(&fixture, "amber", true));
        until(&rotator, "it runs", || fixture.now("amber")["running"] == 1);
        let other = scope.spawn(|| asked(&fixture, "birch", true));
        assert_eq!(first.join().unwrap(), (truths[0].clone(), true), "{}", rotator.log());
        assert_eq!(other.join().unwrap(), (truths[1].clone(), true), "{}", rotator.log());
        rotator.log()
    });
    assert!(before.contains("it did not keep its requests in a sleep"), "{before}");
    assert!(before.contains("mode=wait or abort"), "{before}");
    assert_eq!(starts(&fixture), [json!(1), json!(1)], "{before}");
    rotator.end();
    fixture.assert_empty();
}
