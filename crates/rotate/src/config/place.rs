//! Where in the file a mistake is, and an excerpt that shows it without secrets.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Longer lines are not shown.
const LINE_MAX: usize = 160;

/// A line with one of these may contain a secret.
const SECRETS: [&str; 8] =
    ["key", "environment", "headers", "endpoint", "_token", "-token", "secret", "password"];

/// A place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// The line, with a caret under the mistake. Lines that may contain secrets are not shown.
    pub excerpt: Option<String>,
}

impl Place {
    pub(super) fn new(text: &str, span: &Range<usize>) -> Self {
        let mut at = span.start.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let (line, column) = (text[..at].matches('\n').count() + 1, text[start..at].chars().count() + 1);
        let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
        let shown = text[start..end].trim_end();
        let marked = text.get(at..span.end.min(end)).unwrap_or_default().trim_end().chars().count().max(1);
        let is_shown = shown.chars().count() <= LINE_MAX && !is_secret(text, line);
        let excerpt = is_shown.then(|| {
            let shown: String = shown.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            let number = line.to_string();
            let (margin, carets) = (" ".repeat(number.len()), "^".repeat(marked));
            format!("{margin} |\n{number} | {shown}\n{margin} | {}{carets}", " ".repeat(column - 1))
        });
        Self { line, column, excerpt }
    }

    /// Where the first key is that `reason` names, in this section; or the section itself.
    pub(super) fn of_reason(text: &str, section: &str, reason: &str) -> Option<Self> {
        let file = DeTable::parse(text).ok()?;
        let file = file.get_ref();
        let model = section.strip_prefix("model `").and_then(|rest| rest.strip_suffix('`'));
        let (table, header) = match model {
            // Of two models with one name the second is the mistake.
            Some(name) => file.get("model")?.get_ref().as_array()?.iter().rev().find_map(|one| {
                let table = one.get_ref().as_table()?;
                (table.get("name")?.get_ref().as_str() == Some(name)).then(|| (table, one.span()))
            })?,
            None => {
                let (key, value) = file.get_key_value(section)?;
                match value.get_ref().as_table() {
                    Some(table) => (table, value.span()),
                    None => return Some(Self::new(text, &whole(key.span(), value))),
                }
            }
        };
        // The rules of a model may be those of every model.
        let rules = file.get("every_model").filter(|_| model.is_some());
        let rules = rules.and_then(|rules| rules.get_ref().as_table());
        let span = words(reason)
            .find_map(|word| find(table, word).or_else(|| rules.and_then(|rules| find(rules, word))));
        Some(Self::new(text, &span.unwrap_or(header)))
    }
}

/// The words of a message that may be keys. Quoted text is the file's own.
fn words(reason: &str) -> impl Iterator<Item = &str> {
    let plain = reason.split(['`', '"']).step_by(2);
    let words = plain.flat_map(|part| part.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')));
    words.map(|word| if word == "key" { "keys" } else { word }).filter(|word| !word.is_empty())
}

/// A key of a table, or of a table in it.
fn find(table: &DeTable<'_>, word: &str) -> Option<Range<usize>> {
    if let Some((key, value)) = table.get_key_value(word) {
        return Some(whole(key.span(), value));
    }
    let inner = table.iter().filter(|(key, _)| key.get_ref() != "environment");
    inner.filter_map(|(_, value)| value.get_ref().as_table()).find_map(|inner| find(inner, word))
}

/// From the key to the end of its value, if that has a value behind it.
fn whole(key: Range<usize>, value: &Spanned<DeValue<'_>>) -> Range<usize> {
    key.start..value.span().end.max(key.end)
}

/// Whether the line, its key, or the header of its table may be of a secret.
fn is_secret(text: &str, line: usize) -> bool {
    let before: Vec<&str> = text.lines().take(line).collect();
    let is_header = |line: &&&str| line.trim_start().starts_with('[');
    let is_key = |line: &&str| {
        let name = line.split_once('=').map_or("", |(name, _)| name.trim());
        !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c))
    };
    let key = before.iter().rposition(is_key).unwrap_or(0);
    let header = before.iter().rev().find(is_header);
    let mut all = before[key.min(line.saturating_sub(1))..].iter().chain(header);
    all.any(|line| {
        let line = line.to_lowercase();
        SECRETS.iter().any(|secret| line.contains(secret))
    })
}
