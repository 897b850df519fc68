//! What `cargo xtask` says and which exit codes it gives.

use std::process::{Command, Output};

#[test]
fn help_lists_the_commands() {
    let output = xtask(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("test [-- ARGS]") && said.contains("lint"), "{said}");
}

#[test]
fn wrong_usage_exits_with_2_and_the_commands() {
    for args in [&["dance"][..], &[], &["test", "pool"], &["lint", "core"], &["dist", "aarch64"]] {
        let output = xtask(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("Commands:") && said.contains("test [-- ARGS]"), "{args:?}: {said}");
    }
}

#[test]
fn a_failed_step_exits_with_1_and_its_command() {
    let output = xtask(&["test", "--", "--no-such-option"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    let last = said.lines().last().unwrap();
    assert!(
        last.starts_with("xtask: `cargo test --workspace --exclude ")
            && last.contains(" --locked --no-such-option` failed (exit status: "),
        "{said}"
    );
}

fn xtask(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).args(args).output().expect("xtask starts")
}
