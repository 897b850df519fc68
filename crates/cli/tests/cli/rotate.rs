//! `poorwill rotate` from its command line to its mock engines: answers to clients, and what a service that
//! ends or dies leaves to the next.

mod browser;
mod chaos;
mod check;
mod cut;
mod engines;
pub(crate) mod fixture;
mod fleet_page;
mod hibernate;
pub(crate) mod http;
mod import;
mod init;
mod killed;
mod page;
pub(crate) mod received;
mod sick;
mod traces;
mod usage;
mod validate;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::thread;

use poorwill_mock_engine::Fault;
use poorwill_testkit::effort::Effort;
use serde_json::{Value, json};

use self::fixture::{Fixture, Model, Rotator, is_empty, text_of, until};

const PROMPTS: [&str; 2] = ["Tell me of a tree.", "Tell me of another."];

#[test]
fn two_models_of_which_one_fits_take_turns() {
    let fixture = Fixture::of_two();
    let truth = ["amber", "birch"].map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS));
    assert_ne!(truth[0], truth[1]);
    let rotator = fixture.start(&[]);
    for model in [0, 1, 0] {
        assert_eq!(fixture.say(fixture.models[model].name, PROMPTS[0]), truth[model][0], "{}", rotator.log());
        assert_eq!(fixture.models[model].is_sleeping(), Some(false));
        // The other sleeps by its own word, or was never started.
        assert_ne!(fixture.models[1 - model].is_sleeping(), Some(false), "{}", rotator.log());
    }
    let status = fixture.status();
    let swaps = status["swaps"].as_array().unwrap();
    let swaps: Vec<_> = swaps.iter().map(|one| [&one["model"], &one["path"]]).collect();
    assert_eq!(json!(swaps), json!([["amber", "hot"], ["birch", "cold"], ["amber", "cold"]]));
    for (name, stage) in [("amber", "ready"), ("birch", "asleep")] {
        let now = fixture.now(name);
        assert_eq!((&now["stage"], &now["starts"], &now["failures"]), (&json!(stage), &json!(1), &json!(0)));
    }
    // All at once, and more of one than of the other.
    thread::scope(|scope| {
        for (nth, model) in [0, 1, 0, 0, 1, 0, 1, 0].into_iter().enumerate() {
            let (fixture, truth) = (&fixture, &truth);
            scope.spawn(move || {
                for turn in 0..2 {
                    let prompt = (nth + turn) % 2;
                    assert_eq!(
                        fixture.say(fixture.models[model].name, PROMPTS[prompt]),
                        truth[model][prompt]
                    );
                }
            });
        }
    });
    let ready = fixture.status()["swaps"].as_array().unwrap().len();
    assert!(ready >= 4, "{}", rotator.log());
    one_at_a_time(&fixture, ready);
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn what_sleeps_is_lent_until_it_wakes_or_another_model_lacks_it() {
    let mut fixture = Fixture::of_two();
    fixture.lends = true;
    let truth = ["amber", "birch"].map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS));
    let rotator = fixture.start(&[]);
    let lending = |key: &str| fixture.status()["lending"][key].as_u64().unwrap_or_default();
    let say = |model: usize, prompt: usize| {
        let said = fixture.say(fixture.models[model].name, PROMPTS[prompt]);
        assert_eq!(said, truth[model][prompt], "{}", rotator.log());
    };
    let held = 64 << 20;
    until(&rotator, "each takes what the other has lent", || {
        [0, 1].into_iter().for_each(|model| say(model, 0));
        lending("taken_bytes") > 2 * held
    });
    let is_lent = |gpu: &Value| gpu["reclaimable_bytes"].as_u64().is_some_and(|bytes| bytes >= held);
    until(&rotator, "one that is alone gets back what it has lent", || {
        fixture.order(&["sleep", "birch", "--wait"]).succeeded();
        let was_lent = is_lent(&fixture.status()["gpus"][0]);
        let before = lending("brought_back_bytes");
        say(1, 1);
        was_lent && lending("brought_back_bytes") >= before + held
    });
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn memory_that_cannot_be_measured_is_reported_at_the_start() {
    let mut fixture = Fixture::of_two();
    fixture.lacks_nvml = true;
    let rotator = fixture.start(&["--json"]);
    until(&rotator, "it warns", || rotator.log().contains("none of its models can wake"));
    let log = rotator.log();
    for words in
        ["\"WARN\"", "\"gpu\":0", "cannot measure GPU 0", "libnvidia-ml.so.1", "install NVIDIA's driver"]
    {
        assert!(log.contains(words), "`{words}` is not in: {log}");
    }
    rotator.end();
    fixture.assert_empty();
}

