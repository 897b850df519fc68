//! Functions that a reader sees at once: [`LINES_MAX`] lines at most, from `fn` to the brace that closes it. Async ones
//! act, so their names are verbs.
//!
//! Formatted code shows where a function ends: at the first brace that stands as far to the right as it does.

/// Comments and empty lines count as well.
const LINES_MAX: usize = 60;

/// Those that are longer still: crate and name. It only gets shorter.
pub(crate) const LONG: &[(&str, &str)] = &[];

/// Participles without the usual end, as far as functions were called so.
const PARTICIPLES: [&str; 13] = [
    "begun", "bound", "chosen", "drawn", "found", "given", "gone", "held", "kept", "made", "sent", "taken",
    "told",
];
/// Verbs that end as participles do.
const VERBS: [&str; 5] = ["embed", "exceed", "feed", "need", "proceed"];

/// A function that is too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LongFunction {
    pub(crate) line: usize,
    pub(crate) name: String,
    pub(crate) lines: usize,
}

/// Functions of a file that are too long, tests left out.
pub(crate) fn long(text: &str) -> Vec<LongFunction> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < lines.len() {
        if ["#[cfg(test)]", "#[test]"].contains(&lines[at].trim()) {
            let item = (at..lines.len()).find(|nth| !lines[*nth].trim().starts_with('#'));
            at = item.map_or(lines.len(), |item| end(&lines, item) + 1);
            continue;
        }
        if let Some(name) = name(lines[at]) {
            let count = end(&lines, at) - at + 1;
            if count > LINES_MAX {
                found.push(LongFunction { line: at + 1, name: name.to_owned(), lines: count });
            }
        }
        at += 1;
    }
    found
}

/// Async functions that are called by a participle alone.
pub(crate) fn participles(path: &str, text: &str) -> Vec<String> {
    let is_participle = |name: &str| {
        let has_end = name.ends_with("ed") && !name.contains('_') && !VERBS.contains(&name);
        has_end || PARTICIPLES.contains(&name)
    };
    let lines = text.lines().enumerate().filter(|(_, line)| line.contains("async "));
    let names = lines.filter_map(|(nth, line)| Some((nth + 1, name(line)?)));
    let found = names.filter(|(_, name)| is_participle(name));
    found.map(|(line, name)| format!("{path}:{line}: `{name}` acts: name it by a verb")).collect()
}

/// What a line that begins a function calls it.
fn name(line: &str) -> Option<&str> {
    let (before, after) = line.trim_start().split_once("fn ")?;
    let is_qualifier = |word: &str| {
        ["const", "async", "unsafe", "extern", "\"C\"", "pub"].contains(&word) || word.starts_with("pub(")
    };
    // `pub(in path)` is two words.
    let is_function = before.split_whitespace().all(|word| is_qualifier(word) || word.ends_with(')'));
    let len = after.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    (is_function && len > 0).then(|| &after[..len])
}

/// The last line of the item that begins on this one.
fn end(lines: &[&str], begin: usize) -> usize {
    let indent = lines[begin].len() - lines[begin].trim_start().len();
    let is_here = |line: &str| line.len() > indent && line.len() - line.trim_start().len() == indent;
    if lines[begin].ends_with([';', '}']) {
        return begin;
    }
    let ends =
        |line: &str| is_here(line) && (line.trim_end().ends_with(';') || line.trim_start().starts_with('}'));
    (begin + 1..lines.len()).find(|nth| ends(lines[*nth])).unwrap_or(lines.len() - 1)
}

#[test]
fn long_functions_are_found_and_others_are_not() {
    let body = |lines: usize| "        let x = 1;\n".repeat(lines);
    let of = |lines: usize| {
        format!(
            "impl A {{\n    pub(super) async fn f(\n        a: u8,\n    ) {{\n{}    }}\n}}\n",
            body(lines)
        )
    };
    assert_eq!(long(&of(LINES_MAX - 4)), []);
    assert_eq!(long(&of(LINES_MAX - 3)), [LongFunction { line: 2, name: "f".into(), lines: LINES_MAX + 1 }]);
    let long_body = body(2 * LINES_MAX);
    for text in [
        format!("#[cfg(test)]\nmod tests {{\n    fn f() {{\n{long_body}    }}\n}}\n"),
        format!("#[test]\n#[ignore]\nfn f() {{\n{long_body}}}\n"),
        format!("trait A {{\n    fn f(\n        a: u8,\n    );\n{long_body}}}\n"),
        format!("fn f() {{}}\nstruct A {{\n{long_body}}}\n"),
        format!("/// What fn f does.\nstruct A {{\n{long_body}}}\n"),
    ] {
        assert_eq!(long(&text), [], "{text}");
    }
}

#[test]
fn async_functions_called_by_a_participle_are_found_and_others_are_not() {
    for (line, is_found) in [
        ("    pub(super) async fn answered(&self) {", true),
        ("async fn sent() {}", true),
        ("async fn send() {}", false),
        ("async fn embed() {}", false),
        ("async fn wait_until_placed() {}", false),
        ("fn answered() {}", false),
    ] {
        assert_eq!(!participles("a.rs", line).is_empty(), is_found, "{line}");
    }
}
