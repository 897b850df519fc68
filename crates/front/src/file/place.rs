//! Where in the file a mistake is, and an excerpt that shows it without secrets.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::masked::{Hidden, masked};

/// Longer lines are not shown.
const LINE_MAX: usize = 160;

/// A place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// The line, with a caret under the mistake. Values that may be secrets are stars.
    pub excerpt: Option<String>,
}

impl FilePlace {
    pub(super) fn new(text: &str, span: &Range<usize>) -> Self {
        let mut at = span.start.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let Self { line, column, .. } = Self::without_excerpt(text, at);
        let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
        let shown = masked(text, start, end, &hidden(text, span));
        let shown = shown.trim_end();
        let marked = text.get(at..span.end.min(end)).unwrap_or_default().trim_end().chars().count().max(1);
        let excerpt = (shown.chars().count() <= LINE_MAX).then(|| {
            let shown: String = shown.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            let number = line.to_string();
            let (margin, carets) = (" ".repeat(number.len()), "^".repeat(marked));
            format!("{margin} |\n{number} | {shown}\n{margin} | {}{carets}", " ".repeat(column - 1))
        });
        Self { line, column, excerpt }
    }

    /// Of byte `at`, which begins a character.
    pub(super) fn without_excerpt(text: &str, at: usize) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let (line, column) = (before.matches('\n').count() + 1, before[start..].chars().count() + 1);
        Self { line, column, excerpt: None }
    }

    /// Where the first key is that `reason` names: in this section, the section itself, or anywhere. A section that is
    /// not there would come at the end.
    pub(super) fn of_reason(text: &str, file: &DeTable<'_>, section: &str, reason: &str) -> Self {
        Self::in_section(text, file, section, reason).unwrap_or_else(|| {
            let anywhere = words(reason).find_map(|word| find(file, word));
            anywhere.map_or_else(|| Self::without_excerpt(text, text.len()), |span| Self::new(text, &span))
        })
    }

    fn in_section(text: &str, file: &DeTable<'_>, section: &str, reason: &str) -> Option<Self> {
        let named = section.strip_suffix('`').and_then(|rest| rest.split_once(" `"));
        let (table, header) = match named {
            // Of two models with one name the second is the mistake.
            Some((kind, name)) => match file.get(kind)?.get_ref() {
                DeValue::Array(all) => all.iter().rev().find_map(|one| {
                    let table = one.get_ref().as_table()?;
                    (table.get("name")?.get_ref().as_str() == Some(name)).then(|| (table, one.span()))
                })?,
                all => {
                    let one = all.as_table()?.get(name)?;
                    (one.get_ref().as_table()?, one.span())
                }
            },
            None => {
                let (key, value) = file.get_key_value(section)?;
                match value.get_ref().as_table() {
                    Some(table) => (table, value.span()),
                    None => return Some(Self::new(text, &whole(key.span(), value))),
                }
            }
        };
        // The rules of a model may be those of every model.
        let rules = file.get("every_model").filter(|_| named.is_some_and(|(kind, _)| kind == "model"));
        let rules = rules.and_then(|rules| rules.get_ref().as_table());
        let span = words(reason)
            .find_map(|word| find(table, word).or_else(|| rules.and_then(|rules| find(rules, word))));
        Some(Self::new(text, &span.unwrap_or(header)))
    }
}

/// Keys whose values may be secrets: those of clients, and what is written for engines.
const SECRET: [&str; 10] = [
    "keys",
    "node_key",
    "etcd_password",
    "password",
    "headers",
    "environment",
    "macros",
    "command",
    "stop_command",
    "helper",
];

/// What an excerpt does not show: values that may be secrets, and that of the key at `span`. A misspelt key may be one of
/// theirs. Of what cannot be parsed, nothing is known.
fn hidden(text: &str, span: &Range<usize>) -> Hidden {
    let Ok(file) = DeTable::parse(text) else { return Hidden::Everything };
    let mut spans = Vec::new();
    hide(file.get_ref(), span, false, &mut spans);
    Hidden::Spans(spans)
}

fn hide(table: &DeTable<'_>, wrong: &Range<usize>, is_secret: bool, to: &mut Vec<Range<usize>>) {
    for (key, value) in table.iter() {
        let is_secret = is_secret || SECRET.contains(&key.get_ref().as_ref()) || key.span() == *wrong;
        hide_value(value, wrong, is_secret, to);
    }
}

fn hide_value(
    value: &Spanned<DeValue<'_>>,
    wrong: &Range<usize>,
    is_secret: bool,
    to: &mut Vec<Range<usize>>,
) {
    match value.get_ref() {
        DeValue::Table(table) => hide(table, wrong, is_secret, to),
        DeValue::Array(all) => all.iter().for_each(|one| hide_value(one, wrong, is_secret, to)),
        other => {
            if is_secret || other.as_str().is_some_and(looks_secret) {
                to.push(value.span());
            }
        }
    }
}

/// A key where none belongs, or an address with a password.
fn looks_secret(text: &str) -> bool {
    text.starts_with("sk-") || text.contains(':') && text.contains('@')
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
