//! Engines that hibernate through the real helper: who is killed meanwhile, and what engines refuse.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use poorwill_testkit::watchdog::eventually;
use serde_json::{Value, json};

use super::fixture::{Fixture, Model, Rotator, ran, signal, until};
use super::http;

const PROMPT: &str = "Tell me of a cave.";
/// Little enough that a first sleep releases most of an engine.
const RESIDUE: &str = "32MiB";
const RESIDUE_BYTES: u64 = 32 << 20;
/// What programs and allocators have besides. Other tests' processes of the same program come and go, and share the
/// 16 MiB of it that are in memory.
const MORE_BYTES: u64 = 20 << 20;

/// Two models that fit, whose engines can leave their device.
pub(super) fn fixture(hibernate: &str) -> Fixture {
    let mut fixture = Fixture::new("1GiB", vec![Model::new("amber"), Model::new("birch")]);
    let processes = fixture.folder.join("processes");
    let journal = fixture.folder.join("journal");
    let helper = [env!("CARGO_BIN_EXE_poorwill"), "hibernate", "--serve", "--processes"].map(str::to_owned);
    let more = [processes.display().to_string(), "--journal".to_owned(), journal.display().to_string()];
    let helper = [&helper[..], &more[..]].concat();
    fixture.tables = format!("[hibernate]\n{hibernate}\nhelper = {}\n", json!(helper));
    for model in &mut fixture.models {
        (model.bytes, model.need) = ("256MiB", "310MiB");
        model.more = vec!["--residue", RESIDUE];
        model.lines = format!("environment = {}\n", toml(&processes.display().to_string()));
    }
    fixture
}

fn toml(folder: &str) -> String {
    format!("{{ POORWILL_HOST_PROCESSES = {folder:?} }}")
}

fn is(fixture: &Fixture, model: &str, stage: &str) -> bool {
    fixture.now(model)["stage"] == stage
}

fn until_is(fixture: &Fixture, rotator: &Rotator, model: &str, stage: &str) {
    until(rotator, &format!("{model} is {stage}"), || is(fixture, model, stage));
}

/// The process of the helper, once there is one besides `before`.
fn helper(fixture: &Fixture, rotator: &Rotator, before: Option<u32>) -> u32 {
    let is_one = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--serve") && Some(*pid) != before
    };
    let mut found = None;
    until(rotator, "a helper runs", || {
        found = fixture.processes().into_iter().find(is_one);
        found.is_some()
    });
    found.unwrap()
}

