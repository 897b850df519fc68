//! Errors print a cause or return it, not both.
//!
//! `thiserror` returns a field as the cause that is called `source`, or has `#[source]` or `#[from]`. The message before
//! such a variant does not print it: whoever prints the whole chain would say it twice.

/// Messages in `text` that print what is returned as their cause.
pub(crate) fn said_twice(path: &str, text: &str) -> Vec<String> {
    let found = text.match_indices("#[error(").filter_map(|(at, opening)| {
        let rest = &text[at + opening.len()..];
        let (message, rest) = rest.split_at(end_of(rest)?);
        let variant = variant_of(rest.strip_prefix(")]")?);
        let is_marked = variant.contains("#[source]") || variant.contains("#[from]");
        let is_named = is_marked || variant.contains("source:");
        let repeats = (is_named && names(message, "source")) || (is_marked && message.contains("{0"));
        let line = 1 + text[..at].matches('\n').count();
        repeats.then(|| format!("{path}:{line}: the message prints its source, which is returned as well"))
    });
    found.collect()
}

/// Where the parenthesis closes that is open before `text`, strings left aside.
fn end_of(text: &str) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (1, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = in_string,
            '"' => in_string = !in_string,
            '(' if !in_string => depth += 1,
            ')' if !in_string => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The variant or struct that a message stands before: up to the next message, or the end of it.
fn variant_of(rest: &str) -> &str {
    let ends = ["#[error(", "\n    },", "\n}", "),\n"];
    let end = ends.into_iter().filter_map(|end| Some(rest.find(end)? + end.len())).min();
    &rest[..end.unwrap_or(rest.len())]
}

/// Whether `message` has `word` in it, as an argument or in braces, and not in prose.
fn names(message: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    message.match_indices(word).any(|(at, _)| {
        let (before, after) = (message[..at].chars().next_back(), message[at + word.len()..].chars().next());
        let is_whole = !before.is_some_and(is_part) && !after.is_some_and(is_part);
        is_whole
            && (before == Some('{')
                || after == Some('.')
                || matches!((before, after), (Some(' ' | '('), Some(')' | ',') | None)))
    })
}

#[test]
fn a_source_that_is_printed_is_found() {
    let twice = [
        "#[error(\"cannot {op}: {source}\")]\nDriver {\n    op: Op,\n    source: E,\n    },",
        "#[error(\"cannot use it: {}\", source.kind)]\nDevice {\n    source: E,\n    },",
        "#[error(\"{}{source}\", whole(text, source))]\nCap {\n    source: E,\n    },",
        "#[error(\"cannot: {0}\")]\nClaim(#[from] E),\n",
        "#[error(\"cannot: {0:?}\")]\nClaim(#[source] E),\n",
        "#[error(\n    \"cannot ({op}), {source:#}; try again\"\n)]\nIo {\n    source: E,\n    },",
    ];
    for text in twice {
        assert_eq!(said_twice("x.rs", text).len(), 1, "{text}");
    }
    assert_eq!(said_twice("x.rs", &twice.join("\n")).len(), twice.len());
}

#[test]
fn what_is_said_once_is_not_found() {
    for text in [
        "#[error(transparent)]\nClaim(#[from] E),\n",
        "#[error(\"cannot {op}\")]\nDriver {\n    source: E,\n    },",
        "#[error(\"{0}\")]\nWrong(E),\n#[error(\"x\")]\nOther(#[from] E),\n",
        "#[error(\"the source (of all) is not there, {path}\")]\nRead {\n    source: E,\n    },",
        "#[error(\"of {source}: no name\")]\nName {\n    source_name: N,\n    },",
    ] {
        assert_eq!(said_twice("x.rs", text), [""; 0], "{text}");
    }
}
