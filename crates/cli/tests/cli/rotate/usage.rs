//! `poorwill rotate` that cannot start, or has no service to control: the exit code, and what helps.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;

use super::fixture::{self, Fixture, Model};
use crate::support::Ran;

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
        (&["rotate", "--keep-engines"], "error: `poorwill rotate`: --config FILE is needed, or --demo"),
        (&["rotate", "--keep-engines"], "Usage: poorwill rotate --config <FILE> [OPTIONS] [COMMAND]"),
        (&["rotate", "status"], "error: `poorwill rotate status`: --config FILE is needed"),
        (&["rotate", "status"], "Usage: poorwill rotate status --config <FILE> [OPTIONS]\n"),
        (&["rotate", "wake", "amber"], "Usage: poorwill rotate wake --config <FILE> [OPTIONS] <MODEL>\n"),
        (&["rotate", "validate"], "--config FILE is needed"),
        (&["rotate", "--demo", "status"], "--demo"),
        (&["rotate", "--demo", "--config", "rotation.toml"], "--config"),
        (&["rotate", "wake", "--config", "rotation.toml"], "<MODEL>"),
        (&["rotate", "profile", "--config", "rotation.toml"], "<PROFILE>"),
        (&["rotate", "profile", "day", "--off", "--config", "rotation.toml"], "--off"),
        (&["rotate", "import"], "<YAML>"),
        (&["rotate", "sleep", "--config", "rotation.toml"], "<MODEL>"),
        (&["rotate", "sleep", "amber", "--all", "--config", "rotation.toml"], "--all"),
        (&["rotate", "log", "amber", "--lines", "10001", "--config", "rotation.toml"], "10001"),
        (&["rotate", "log", "amber", "--follow", "--json", "--config", "rotation.toml"], "leave one away"),
        (&["rotate", "schema", "--config", "rotation.toml"], "schema is of all configurations"),
        (&["rotate", "--demo", "--watch"], "--watch"),
        (&["rotate", "--demo", "init"], "--demo starts its own rotation"),
        (&["rotate", "dance", "--config", "rotation.toml"], "dance"),
        (&["rotate", "--demo", "--duration", "soon"], "--duration"),
        (&["rotate", "--demo", "--duration", "0s"], "it has to be more than no time"),
        (
            &["rotate", "--demo", "--duration", "0s"],
            "\n\nUsage: poorwill rotate --config <FILE> [OPTIONS] [COMMAND]\n",
        ),
        (&["rotate", "--demo", "--duration", "60"], "write it like 60s or 2m"),
        (&["rotate", "validate", "--requests", "-1", "--config", "rotation.toml"], "-1"),
    ] {
        let ran = fixture.run(args);
        assert!(ran.code == 2 && ran.stdout.is_empty() && ran.stderr.contains(word), "{args:?}: {ran:?}");
    }
}

#[test]
fn help_shows_that_the_configuration_is_required() {
    let fixture = fixture();
    for (args, usage) in [
        (&["rotate", "--help"][..], "Usage: poorwill rotate --config <FILE> [OPTIONS] [COMMAND]\n"),
        (&["rotate", "--help"], "       poorwill rotate --demo [OPTIONS]\n"),
        (&["rotate", "status", "--help"], "Usage: poorwill rotate status --config <FILE> [OPTIONS]\n"),
        (&["rotate", "help", "pin"], "Usage: poorwill rotate pin --config <FILE> [OPTIONS] <MODEL>\n"),
        (&["rotate", "schema", "--help"], "Usage: poorwill rotate schema [OPTIONS]\n"),
        (&["rotate", "init", "--help"], "Usage: poorwill rotate init [--config <FILE>] [OPTIONS]\n"),
        (
            &["rotate", "import", "--help"],
            "Usage: poorwill rotate import [--config <FILE>] [OPTIONS] <YAML>\n",
        ),
    ] {
        let help = fixture.run(args).succeeded();
        assert!(help.contains(usage), "{help}");
    }
}

#[test]
fn the_schema_needs_no_configuration() {
    let schema = fixture().run(&["rotate", "schema"]).succeeded();
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let level = &schema["properties"]["model"]["items"]["properties"]["level"];
    assert!(level["description"].as_str().unwrap().contains("sleep level"), "{level}");
}

#[test]
fn log_filters_that_are_none_are_refused() {
    let fixture = fixture();
    let run = |value: &OsStr| {
        let mut command = fixture.command(&["rotate", "--config", "nowhere.toml"]);
        Ran::from(command.env("POORWILL_LOG", value).output().unwrap())
    };
    for (value, words) in [
        ("loud", "`loud` is no level"),
        ("info,debgu", "`debgu` is no level"),
        ("poorwill_rotate=loud", "`poorwill_rotate=loud`, which is no log filter"),
    ] {
        run(OsStr::new(value)).failed(&["POORWILL_LOG is `", words, "off, error, warn, info, debug, trace"]);
    }
    run(OsStr::from_bytes(b"\xff")).failed(&["POORWILL_LOG is `", "not Unicode"]);
    for value in [
        "",
        " ",
        "debug",
        "WARN",
        "3",
        "poorwill_rotate=debug,info",
        "hyper=off, info",
        "info,[a{b=1}]=trace",
    ] {
        let ran = run(OsStr::new(value));
        assert!(!ran.stderr.contains("POORWILL_LOG"), "{value}: {ran:?}");
        ran.failed(&["nowhere.toml"]);
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
        fixture.folder.write("odd.toml", format!("{}level = \n", fixture.config()));
        run("odd.toml").failed(&["odd.toml", &line]);
        fixture.folder.write("odd.toml", "");
        run("odd.toml").failed(&["odd.toml: line 1, column 1: the file is empty"]);
        let utf16: Vec<u8> = fixture.config().encode_utf16().flat_map(u16::to_le_bytes).collect();
        fixture.folder.write("odd.toml", utf16);
        run("odd.toml").failed(&["odd.toml: line 1, column 1: the file is UTF-16", "save it as UTF-8"]);
        // Operators' commands use the listener for them, and look at nothing else.
        fixture.folder.write("odd.toml", format!("{}alias = [\"x\"]\n", fixture.config()));
        match more {
            ["status" | "reload"] => run("odd.toml").failed(&["no service answers"]),
            _ => run("odd.toml").failed(&[
                "odd.toml",
                &line,
                "`alias`",
                "did you mean `aliases`?",
                "\n   | ^^^^^",
            ]),
        };
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