/// By the events in order: a model becomes ready only while all others sleep.
fn one_at_a_time(fixture: &Fixture, ready: usize) {
    let stream = http::send(fixture.control, "GET", "/rotate/events?past=1000", &[], "").unwrap();
    let mut stages: BTreeMap<String, String> = BTreeMap::new();
    let mut came = 0;
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let Some(event) = line.strip_prefix("data: ") else { continue };
        let event: Value = serde_json::from_str(event).unwrap();
        if let Some(stage) = event["stage"].as_str().filter(|_| event["event"] == "stage") {
            stages.insert(event["model"].as_str().unwrap().to_owned(), stage.to_owned());
        }
        let is_down = |stage: &&String| {
            ["unknown", "probing", "finding memory", "cold", "asleep"].contains(&stage.as_str())
        };
        assert!(stages.values().filter(|stage| !is_down(stage)).count() <= 1, "{stages:?}");
        came += usize::from(event["event"] == "ready");
        if came == ready {
            return;
        }
    }
    panic!("{came} of {ready} came up by the events");
}

/// One that is awake, and one that sleeps.
fn one_of_each(fixture: &Fixture) -> Rotator {
    let rotator = fixture.start(&[]);
    for model in ["amber", "birch"] {
        fixture.say(model, PROMPTS[0]);
    }
    assert_eq!(fixture.models[0].is_sleeping(), Some(true), "{}", rotator.log());
    assert_eq!(fixture.models[1].is_sleeping(), Some(false), "{}", rotator.log());
    rotator
}

#[test]
fn engines_outlive_a_rotation_that_is_killed_and_the_next_one_finds_them() {
    let fixture = Fixture::of_two();
    let truth = ["amber", "birch"].map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS));
    one_of_each(&fixture).kill();
    let engines = fixture.processes();
    assert_eq!(engines.len(), 2);
    assert_eq!(fixture.models[0].is_sleeping(), Some(true));

    let rotator = fixture.start(&[]);
    for (name, stage) in [("amber", "asleep"), ("birch", "ready")] {
        until(&rotator, "it is found", || fixture.now(name)["stage"] == stage);
        assert_eq!(fixture.now(name)["starts"], 0);
    }
    for model in [1, 0, 1] {
        assert_eq!(fixture.say(fixture.models[model].name, PROMPTS[1]), truth[model][1], "{}", rotator.log());
    }
    for name in ["amber", "birch"] {
        assert_eq!(fixture.now(name)["starts"], 0, "{}", rotator.log());
    }
    assert!(engines.iter().all(|pid| fixture.processes().contains(pid)));
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn engines_that_are_kept_are_the_same_for_the_next_one() {
    let fixture = Fixture::of_two();
    let rotator = fixture.start(&["--keep-engines"]);
    let output = fixture.say("amber", PROMPTS[0]);
    rotator.end();
    let engines = fixture.processes();
    assert_eq!(engines.len(), 1);
    assert_eq!(fixture.models[0].is_sleeping(), Some(false));
    let rotator = fixture.start(&["--keep-engines"]);
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    assert_eq!(fixture.now("amber")["starts"], 0, "{}", rotator.log());
    rotator.end();
    assert_eq!(fixture.processes(), engines);
}

#[test]
fn an_engine_that_is_killed_is_started_again() {
    let fixture = Fixture::of_two();
    let rotator = fixture.start(&[]);
    let output = fixture.say("amber", PROMPTS[0]);
    let engine = fixture.processes().into_iter().find(|pid| *pid != rotator.child.id()).unwrap();
    fixture::signal("KILL", engine);
    until(&rotator, "its end is seen", || {
        fixture.now("amber")["stage"] != "ready" || fixture.now("amber")["starts"] == 2
    });
    assert_eq!(fixture.say("amber", PROMPTS[0]), output, "{}", rotator.log());
    assert_eq!(fixture.now("amber")["starts"], 2);
    rotator.end();
    fixture.assert_empty();
}

