//! Words that do not belong into the tree, and words that do.
//!
//! The words are put together from halves, so that this file does not find itself.

/// Unfinished work, and ways out of a process that a library must not take.
const LEFT_OVER: &[&str] = &[
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("process::", "exit"),
    concat!("process::", "abort"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];

/// Places outside of this repository that mean nothing to its readers.
const ELSEWHERE: &[&str] = &[
    concat!("/work", "/main"),
    concat!("/work", "/shared"),
    concat!("..", "/shared"),
    concat!("/.lib", "rary"),
    concat!(".lib", "rary/"),
    concat!("crates", ".io"),
    concat!("pypi", ".org"),
];

/// What a newcomer types first, as the README must spell it.
const COMMANDS: &[&str] = &["cargo run --release -- demo", "cargo xtask test"];

pub(crate) fn left_over(path: &str, text: &str) -> Vec<String> {
    found(path, text, |line| LEFT_OVER.iter().find(|word| contains_word(line, word)))
}

pub(crate) fn elsewhere(path: &str, text: &str) -> Vec<String> {
    found(path, text, |line| {
        let line = line.to_ascii_lowercase();
        ELSEWHERE.iter().find(|place| line.contains(**place))
    })
}

pub(crate) fn commands(path: &str, text: &str) -> Vec<String> {
    COMMANDS
        .iter()
        .filter(|command| !text.contains(**command))
        .map(|command| format!("{path}: must name `{command}`"))
        .collect()
}

fn found<'w>(path: &str, text: &str, find: impl Fn(&str) -> Option<&'w &'w str>) -> Vec<String> {
    text.lines()
        .enumerate()
        .filter_map(|(index, line)| find(line).map(|word| format!("{path}:{}: says `{word}`", index + 1)))
        .collect()
}

/// Whether `word` stands in `line` other than as a part of a longer word.
fn contains_word(line: &str, word: &str) -> bool {
    let is_part_of_a_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, word)| {
        let ends_open = word.ends_with(is_part_of_a_word);
        let starts_inside = line[..at].ends_with(is_part_of_a_word);
        let ends_inside = ends_open && line[at + word.len()..].starts_with(is_part_of_a_word);
        !starts_inside && !ends_inside
    })
}

#[test]
fn left_over_words_are_found() {
    for word in LEFT_OVER {
        let problems = left_over("a.rs", &format!("fn f() {{\n    std::{word}(1); // {word}\n}}\n"));
        assert_eq!(problems, [format!("a.rs:2: says `{word}`")]);
    }
}

#[test]
fn longer_words_are_not_left_over() {
    let template = format!("mktemp -d /var/{}", "X".repeat(6));
    for line in ["std::process::ExitCode", "fn exit_code()", "my_subprocess::exits", &template] {
        assert!(left_over("a.rs", line).is_empty(), "{line}");
    }
}

#[test]
fn places_elsewhere_are_found() {
    for place in ELSEWHERE {
        let problems = elsewhere("README.md", &format!("See\n`{}`.\n", place.to_ascii_uppercase()));
        assert_eq!(problems, [format!("README.md:2: says `{place}`")]);
    }
    assert!(elsewhere("cuda.rs", "self.library.get(name)").is_empty());
}

#[test]
fn a_readme_without_a_command_is_found() {
    assert!(commands("README.md", "`cargo run --release -- demo`, `cargo xtask test`").is_empty());
    assert_eq!(commands("README.md", "cargo xtask test").len(), 1);
    assert_eq!(commands("README.md", "").len(), 2);
}
