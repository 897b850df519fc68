//! `poorwill rotate` that cannot start, or has no service to control: the exit code, and what helps.

use std::net::TcpListener;

use super::fixture::{self, Fixture, Model};

fn fixture() -> Fixture {
    let fixture = Fixture::new("512MiB", vec![Model::new("amber")]);
    fixture.write();
    fixture
}

#[test]
fn wrong_usage_says_what_is_missing() {
    let fixture = fixture();
    for (args, word) in [
        (&["rotate"][..], "--config <FILE>"),
        (&["rotate", "--keep-engines"], "--config FILE is needed, or --demo"),
        (&["rotate", "status"], "--config FILE is needed"),
        (&["rotate", "validate"], "--config FILE is needed"),
        (&["rotate", "--demo", "status"], "--demo"),
        (&["rotate", "--demo", "--config", "rotation.toml"], "--config"),
        (&["rotate", "wake", "--config", "rotation.toml"], "<MODEL>"),
        (&["rotate", "dance", "--config", "rotation.toml"], "dance"),
        (&["rotate", "--demo", "--duration", "soon"], "--duration"),
        (&["rotate", "validate", "--requests", "-1", "--config", "rotation.toml"], "-1"),
    ] {
        let ran = fixture.run(args);
        assert!(ran.code == 2 && ran.stdout.is_empty() && ran.stderr.contains(word), "{args:?}: {ran:?}");
    }
}

#[test]
fn a_configuration_that_is_none_is_named_with_its_line() {
    let fixture = fixture();
    let lines = fixture.config().lines().count();
    let line = format!("line {}", lines + 1);
    for more in [&[][..], &["status"], &["validate"], &["reload"]] {
        let run = |file: &str| fixture.run(&[&["rotate"], more, &["--config", file]].concat());
        run("nowhere.toml").failed(&["nowhere.toml", "No such file"]);
        fixture.folder.write("odd.toml", format!("{}alias = [\"x\"]\n", fixture.config()));
        run("odd.toml").failed(&["odd.toml", &line, "`alias`", "did you mean `aliases`?"]);
        fixture.folder.write("odd.toml", format!("{}level = \n", fixture.config()));
        run("odd.toml").failed(&["odd.toml", &line]);
        fixture.folder.write("odd.toml", "");
        run("odd.toml").failed(&["odd.toml", "no model", "[[model]]"]);
    }
    fixture.assert_empty();
}

#[test]
fn a_port_that_is_taken_is_named() {
    let fixture = fixture();
    for (door, port) in [("front", fixture.front), ("control", fixture.control)] {
        let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let ran = fixture.run(&["rotate", "--config", "rotation.toml"]);
        ran.failed(&[door, &format!("127.0.0.1:{port}"), "give it another address"]);
    }
    fixture.assert_empty();
}

#[test]
fn a_state_folder_is_one_rotations() {
    let mut fixture = fixture();
    let rotator = fixture.start(&[]);
    let first = fixture.config();
    let state = fixture.folder.join("state");
    (fixture.front, fixture.control) = (fixture::free_port(), fixture::free_port());
    fixture.folder.write("second.toml", fixture.config());
    let second = || fixture.run(&["rotate", "--config", "second.toml"]);
    second().failed(&[
        "state folder",
        &state.display().to_string(),
        "another rotation",
        "a folder of its own",
    ]);
    // The first one goes on, and leaves the folder to the next when it ends.
    fixture.folder.write("rotation.toml", first);
    fixture.order(&["status"]).succeeded();
    rotator.end();
    std::fs::remove_dir_all(&state).unwrap();
    fixture.folder.write("state", "no folder");
    second().failed(&["state folder"]);
    fixture.assert_empty();
}

#[test]
fn a_missing_service_is_reported() {
    let fixture = fixture();
    let control = format!("127.0.0.1:{}", fixture.control);
    for args in [&["status"][..], &["wake", "amber"], &["reload"], &["validate"]] {
        let words = ["no service answers", &control, "is `poorwill rotate --config …` running?"];
        let ran = fixture.order(args);
        ran.failed(&words);
        assert_eq!(ran.stdout, "");
    }
    let ran = fixture.order(&["status", "--json"]);
    assert!(ran.json()["error"].as_str().unwrap().contains(&control), "{ran:?}");
    ran.failed(&[&control]);
}