/// What a process has of its own. Its share of programs changes with who else runs them.
fn anonymous_bytes(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

fn order(fixture: &Fixture, command: &str, model: &str) {
    fixture.order(&[command, model]).succeeded();
}

/// The seconds of a stage in the last swap of a model.
fn phase_s(status: &Value, model: &str, stage: &str) -> Option<f64> {
    let swap = status["swaps"].as_array().unwrap().iter().find(|swap| swap["model"] == model).unwrap();
    let phases = swap["phases"].as_array().unwrap();
    phases.iter().find(|phase| phase[0] == stage).map(|phase| phase[1].as_f64().unwrap())
}

#[test]
fn an_engine_leaves_nothing_on_its_device_and_answers_as_before() {
    let fixture = fixture("");
    let rotator = fixture.start(&[]);
    let before = fixture.say("amber", PROMPT);
    order(&fixture, "sleep", "amber");
    until_is(&fixture, &rotator, "amber", "asleep");
    let asleep = anonymous_bytes(fixture.engine("amber").unwrap());
    for _ in 0..2 {
        order(&fixture, "hibernate", "amber");
        until_is(&fixture, &rotator, "amber", "hibernating");
        let off = anonymous_bytes(fixture.engine("amber").unwrap());
        assert!((asleep - off).abs_diff(RESIDUE_BYTES) < MORE_BYTES, "{asleep} {off}");
        let now = fixture.now("amber");
        let residue = now["residue_bytes"][0].as_u64().unwrap();
        assert!(residue.abs_diff(RESIDUE_BYTES) < MORE_BYTES, "{now}");
        assert_eq!(now["host_bytes"], RESIDUE_BYTES, "{now}");
        let wake = http::ask(fixture.models[0].port, "POST", "/wake_up", &[], "").unwrap();
        assert!(wake.status == 503 && wake.body.contains("hibernates"), "{wake:?}");
        assert_eq!(fixture.say("amber", PROMPT), before, "{}", rotator.log());
        assert!(phase_s(&fixture.status(), "amber", "resuming").is_some(), "{}", fixture.status());
    }
    assert_eq!(
        (&fixture.now("amber")["starts"], &fixture.now("amber")["host_bytes"]),
        (&json!(1), &json!(0))
    );
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn a_rotation_that_ends_ends_hibernating_engines_or_leaves_them_to_the_next() {
    let fixture = fixture("after = \"0s\"");
    let rotator = fixture.start(&["--keep-engines"]);
    let before = fixture.say("amber", PROMPT);
    order(&fixture, "sleep", "amber");
    until_is(&fixture, &rotator, "amber", "hibernating");
    rotator.end();
    let engine = fixture.engine("amber").unwrap();
    assert_eq!(fixture.processes(), [engine], "the helper is gone");
    let rotator = fixture.start(&[]);
    until_is(&fixture, &rotator, "amber", "hibernating");
    assert_eq!((fixture.say("amber", PROMPT), fixture.engine("amber")), (before, Some(engine)));
    order(&fixture, "sleep", "amber");
    until_is(&fixture, &rotator, "amber", "hibernating");
    rotator.end();
    fixture.assert_empty();
}

/// In each phase, with its helper or without.
#[test]
fn a_kill_of_the_rotation_loses_no_hibernating_engine() {
    for phase in ["hibernating", "going into hibernation", "resuming"] {
        for with_helper in [false, true] {
            let fixture = fixture("");
            let rotator = fixture.start(&[]);
            let before = fixture.say("amber", PROMPT);
            order(&fixture, "hibernate", "amber");
            until_is(&fixture, &rotator, "amber", "hibernating");
            let pid = helper(&fixture, &rotator, None);
            match phase {
                "going into hibernation" => {
                    fixture.say("amber", PROMPT);
                    signal("STOP", pid);
                    order(&fixture, "hibernate", "amber");
                }
                "resuming" => {
                    signal("STOP", pid);
                    order(&fixture, "wake", "amber");
                }
                _ => {}
            }
            until_is(&fixture, &rotator, "amber", phase);
            let engine = fixture.engine("amber").unwrap();
            if with_helper {
                signal("KILL", pid);
            }
            rotator.kill();
            // It finishes what it was asked for, since its input has ended.
            signal("CONT", pid);
            eventually("it has ended", || !fixture.processes().contains(&pid));
            let rotator = fixture.start(&[]);
            let answer = fixture.say("amber", PROMPT);
            assert_eq!(
                (answer, fixture.engine("amber")),
                (before, Some(engine)),
                "{phase}: {}",
                rotator.log()
            );
            rotator.end();
            fixture.assert_empty();
        }
    }
}

#[test]
fn a_kill_of_the_helper_in_any_phase_loses_no_engine() {
    let fixture = fixture("");
    let rotator = fixture.start(&[]);
    let before = fixture.say("amber", PROMPT);
    order(&fixture, "hibernate", "amber");
    until_is(&fixture, &rotator, "amber", "hibernating");
    let engine = fixture.engine("amber");
    let mut last = helper(&fixture, &rotator, None);
    for phase in ["hibernating", "going into hibernation", "resuming"] {
        if phase == "resuming" {
            order(&fixture, "hibernate", "amber");
            until_is(&fixture, &rotator, "amber", "hibernating");
        }
        if phase != "hibernating" {
            signal("STOP", last);
            order(&fixture, if phase == "resuming" { "wake" } else { "hibernate" }, "amber");
            until_is(&fixture, &rotator, "amber", phase);
        }
        signal("KILL", last);
        last = helper(&fixture, &rotator, Some(last));
        assert_eq!(
            (fixture.say("amber", PROMPT), fixture.engine("amber")),
            (before.clone(), engine),
            "{phase}"
        );
    }
    rotator.end();
    fixture.assert_empty();
}

#[test]
fn an_engine_that_cannot_hibernate_or_come_back_is_served_all_the_same() {
    for (fault, word) in [
        ("communicator", "until its next start"),
        ("residue-stays", "was not released"),
        ("hibernate-refuses", "REFUSED"),
        ("resume-fails", "was not put back"),
    ] {
        let mut fixture = fixture("");
        if fault == "residue-stays" {
            // Its first sleep has to be seen in this time, too.
            fixture.models[0].lines.push_str("[model.rules]\nrelease_max = \"3s\"\n");
        }
        let rotator = fixture.start(&[]);
        let before = fixture.say("amber", PROMPT);
        order(&fixture, "sleep", "amber");
        until_is(&fixture, &rotator, "amber", "asleep");
        fixture.models[0].faults(&[fault]);
        order(&fixture, "hibernate", "amber");
        let has_failed =
            || fixture.now("amber")["last_failure"].as_str().is_some_and(|why| why.contains(word));
        if fault == "resume-fails" {
            until_is(&fixture, &rotator, "amber", "hibernating");
        } else {
            until(&rotator, &format!("it fails by {fault}"), has_failed);
            until_is(&fixture, &rotator, "amber", "asleep");
        }
        assert_eq!(fixture.say("amber", PROMPT), before, "{fault}: {}", rotator.log());
        let starts = u64::from(fault == "resume-fails") + 1;
        assert_eq!(fixture.now("amber")["starts"], starts, "{fault}: {}", rotator.log());
        let can_hibernate = !["communicator", "residue-stays"].contains(&fault);
        assert_eq!(fixture.now("amber")["can_hibernate"], can_hibernate, "{fault}");
        rotator.end();
        fixture.assert_empty();
    }
}

#[test]
fn sleepers_that_hold_too_much_together_hibernate() {
    let fixture = fixture("residue_max = \"1MiB\"");
    let rotator = fixture.start(&[]);
    let before = ["amber", "birch"].map(|name| fixture.say(name, PROMPT));
    for name in ["amber", "birch"] {
        order(&fixture, "sleep", name);
    }
    for name in ["amber", "birch"] {
        until_is(&fixture, &rotator, name, "hibernating");
    }
    assert_eq!(["amber", "birch"].map(|name| fixture.say(name, PROMPT)), before);
    rotator.end();
    fixture.assert_empty();
}

/// Where there is none, none is made, and what is in it stays.
#[test]
fn check_looks_at_the_journal_of_the_service_and_changes_nothing() {
    let mut fixture = fixture("");
    fixture.tables = "[hibernate]\n".to_owned();
    fixture.write();
    let check = || {
        let mut command = fixture.command(&["rotate", "check", "--config", "rotation.toml"]);
        command.env("POORWILL_HOST_PROCESSES", fixture.folder.join("processes"));
        ran(&mut command).succeeded()
    };
    let checked = check();
    assert!(!checked.contains("hibernat") && !fixture.folder.join("state").exists(), "{checked}");
    fs::create_dir_all(fixture.folder.join("state/hibernate")).unwrap();
    // Which a helper would set aside.
    let entry = fixture.folder.join("state/hibernate/7-7.set");
    fs::write(&entry, "of a later version").unwrap();
    let checked = check();
    assert!(!checked.contains("hibernat") && entry.exists(), "{checked}");
    fs::set_permissions(fixture.folder.join("state/hibernate"), Permissions::from_mode(0o777)).unwrap();
    let checked = check();
    assert!(checked.contains("state/hibernate") && checked.contains("others may write"), "{checked}");
    fs::remove_dir_all(fixture.folder.join("state/hibernate")).unwrap();
    fs::write(fixture.folder.join("state/hibernate"), "").unwrap();
    assert!(check().contains("state/hibernate is no folder: remove it"));
}

#[test]
fn check_says_whether_the_helper_can_be_used_and_what_cannot_hibernate() {
    let mut fixture = fixture("");
    fixture.write();
    let checked = fixture.order(&["check"]).succeeded();
    assert!(!checked.contains("hibernat"), "{checked}");
    fixture.tables = "[hibernate]\nhelper = [\"/no/such/helper\"]\n".to_owned();
    let config = fixture.config() + "[[model]]\nname = \"dusk\"\nurl = \"http://127.0.0.1:9\"\n";
    fixture.folder.write("rotation.toml", config);
    let checked = fixture.order(&["check"]).succeeded();
    assert!(checked.contains("no engine can hibernate here: cannot start `/no/such/helper`"), "{checked}");
    assert!(checked.contains("model `dusk` cannot hibernate: it has no command"), "{checked}");
}