/// A rotation whose engine has a process, and does not listen yet.
fn starting(fixture: &mut Fixture) -> Rotator {
    fixture.models[0].is_held = true;
    let rotator = fixture.start(&[]);
    fixture.order(&["wake", "amber"]).succeeded();
    until(&rotator, "its process is written down", || fixture.engine("amber").is_some());
    assert_eq!(fixture.models[0].is_sleeping(), None);
    rotator
}

#[test]
fn an_engine_that_starts_ends_with_the_rotation() {
    let mut fixture = Fixture::of_two();
    starting(&mut fixture).end();
    fixture.assert_empty();
}

#[test]
fn an_engine_that_was_starting_when_the_rotation_was_killed_is_no_hindrance() {
    let mut fixture = Fixture::of_two();
    let truth = fixture.truth("amber", &PROMPTS, fixture::TOKENS);
    starting(&mut fixture).kill();
    let rotator = fixture.start(&[]);
    fixture.open_latch();
    assert_eq!(fixture.say("amber", PROMPTS[0]), truth[0], "{}", rotator.log());
    // The rotator, and one engine.
    assert_eq!(fixture.processes().len(), 2, "{}", rotator.log());
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn whatever_an_engine_does_wrong_no_answer_is_wrong() {
    // Those of hibernation, health and cut turns have tests of their own.
    let others = [
        Fault::HibernateRefuses,
        Fault::ResidueStays,
        Fault::ResumeFails,
        Fault::Communicator,
        Fault::Unhealthy,
        Fault::HangsInHealth,
        Fault::KeepsNoRequests,
    ];
    let faults = Fault::ALL.iter().filter(|fault| !others.contains(fault));
    let faults: Vec<&'static str> = faults.map(|fault| fault.name()).collect();
    thread::scope(|scope| {
        for some in faults.chunks(2) {
            scope.spawn(move || some.iter().for_each(|fault| harms_no_other_model(fault)));
        }
    });
}

/// A faulty model and a correct one take turns (one turn less in a quick run). The correct one always
/// answers; the faulty one right or not at all.
fn harms_no_other_model(fault: &'static str) {
    let mut fixture = Fixture::of_two();
    fixture.models[0] = Model::faulty("amber", fault);
    // What hangs does so for ever.
    fixture.models[0].more.extend(["--tokens-per-s", "1000"]);
    fixture.models[0].lines =
        "[model.rules]\nsleep_max = \"500ms\"\nrelease_max = \"500ms\"\nwake_max = \"500ms\"\n\
                             canary_max = \"500ms\"\nwait_max = \"10s\"\n"
            .to_owned();
    let truth = ["amber", "birch"].map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS));
    let rotator = fixture.start(&[]);
    if !["hangs-in-answer", "crashes-in-stream", "says-asleep"].contains(&fault) {
        // These faults occur in sleeps and wakes only.
        assert_eq!(fixture.say_at_last("amber", PROMPTS[0]), truth[0][0], "{fault}: {}", rotator.log());
    }
    let turns = if Effort::of_this_run() == Effort::Quick { 2 } else { 3 };
    for turn in 0..turns {
        let prompt = PROMPTS[turn / 2];
        match fixture.ask("amber", prompt) {
            Ok(answer) if answer.status == 200 => {
                assert_eq!(text_of(&answer), truth[0][turn / 2], "{fault}: {}", rotator.log());
            }
            Ok(answer) => {
                assert!([502, 503].contains(&answer.status), "{fault}: {answer:?}\n{}", rotator.log());
            }
            // One that crashed in the middle of its answer.
            Err(error) => assert_eq!(fault, "crashes-in-stream", "{error}\n{}", rotator.log()),
        }
        assert_eq!(fixture.say("birch", prompt), truth[1][turn / 2], "{fault}: {}", rotator.log());
    }
    let log = rotator.end();
    // These do no harm that a rotation sees within so few turns.
    assert!(
        log.contains(" WARN ") || ["slow", "leaks"].contains(&fault),
        "{fault} was not injected, or not seen: {log}"
    );
    fixture.assert_empty();
}

