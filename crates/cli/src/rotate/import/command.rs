//! The words of a command, as a shell would take them.

use super::macros::Scope;
use super::yaml::{Mistake, Node};

pub(super) fn without_comments(command: &str) -> String {
    let lines = command.lines().map(|line| line.trim_end_matches('\r'));
    let lines = lines.filter(|line| !line.trim_start().starts_with('#'));
    // A backslash at the end of a line, even before blanks, joins it with the next.
    lines.map(|line| line.trim_end().trim_end_matches('\\').to_owned()).collect::<Vec<_>>().join("\n")
}

pub(super) fn words(scope: &Scope<'_>, node: &Node, here: &str) -> Result<Vec<String>, Mistake> {
    let text = scope.text(&without_comments(node.text().unwrap_or_default()), node.place)?;
    // Of a macro with several lines.
    match shlex::split(&without_comments(&text)) {
        Some(words) if !words.is_empty() => Ok(words),
        Some(_) => Mistake::at(node.place, format!("{here} has a command without a word")),
        None => Mistake::at(node.place, format!("{here}: a quotation in its command has no end")),
    }
}
