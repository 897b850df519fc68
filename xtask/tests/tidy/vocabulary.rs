//! Words that may not come back: private ones for which the field has a term, and pronouns for threads and calls.
//!
//! docs/design.md has the terms. An exception names a file or folder, the word, and why it is right there.

use std::collections::BTreeSet;

use super::lexer::{self, Token};
use super::prose;

/// In no sentence, and in no string of a crate's sources.
const IN_PROSE: &[&str] = &[
    "anybody", "doubt", "doubted", "lane", "lanes", "limbo", "loose", "nobody", "owed", "owes", "patience",
    "quiet", "quietly", "somebody", "summoned", "told", "weighing", "whoever", "whomever",
];

/// In no name, whole or as a part.
const IN_NAMES: &[&str] = &[
    "bare",
    "bell",
    "books",
    "desk",
    "doors",
    "doubt",
    "enliven",
    "flying",
    "gate",
    "gates",
    "guest",
    "guests",
    "lane",
    "lanes",
    "limbo",
    "loose",
    "nap",
    "naps",
    "nobody",
    "owed",
    "patience",
    "patient",
    "quiet",
    "room",
    "rooms",
    "somebody",
    "spell",
    "spells",
    "spot",
    "spots",
    "stretch",
    "stretches",
    "summoned",
    "told",
    "ways",
    "weighing",
    "whoever",
];

/// Where, which word, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("crates/driver/tests/plain/ptx.rs", "lane", "the threads of a warp, as PTX calls them"),
    ("crates/local/src/doctor/show.rs", "lanes", "of a PCIe link"),
    ("crates/poorwill/src/doctor/gpu.rs", "lanes", "of a PCIe link"),
    ("crates/mock-engine/src/text.rs", "nobody", "a word of the mock's answers"),
    ("crates/mock-engine/src/text.rs", "quiet", "a word of the mock's answers"),
    ("crates/python/src/block/", "lanes", "a field of DLPack's type"),
    ("crates/python/tests/fake_torch/lent.py", "lanes", "a field of DLPack's type"),
];

/// Where a sentence or a name has such a word.
pub(crate) fn private_words(path: &str, text: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for (line, sentence) in prose::sentences(path, text) {
        found.extend(private_in(&sentence).map(|word| (line, word)));
    }
    if path.ends_with(".rs") || path.ends_with(".py") {
        for (line, name) in names(path, text) {
            for word in parts(&name) {
                if IN_NAMES.contains(&word.as_str()) {
                    found.insert((line, word));
                }
            }
        }
    }
    problems(path, found)
}

/// Where a string has a word that no sentence may have. Python's docstrings are prose, and looked at as such.
pub(crate) fn private_words_of_strings(path: &str, text: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    if path.ends_with(".py") {
        let words =
            |(line, text): (usize, String)| private_in(&text).map(|word| (line, word)).collect::<Vec<_>>();
        found.extend(lexer::strings_of_python(text).into_iter().flat_map(words));
        return problems(path, found);
    }
    for (first, token) in lexer::tokens(text) {
        let Token::Text(text) = token else { continue };
        for (line, text) in text.lines().enumerate() {
            found.extend(private_in(text).map(|word| (first + line, word)));
        }
    }
    problems(path, found)
}

fn private_in(text: &str) -> impl Iterator<Item = String> + '_ {
    let words = text.split(|c: char| !c.is_ascii_alphabetic()).map(str::to_ascii_lowercase);
    words.filter(|word| IN_PROSE.contains(&word.as_str()))
}

fn problems(path: &str, found: BTreeSet<(usize, String)>) -> Vec<String> {
    let is_allowed = |word: &str| EXCEPTIONS.iter().any(|(at, of, _)| path.starts_with(at) && *of == word);
    let problems = found.into_iter().filter(|(_, word)| !is_allowed(word));
    problems
        .map(|(line, word)| {
            format!("{path}:{line}: `{word}` is a private word; docs/design.md has the field's")
        })
        .collect()
}

