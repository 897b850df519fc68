//! The commands of the README and the book: each is one that the program knows.

use std::process::Command;

use poorwill_testkit::book::command_lines;

/// What stands before the arguments of the command, in a page.
const STARTS: &[&str] = &["poorwill ", "cargo poorwill ", "target/release/poorwill "];

#[test]
fn commands_of_the_pages_are_understood() {
    let lines = command_lines(STARTS);
    for (place, words) in &lines {
        // With `--help` last, everything before it is read and nothing is done.
        let output = Command::new(env!("CARGO_BIN_EXE_poorwill")).args(words).arg("--help").output().unwrap();
        assert!(output.status.success(), "{place}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(lines.len() > 10, "only {} commands were found", lines.len());
}
