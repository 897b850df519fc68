//! Finds tests that wait, sleep or have a deadline: a slow machine could make them fail, and must not.
//!
//! A test is listed if its text names a clock, a time or a time limit, or calls such a function in the same folder.
//! Calls are matched by name alone, so the list is rather too long.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Text that has to do with time.
const TIMES: [&str; 15] = [
    "thread::sleep",
    "time::sleep",
    "time.sleep",
    "Duration::",
    "Instant::",
    ".elapsed(",
    "timeout",
    "deadline",
    "patience",
    "eventually(",
    "watchdog",
    "within(",
    "monotonic(",
    "perf_counter(",
    "threading.",
];

/// A function, and whether it is a test.
#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    text: String,
    is_test: bool,
}

/// The names of the tests below `folder` that have to do with time, in files with this ending.
pub(super) fn tests_below(folder: &Path, ending: &str) -> io::Result<HashSet<String>> {
    let mut functions = Vec::new();
    for path in files_below(folder, ending)? {
        functions.extend(functions_of(&fs::read_to_string(path)?));
    }
    Ok(timed(&functions))
}

fn files_below(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                files.extend(files_below(&path, ending)?);
            }
        } else if path.extension().is_some_and(|has| has == ending) {
            files.push(path);
        }
    }
    Ok(files)
}

/// The tests that name a time themselves, or call a function that does.
fn timed(functions: &[Function]) -> HashSet<String> {
    let mut callers: HashMap<&str, Vec<&Function>> = HashMap::new();
    for function in functions {
        for word in words(&function.text).collect::<HashSet<_>>() {
            callers.entry(word).or_default().push(function);
        }
    }
    let mut ahead: Vec<&Function> =
        functions.iter().filter(|function| TIMES.iter().any(|time| function.text.contains(time))).collect();
    let mut found: HashSet<&str> = ahead.iter().map(|function| &*function.name).collect();
    while let Some(function) = ahead.pop() {
        for caller in callers.get(&*function.name).into_iter().flatten() {
            // No function calls a test; a match is another function.
            if !function.is_test && found.insert(&caller.name) {
                ahead.push(caller);
            }
        }
    }
    functions
        .iter()
        .filter(|function| function.is_test && found.contains(&*function.name))
        .map(|function| function.name.clone())
        .collect()
}

/// The functions of formatted text. Each ends before the next line that is not indented further than it is, except
/// its closing brace.
fn functions_of(text: &str) -> Vec<Function> {
    let lines: Vec<&str> = text.lines().collect();
    let mut functions = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some(name) = name_of(line) else { continue };
        let indent = indent_of(line);
        let body = lines[number + 1..].iter().take_while(|line| {
            line.trim().is_empty() || indent_of(line) > indent || line.trim_start().starts_with([')', '{'])
        });
        let text: Vec<&str> = [line].into_iter().chain(body).copied().collect();
        let before = lines[..number].iter().rev().take_while(|line| indent_of(line) == indent);
        let attributes = before.take_while(|line| line.trim_start().starts_with(['#', '/', '@']));
        let is_marked = attributes.into_iter().any(|line| line.contains("test]") || line.contains("test("));
        functions.push(Function {
            name: name.to_owned(),
            text: text.join("\n"),
            is_test: is_marked || name.starts_with("test_"),
        });
    }
    functions
}

/// The name of the function that starts in a line.
fn name_of(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let rest = ["pub ", "pub(crate) ", "pub(super) ", "async ", "const ", "unsafe "]
        .iter()
        .fold(line, |line, word| line.strip_prefix(word).unwrap_or(line));
    let rest = rest.strip_prefix("fn ").or_else(|| rest.strip_prefix("def "))?;
    words(rest).next()
}

fn indent_of(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_of_waiting_functions_are_found() {
        let source = "\
#[test]
fn waits() {
    thread::sleep(LONG);
}

#[test]
fn does_not() {
    assert!(true);
}

/// Words.
#[tokio::test(start_paused = true)]
async fn calls(
    a: u32,
) {
    helper();
}

pub(crate) async fn helper() {
    other()
}

fn other() -> Duration {
    Duration::ZERO
}

mod tests {
    #[test]
    fn inside() {
        other();
    }

    fn is_no_test() {
        other();
    }
}
";
        let found = timed(&functions_of(source));
        assert_eq!(found, ["waits", "calls", "inside"].map(str::to_owned).into());
    }

    #[test]
    fn tests_of_python_are_found() {
        let source = "\
@pytest.mark.slow
def test_waits(a: int) -> None:
    time.sleep(1)


def test_does_not() -> None:

    assert True


def helper(
    a: int,
) -> None:
    queue.get(timeout=1)


class TestAll:
    async def test_calls(self) -> None:
        helper(1)
";
        let found = timed(&functions_of(source));
        assert_eq!(found, ["test_waits", "test_calls"].map(str::to_owned).into());
    }
}