/// The names in the code of a file: neither comments nor strings that begin and end on a line.
fn names(path: &str, text: &str) -> Vec<(usize, String)> {
    let comment = if path.ends_with(".py") { "#" } else { "//" };
    let mut names = Vec::new();
    let mut is_docstring = false;
    for (index, line) in text.lines().enumerate() {
        let quotes = line.matches("\"\"\"").count();
        let was_docstring = is_docstring;
        is_docstring ^= path.ends_with(".py") && quotes % 2 == 1;
        if was_docstring || path.ends_with(".py") && quotes > 0 {
            continue;
        }
        let code = without_strings(line);
        let code = code.split(comment).next().unwrap_or_default();
        let words =
            code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty());
        names.extend(words.map(|word| (index + 1, word.to_owned())));
    }
    names
}

fn without_strings(line: &str) -> String {
    let (mut code, mut is_inside, mut is_escaped) = (String::new(), false, false);
    for c in line.chars() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => is_inside = !is_inside,
            c if !is_inside => code.push(c),
            _ => {}
        }
    }
    code
}

/// The words of a name, in lower case: `HostRoom`, `host_room` and `HOST_ROOM` have the same two. A capital before a
/// small letter begins one, so `KVRoom` has two as well.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let (mut was_lower, mut was_upper) = (false, false);
    let mut chars = name.chars().peekable();
    while let Some(c) = chars.next() {
        let is_letter = c.is_ascii_alphabetic();
        let ends_acronym = was_upper && chars.peek().is_some_and(char::is_ascii_lowercase);
        if !is_letter || c.is_ascii_uppercase() && (was_lower || ends_acronym) {
            parts.push(String::new());
        }
        if is_letter {
            parts.last_mut().expect("there is always one").push(c.to_ascii_lowercase());
        }
        (was_lower, was_upper) = (c.is_ascii_lowercase(), c.is_ascii_uppercase());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_words_are_found_in_prose_and_names() {
        for (path, text, word) in [
            ("a.rs", format!("/// Has {} waited.\n", IN_PROSE[7]), IN_PROSE[7]),
            ("a.md", format!("A {}'s way.\n", IN_PROSE[2]), IN_PROSE[2]),
            ("a.py", format!("\"\"\"The {}.\"\"\"\n", IN_PROSE[11]), IN_PROSE[11]),
            ("a.rs", format!("struct Host{};\n", "Room"), "room"),
            ("a.rs", format!("let {}_bytes = 1;\n", "owed"), "owed"),
            ("a.py", format!("MAX_{} = 1\n", "LANES"), "lanes"),
        ] {
            let problems = private_words(path, &text);
            assert!(
                matches!(&problems[..], [problem] if problem.contains(&format!(":1: `{word}`"))),
                "{text}: {problems:?}"
            );
        }
    }

    #[test]
    fn private_words_are_found_in_strings_of_python() {
        let word = IN_PROSE[8];
        let problems = private_words_of_strings("a.py", &format!("# '{word}'\nx = ['a', f'a {word}']\n"));
        assert!(
            matches!(&problems[..], [problem] if problem.contains(&format!(":2: `{word}`"))),
            "{problems:?}"
        );
    }

    #[test]
    fn private_words_are_found_in_strings() {
        let word = IN_PROSE[8];
        let text = format!("/// {word}\nlet a = format!(\"a\n {{b}} {word}\"); // \"{word}\"\n");
        let problems = private_words_of_strings("a.rs", &text);
        assert!(
            matches!(&problems[..], [problem] if problem.contains(&format!(":3: `{word}`"))),
            "{problems:?}"
        );
    }

    #[test]
    fn words_of_others_and_longer_words_are_not() {
        for (path, text) in [
            ("a.rs", "let name = \"gate_proj\"; // room\n"),
            ("a.rs", "fn headroom(bytes: u64, delegate: bool) {}\n"),
            ("a.rs", "/// `Room` was its name.\n"),
            ("a.md", "```sh\nnobody\n```\n"),
            ("a.md", "There is room.\n"),
        ] {
            assert_eq!(private_words(path, text), [""; 0], "{text}");
        }
    }

    #[test]
    fn names_are_cut_into_words() {
        assert_eq!(parts("HostRoom"), ["host", "room"]);
        assert_eq!(parts("HOST_ROOM2"), ["host", "room", ""]);
        assert_eq!(parts("is_roomy"), ["is", "roomy"]);
        assert_eq!(parts("KVGate"), ["kv", "gate"]);
        assert_eq!(parts("HTTPRoom_KV"), ["http", "room", "kv"]);
    }

    #[test]
    fn exceptions_have_reasons() {
        assert!(EXCEPTIONS.iter().all(|(_, _, why)| why.split_whitespace().count() > 2));
    }
}
