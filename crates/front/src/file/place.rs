//! Where in the file a mistake is, and an excerpt that shows it without secrets.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::masked::masked;

/// Longer lines are not shown.
const LINE_MAX: usize = 160;

/// A place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// The line, with a caret under the mistake. Its values are stars, since they may be secrets.
    pub excerpt: Option<String>,
}

impl FilePlace {
    pub(super) fn new(text: &str, span: &Range<usize>) -> Self {
        let mut at = span.start.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let (line, column) = (text[..at].matches('\n').count() + 1, text[start..at].chars().count() + 1);
        let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
        let shown = masked(text, start, end);
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

    /// Where the first key is that `reason` names, in this section; or the section itself.
    pub(super) fn of_reason(text: &str, file: &DeTable<'_>, section: &str, reason: &str) -> Option<Self> {
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
