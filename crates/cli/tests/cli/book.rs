//! The commands of the README and the book: each is one that the program knows.

use std::process::Command;

use poorwill_testkit::book::{Snippet, snippets};

/// What stands before the arguments of the command, in a page.
const STARTS: [&str; 3] = ["poorwill ", "cargo run --release -- ", "target/release/poorwill "];

#[test]
fn commands_of_the_pages_are_understood() {
    let mut count = 0;
    for (snippet, line) in snippets("sh").iter().flat_map(commands) {
        let Some(arguments) = STARTS.iter().find_map(|start| line.strip_prefix(start)) else { continue };
        let words: Vec<&str> = arguments.split_whitespace().take_while(|word| !is_shells(word)).collect();
        // With `--help` last, everything before it is read and nothing is done.
        let output =
            Command::new(env!("CARGO_BIN_EXE_poorwill")).args(&words).arg("--help").output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}:{}: {line}\n{message}", snippet.page, snippet.line);
        count += 1;
    }
    assert!(count > 10, "only {count} commands were found");
}

/// The commands of a snippet, a line each; continued lines are joined, variables before and comments after are left out.
fn commands(snippet: &Snippet) -> Vec<(&Snippet, String)> {
    let text = snippet.code.replace("\\\n", " ");
    let lines = text.lines().map(|line| {
        let line = line.split(" #").next().unwrap_or_default().trim();
        let is_variable = |word: &&str| {
            word.split_once('=')
                .is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
        };
        let words: Vec<&str> = line.split_whitespace().skip_while(is_variable).collect();
        words.join(" ")
    });
    lines.map(|line| (snippet, line)).collect()
}

/// Whether the shell takes this word, and what follows it, for itself.
fn is_shells(word: &str) -> bool {
    ["|", ">", "&&", "&", ";", "2>", ">>"].contains(&word)
}