#[test]
fn a_watched_file_is_taken_over_and_a_wrong_one_is_reported_once() {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    let rotator = fixture.start(&["--watch"]);
    let output = fixture.say("amber", PROMPTS[0]);
    let wrong = format!("{}alias = [\"resin\"]\n", fixture.config());
    fixture.folder.write("rotation.toml", wrong);
    until(&rotator, "it complains", || rotator.log().contains("cannot reload the configuration"));
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    // As an editor does.
    fixture.models[0].lines = "aliases = [\"resin\"]\n".to_owned();
    fixture.folder.write("rotation.new", fixture.config());
    fs::rename(fixture.folder.path().join("rotation.new"), fixture.folder.path().join("rotation.toml"))
        .unwrap();
    until(&rotator, "it is read", || rotator.log().contains("reloaded the configuration"));
    assert_eq!(fixture.say("resin", PROMPTS[0]), output);
    assert_eq!(rotator.log().matches("cannot reload the configuration").count(), 1);
    rotator.end();
}

#[test]
fn a_log_is_read_and_followed_and_all_models_sleep() {
    let fixture = Fixture::new("512MiB", vec![Model::new("amber"), Model::new("birch")]);
    let rotator = fixture.start(&[]);
    for name in ["amber", "birch"] {
        fixture.say(name, PROMPTS[0]);
    }
    let last = fixture.order(&["log", "amber", "--lines", "1"]).succeeded();
    assert_eq!(last.lines().count(), 1, "{last}");
    let json = fixture.order(&["log", "amber", "--json"]).succeeded();
    let json: Value = serde_json::from_str(&json).unwrap();
    let lines = json["lines"].as_array().unwrap();
    // What the engine says may come before.
    assert!(lines.iter().any(|line| line.as_str().unwrap().contains("started process")), "{json}");
    fixture.order(&["log", "cedar", "--follow"]).failed(&["`cedar`", "amber, birch"]);

    let mut command = fixture.command(&["rotate", "log", "amber", "--follow", "--config", "rotation.toml"]);
    let mut follower = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut followed = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
    for line in lines {
        assert_eq!(followed.next().as_deref(), line.as_str());
    }
    assert_eq!(fixture.order(&["sleep", "--all"]).succeeded(), "sleep accepted for all 2 models\n");
    let is_asleep = |name| fixture.now(name)["stage"] == "asleep";
    until(&rotator, "all sleep", || is_asleep("amber") && is_asleep("birch"));
    fixture.order(&["restart", "amber"]).succeeded();
    assert!(followed.any(|line| line == "[poorwill] stopped"));
    // It ends with the service.
    rotator.end();
    followed.for_each(drop);
    assert!(follower.wait().unwrap().success());
}

