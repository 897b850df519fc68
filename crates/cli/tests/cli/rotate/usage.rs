//! `poorwill rotate` where it cannot begin, or nobody can be asked: the exit code, and what would help.

use std::net::TcpListener;

use super::world::{self, Model, World};

fn world() -> World {
    let world = World::new("512MiB", vec![Model::new("amber")]);
    world.write();
    world
}

#[test]
fn wrong_usage_says_what_is_missing() {
    let world = world();
    for (args, word) in [
        (&["rotate"][..], "--config <FILE>"),
        (&["rotate", "--keep-engines"], "--config FILE is needed, or --demo"),
        (&["rotate", "status"], "--config FILE is needed"),
        (&["rotate", "validate"], "--config FILE is needed"),
        (&["rotate", "--demo", "status"], "--demo"),
        (&["rotate", "--demo", "--config", "rotation.toml"], "--config"),
        (&["rotate", "wake", "--config", "rotation.toml"], "<MODEL>"),
        (&["rotate", "dance", "--config", "rotation.toml"], "dance"),
        (&["rotate", "--demo", "--lasts", "soon"], "--lasts"),
        (&["rotate", "validate", "--requests", "-1", "--config", "rotation.toml"], "-1"),
    ] {
        let ran = world.run(args);
        assert!(ran.code == 2 && ran.stdout.is_empty() && ran.stderr.contains(word), "{args:?}: {ran:?}");
    }
}

#[test]
fn a_configuration_that_is_none_is_named_with_its_line() {
    let world = world();
    let lines = world.config().lines().count();
    let line = format!("line {}", lines + 1);
    for more in [&[][..], &["status"], &["validate"], &["reload"]] {
        let run = |file: &str| world.run(&[&["rotate"], more, &["--config", file]].concat());
        run("nowhere.toml").failed(&["nowhere.toml", "No such file"]);
        world.folder.write("odd.toml", format!("{}alias = [\"x\"]\n", world.config()));
        run("odd.toml").failed(&["odd.toml", &line, "`alias`", "did you mean `aliases`?"]);
        world.folder.write("odd.toml", format!("{}level = \n", world.config()));
        run("odd.toml").failed(&["odd.toml", &line]);
        world.folder.write("odd.toml", "");
        run("odd.toml").failed(&["odd.toml", "no model", "[[model]]"]);
    }
    world.assert_empty();
}

#[test]
fn a_port_that_is_taken_is_named() {
    let world = world();
    for (door, port) in [("front", world.front), ("control", world.control)] {
        let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let ran = world.run(&["rotate", "--config", "rotation.toml"]);
        ran.failed(&[door, &format!("127.0.0.1:{port}"), "give it another address"]);
    }
    world.assert_empty();
}

#[test]
fn a_state_folder_is_one_rotations() {
    let mut world = world();
    let rotator = world.start(&[]);
    let first = world.config();
    let state = world.folder.join("state");
    (world.front, world.control) = (world::free_port(), world::free_port());
    world.folder.write("second.toml", world.config());
    let second = || world.run(&["rotate", "--config", "second.toml"]);
    second().failed(&[
        "state folder",
        &state.display().to_string(),
        "another rotation",
        "a folder of its own",
    ]);
    // The first one goes on, and whoever ends leaves the folder to the next.
    world.folder.write("rotation.toml", first);
    world.order(&["status"]).succeeded();
    rotator.end();
    std::fs::remove_dir_all(&state).unwrap();
    world.folder.write("state", "no folder");
    second().failed(&["state folder"]);
    world.assert_empty();
}

#[test]
fn nobody_who_runs_is_said_so() {
    let world = world();
    let control = format!("127.0.0.1:{}", world.control);
    for args in [&["status"][..], &["wake", "amber"], &["reload"], &["validate"]] {
        let words = ["nobody answers", &control, "is `poorwill rotate --config …` running?"];
        let ran = world.order(args);
        ran.failed(&words);
        assert_eq!(ran.stdout, "");
    }
    let ran = world.order(&["status", "--json"]);
    assert!(ran.json()["error"].as_str().unwrap().contains(&control), "{ran:?}");
    ran.failed(&[&control]);
}