#[test]
fn a_broken_file_changes_nothing_and_a_changed_one_is_taken_over() {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    let rotator = fixture.start(&[]);
    let output = fixture.say("amber", PROMPTS[0]);

    let before = fixture.config();
    fixture.folder.write("rotation.toml", format!("{before}alias = [\"resin\"]\n"));
    let line = format!("line {}", before.lines().count() + 1);
    rotator.signal("HUP");
    until(&rotator, "it complains", || rotator.log().contains("cannot reload the configuration"));
    let log = rotator.log();
    let complaint = log.lines().find(|line| line.contains("cannot reload the configuration")).unwrap();
    for word in ["ERROR", "rotation.toml", &line, "`alias`", "`aliases`"] {
        assert!(complaint.contains(word), "`{word}` is not in: {complaint}");
    }
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    // The command cannot read it either, and sends no request.
    fixture.order(&["reload"]).failed(&["rotation.toml", &line, "`aliases`"]);
    let answer = http::ask(fixture.control, "POST", "/rotate/reload", &[], "").unwrap();
    assert_eq!(answer.status, 422, "{answer:?}");
    for word in ["rotation.toml", &line, "`aliases`"] {
        assert!(answer.body.contains(word), "`{word}` is not in: {answer:?}");
    }

    fixture.models[0].lines = "aliases = [\"resin\"]\n".to_owned();
    fixture.models.push(Model::new("cedar"));
    fixture.models[1].lines = "[profile.day]\nsun = \"resin\"\n".to_owned();
    fixture.write();
    assert_eq!(fixture.complete("resin", PROMPTS[0]).status, 404);
    rotator.signal("HUP");
    until(&rotator, "it is read", || rotator.log().contains("reloaded the configuration"));
    assert_eq!(fixture.say("resin", PROMPTS[0]), output);
    assert_eq!(
        [fixture.say("cedar", PROMPTS[0])],
        fixture.truth("cedar", &PROMPTS[..1], fixture::TOKENS)[..]
    );
    assert_eq!(fixture.now("amber")["starts"], 1);

    // An operator chooses a profile.
    assert_eq!(fixture.complete("sun", PROMPTS[0]).status, 404);
    assert_eq!(fixture.order(&["profile", "day"]).succeeded(), "profile day is chosen\n");
    assert_eq!(
        (fixture.say("sun", PROMPTS[0]), &fixture.status()["profile"]),
        (output.clone(), &json!("day"))
    );
    assert!(fixture.order(&["status"]).succeeded().ends_with("profile: day\n"));
    fixture.order(&["profile", "night"]).failed(&["no profile `night`", "there are: day"]);
    assert_eq!(fixture.order(&["profile", "--off"]).succeeded(), "no profile is chosen\n");
    assert_eq!(fixture.complete("sun", PROMPTS[0]).status, 404);

    // Unchanged models stay; a removed one is no longer managed.
    let port = fixture.models[0].port;
    fixture.models[0].port = fixture::free_port();
    fixture.write();
    fixture.order(&["reload"]).failed(&["amber", "url", "another name"]);
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    fixture.models[0].port = port;
    let cedar = fixture.models.pop().unwrap();
    fixture.write();
    assert_eq!(fixture.order(&["reload"]).succeeded(), "the configuration was read again\n");
    assert_eq!(fixture.complete("cedar", PROMPTS[0]).status, 404);
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    // Once it is there again, so is its engine.
    fixture.models.push(cedar);
    fixture.write();
    fixture.order(&["reload"]).succeeded();
    assert_eq!(
        [fixture.say("cedar", PROMPTS[0])],
        fixture.truth("cedar", &PROMPTS[..1], fixture::TOKENS)[..]
    );
    assert_eq!(fixture.now("cedar")["starts"], 1, "{}", rotator.log());
    fixture.models.pop();
    fixture.write();
    fixture.order(&["reload"]).succeeded();
    // Its engine is still ours to end.
    assert_eq!(fixture.processes().len(), 3);
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn running_requests_finish_before_the_service_ends() {
    let mut fixture = Fixture::of_two();
    fixture.models[0].more = vec!["--tokens-per-s", "10"];
    fixture.models[0].lines = "[model.canary]\ntokens = 1\n".to_owned();
    let truth = fixture.truth("amber", &PROMPTS, 24);
    let rotator = fixture.start(&[]);
    let body =
        json!({ "model": "amber", "prompt": PROMPTS[1], "max_tokens": 24, "stream": true }).to_string();
    let (mut stream, mut answer) = loop {
        let stream = http::send(fixture.front, "POST", "/v1/completions", &[], &body).unwrap();
        let (mut stream, mut answer) = (BufReader::new(stream), String::new());
        while !answer.contains("data: ") {
            assert!(stream.read_line(&mut answer).unwrap() > 0, "{answer}");
        }
        fixture::signal("STOP", fixture.engine("amber").unwrap());
        if fixture.now("amber")["running"] == 1 {
            break (stream, answer);
        }
        // It came to its end before its engine could be held up.
        fixture::signal("CONT", fixture.engine("amber").unwrap());
    };
    thread::scope(|scope| {
        // This one waits, since the first has the room.
        let waits = scope.spawn(|| fixture.complete("birch", PROMPTS[0]));
        until(&rotator, "it waits", || fixture.now("birch")["queued"] == 1);
        rotator.signal("TERM");
        let refused = waits.join().unwrap();
        assert!(refused.status == 503 && refused.body.contains("shutting_down"), "{refused:?}");
    });
    until(&rotator, "it ends", || rotator.log().contains("shutting down"));
    // A new client finds no listener, or gets an error.
    let body = json!({ "model": "amber", "prompt": "x" }).to_string();
    if let Ok(late) = http::ask(fixture.front, "POST", "/v1/completions", &[], &body) {
        assert_eq!(late.status, 503, "{late:?}");
    }
    fixture::signal("CONT", fixture.engine("amber").unwrap());
    stream.read_to_string(&mut answer).unwrap();
    let whole = http::parsed(answer.as_bytes()).unwrap();
    let events: Vec<&str> = whole.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, events) = events.split_last().unwrap();
    assert_eq!(*last, "[DONE]");
    let piece = |event: &&str| {
        let event: Value = serde_json::from_str(event).unwrap();
        event["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(events.iter().map(piece).collect::<String>(), truth[1]);
    let (code, log) = rotator.ended();
    assert_eq!(code, Some(0), "{log}");
    fixture.assert_empty();
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    fixture.models[0].more = vec!["--tokens-per-s", "1"];
    fixture.models[0].lines = "[model.canary]\ntokens = 1\n".to_owned();
    let rotator = fixture.start(&[]);
    let body =
        json!({ "model": "amber", "prompt": PROMPTS[0], "max_tokens": 80, "min_tokens": 80, "stream": true });
    let mut stream = http::send(fixture.front, "POST", "/v1/completions", &[], &body.to_string()).unwrap();
    stream.read_exact(&mut [0; 12]).unwrap();
    rotator.signal("TERM");
    until(&rotator, "it ends", || rotator.log().contains("shutting down"));
    rotator.signal("INT");
    let (code, log) = rotator.ended();
    assert!(code == Some(1) && log.contains("error: ended at once"), "{code:?} {log}");
}

/// `--wait` returns when it is done, and what can never be done is refused at once.
#[test]
fn commands_wait_until_it_is_done_or_cannot_be() {
    let mut fixture = Fixture::of_two();
    fixture.models[1].more = vec!["--fault", "refuses"];
    let rotator = fixture.start(&[]);
    let done = |args: &[&str], stage: &str| {
        let output = fixture.order(args).succeeded();
        let words = format!("amber: {} done; it is {stage}", args[0]);
        assert!(output.starts_with(&words), "{output}\n{}", rotator.log());
        assert_eq!(fixture.now("amber")["stage"], stage);
    };
    done(&["wake", "amber", "--wait"], "ready");
    done(&["restart", "amber", "--wait=100s"], "ready");
    assert_eq!(fixture.now("amber")["starts"], 2);
    done(&["sleep", "amber", "--wait"], "asleep");
    done(&["restart", "amber", "--wait"], "cold");
    let late = fixture.order(&["wake", "amber", "--wait=0s"]);
    late.failed(&["model `amber` is ", "and not ready"]);
    let refused = fixture.order(&["hibernate", "amber", "--wait"]);
    refused.failed(&["409", "`amber`: hibernate is refused", "needs [hibernate]"]);
    fixture.order(&["wake", "gone", "--wait"]).failed(&["404", "gone"]);
    // Its sleep fails, so its engine is stopped.
    done(&["wake", "amber", "--wait"], "ready");
    fixture.order(&["wake", "birch", "--wait"]).succeeded();
    fixture.order(&["sleep", "birch", "--wait"]).failed(&["`birch`: sleep failed, and it is cold", "500"]);
    rotator.end();
}

/// A program that is not there is no failure of the engine, and clients are not sent to its log.
#[test]
fn what_the_machine_fails_to_start_is_no_failure_of_the_engine() {
    let fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    let config = fixture.config().replace(env!("CARGO_BIN_EXE_poorwill"), "/no/such/program");
    let rotator = fixture.start_with(&config, &[]);
    let answer = fixture.complete("amber", PROMPTS[0]);
    let error = &serde_json::from_str::<Value>(&answer.body).unwrap()["error"];
    assert_eq!((answer.status, &error["code"]), (503, &json!("not_started")), "{answer:?}");
    assert!(error["message"].as_str().unwrap().contains("has not failed itself"), "{error}");
    assert!(fixture.now("amber")["last_failure"].as_str().unwrap().contains("/no/such/program"));
    rotator.end();
}

/// Engines run downloaded code, so no key of the service is in their environment unless it is given to them.
#[test]
fn keys_reach_no_engine_and_operators_need_only_theirs() {
    let (mut fixture, name) = (Fixture::of_two(), fixture::KEY_NAME);
    fixture.has_keys = true;
    fixture.models[1].lines = format!("environment = {{ {name} = \"${{env.{name}}}\" }}\n");
    // The front has a second one, which operators' commands do not have.
    let front = format!("keys = [\"env:{name}\", \"env:POORWILL_TEST_OF_FRONT\"]");
    let config = fixture.config().replacen(&format!("keys = [\"env:{name}\"]"), &front, 1);
    fixture.folder.write("rotation.toml", config);
    let mut command = fixture.command(&["rotate", "--config", "rotation.toml"]);
    let rotator = Rotator::spawned(command.env("POORWILL_TEST_OF_FRONT", "secret-of-front"), fixture.control);
    let has = |model: &str, text: &str| {
        let environment = fs::read(format!("/proc/{}/environ", fixture.engine(model).unwrap())).unwrap();
        String::from_utf8_lossy(&environment).contains(text)
    };
    for (model, is_given) in [("amber", false), ("birch", true)] {
        fixture.order(&["wake", model, "--wait"]).succeeded();
        assert_eq!((has(model, fixture::KEY), has(model, "secret-of-front")), (is_given, false), "{model}");
        assert!(has(model, "PATH="), "other variables are there");
    }
    fixture.order(&["status"]).succeeded();
    fixture.order(&["validate"]).failed(&["POORWILL_TEST_OF_FRONT"]);
    rotator.end();
}

#[test]
fn commands_of_operators_are_carried_out() {
    let fixture = Fixture::of_two();
    let rotator = fixture.start(&[]);
    let is = |name: &str, stage: &str| until(&rotator, stage, || fixture.now(name)["stage"] == stage);
    let output = fixture.order(&["wake", "amber"]).succeeded();
    assert!(output.starts_with("amber: wake accepted; it is ") && output.ends_with('\n'), "{output}");
    is("amber", "ready");
    let reply = fixture.order(&["pin", "amber", "--json"]).json();
    crate::json::expect("commandreply", &reply);
    assert_eq!((&reply["command"], &reply["model"]), (&"pin".into(), &"amber".into()), "{reply}");
    assert_eq!(fixture.now("amber")["is_pinned"], true);
    fixture.order(&["pin", "amber", "--off"]).succeeded();
    assert_eq!(fixture.now("amber")["is_pinned"], false);
    fixture.order(&["sleep", "amber"]).succeeded();
    is("amber", "asleep");
    assert_eq!(fixture.models[0].is_sleeping(), Some(true));
    fixture.order(&["wake", "amber"]).succeeded();
    is("amber", "ready");
    fixture.order(&["restart", "amber"]).succeeded();
    until(&rotator, "it was started again", || {
        let now = fixture.now("amber");
        now["stage"] == "ready" && now["starts"] == 2
    });
    fixture.order(&["wake", "nobody"]).failed(&["404", "`nobody`", "amber, birch"]);

    let status = fixture.order(&["status", "--json"]);
    let names: Vec<_> =
        status.json()["models"].as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(json!(names), json!(["amber", "birch"]));
    assert_eq!(status.json()["gpus"][0]["total_bytes"], 128 << 20);
    let text = fixture.order(&["status"]).succeeded();
    for word in ["amber", "birch", "ready", "cold"] {
        assert!(text.contains(word), "{text}");
    }
    rotator.end();
    fixture.assert_empty();
}

#[test]
#[ignore = "long: a demo until a hundred answers are right beside its faults"]
fn the_demo_injects_faults_and_gives_no_wrong_answer() {
    let fixture = Fixture::new("0", Vec::new());
    let mut demo = fixture.command(&["rotate", "--demo", "--duration", "10m", "--json"]).spawn().unwrap();
    let mut output = BufReader::new(demo.stderr.take().unwrap()).lines().map_while(Result::ok);
    let page = output.find_map(|line| line.strip_prefix("the page: http://127.0.0.1:").map(str::to_owned));
    let control: u16 = page.unwrap().trim_end_matches('/').parse().unwrap();
    // The rest need not be read, but must go somewhere.
    let rest = thread::spawn(move || output.collect::<Vec<_>>().join("\n"));
    until_each_fault_is_detected(control);
    fixture::signal("INT", demo.id());
    let ran = fixture::ended(demo);
    let output = rest.join().unwrap();
    assert_eq!(ran.code, 0, "{ran:?}\n{output}");
    let report = ran.json();
    crate::json::expect("poorwill rotate --demo", &report);
    assert_eq!(report["wrong"], 0, "{report}");
    let count = |name: &str| report[name].as_u64().unwrap();
    assert!(count("right") > 0 && count("swaps_cold") > 0 && count("swaps_hot") > 0, "{report}");
    assert_eq!(count("right") + count("refused"), count("requests"), "{report}");
    for what in ["reported sleep, and kept its memory", "failed in canary", "failed in waking"] {
        assert!(report["found"][format!("cedar {what}")].as_u64() >= Some(1), "{what}: {report}");
    }
    fixture.assert_empty();
    assert!(is_empty(fixture.folder.path()));
}

/// Counts turns of the faulty model, not time. Six suffice, unless a stalled machine sets a fault too late.
fn until_each_fault_is_detected(control: u16) {
    let stream = http::send(control, "GET", "/rotate/events?past=1000", &[], "").unwrap();
    let (mut detected, mut turns) = (BTreeSet::new(), 0);
    let mut active = BTreeSet::new();
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let Some(event) = line.strip_prefix("data: ") else { continue };
        let event: Value = serde_json::from_str(event).unwrap();
        let (what, model) = (event["event"].as_str().unwrap(), event["model"].as_str().unwrap_or_default());
        if what == "ready" {
            active.insert(model.to_owned());
        }
        match (what, model) {
            ("ready", "cedar") => turns += 1,
            ("shortfall", "cedar") => drop(detected.insert("memory".to_owned())),
            ("failed", "cedar") => drop(detected.insert(event["stage"].as_str().unwrap().to_owned())),
            _ => {}
        }
        let is_each = ["memory", "canary", "waking"].iter().all(|fault| detected.contains(*fault));
        if is_each && active.len() == 3 {
            return;
        }
        assert!(turns <= 18, "after {turns} turns only {detected:?} were detected");
    }
    panic!("the events ended after {turns} turns, with {detected:?}");
}

#[test]
fn development_endpoints_are_behind_the_front_and_stay_there() {
    let fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    let rotator = fixture.start(&[]);
    let output = fixture.say("amber", PROMPTS[0]);
    let body = json!({ "model": "amber", "level": 1 }).to_string();
    for path in [
        "/sleep",
        "/sleep?level=1",
        "/wake_up",
        "/collective_rpc",
        "/is_sleeping",
        "/mock/faults",
        "//sleep",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/..%2fsleep",
    ] {
        for method in ["GET", "POST"] {
            let answer = http::ask(fixture.front, method, path, &[], &body).unwrap();
            // Another method is as far as a path gets that is below /v1/ by its letters.
            let statuses: &[u16] = if path.starts_with("/v1/") { &[400, 404, 405] } else { &[404] };
            assert!(statuses.contains(&answer.status), "{method} {path}: {answer:?}");
        }
    }
    assert_eq!(fixture.models[0].is_sleeping(), Some(false), "{}", rotator.log());
    assert_eq!(fixture.say("amber", PROMPTS[0]), output);
    rotator.end();
}

#[test]
fn a_client_without_a_key_gets_no_information() {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    fixture.has_keys = true;
    let rotator = fixture.start(&[]);
    let right = format!("Bearer {}", fixture::KEY);
    let wrong = format!("Bearer {}x", fixture::KEY);
    for (method, path) in [
        ("GET", "/rotate/status"),
        ("GET", "/metrics"),
        ("POST", "/rotate/models/amber/wake"),
        ("POST", "/rotate/reload"),
    ] {
        for key in [None, Some(&wrong)] {
            let headers: Vec<_> = key.iter().map(|key| ("authorization", key.as_str())).collect();
            let answer = http::ask(fixture.control, method, path, &headers, "").unwrap();
            assert!(answer.status == 401 && !answer.body.contains("amber"), "{method} {path}: {answer:?}");
        }
        let answer = http::ask(fixture.control, method, path, &[("authorization", &right)], "").unwrap();
        assert!((200..300).contains(&answer.status), "{method} {path}: {answer:?}");
    }
    let body = json!({ "model": "amber", "prompt": "x" }).to_string();
    assert_eq!(http::ask(fixture.front, "POST", "/v1/completions", &[], &body).unwrap().status, 401);
    text_of(&fixture.complete("amber", "x"));
    // The command has the key from where the configuration says, or fails by name.
    fixture.order(&["status"]).succeeded();
    let args = ["rotate", "status", "--config", "rotation.toml"];
    let ran = fixture::ran(fixture.command(&args).env(fixture::KEY_NAME, "another"));
    ran.failed(&["401", "/rotate/status"]);
    fixture::ran(fixture.command(&args).env_remove(fixture::KEY_NAME))
        .failed(&["rotation.toml", fixture::KEY_NAME]);
    let log = rotator.end();
    assert!(!log.contains(fixture::KEY), "{log}");
}
