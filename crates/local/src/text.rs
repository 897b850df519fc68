//! Pieces of reports for people: tables, sentences and sizes, as wide as the terminal.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, ContentArrangement, Table};
use poorwill::ByteSize;

const GIB: f64 = 1_073_741_824.0;

/// An empty table, as wide as it may be.
#[must_use]
pub fn table(header: impl IntoIterator<Item = impl Into<Cell>>) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width())
        .set_header(header.into_iter().map(Into::into).collect::<Vec<Cell>>());
    table
}

/// Width of the terminal, within readable bounds.
fn width() -> u16 {
    terminal_size::terminal_size().map_or(100, |(width, _)| width.0.clamp(60, 120))
}

/// A sentence wrapped for the terminal; one line without a terminal.
#[must_use]
pub fn lines(sentence: &str) -> String {
    let Some((terminal_size::Width(width), _)) = terminal_size::terminal_size() else {
        return format!("{sentence}\n");
    };
    wrapped(sentence, usize::from(width.clamp(60, 120)))
}

fn wrapped(sentence: &str, width: usize) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in sentence.split(' ') {
        let letters = word.chars().count();
        if column > 0 && column + 1 + letters > width {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += letters;
    }
    text.push('\n');
    text
}

/// A size with a space that does not break.
#[must_use]
pub fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string().replace(' ', "\u{a0}")
}

/// A part of a sentence, if there are such bytes.
pub(crate) fn push(what: &mut Vec<String>, bytes: u64, verb: &str) {
    if bytes > 0 {
        what.push(format!("{} {verb}", size(bytes)));
    }
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// `1.20 GiB/s`, if it rounds above zero.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn rate(bytes: u64, seconds: f64) -> Option<String> {
    let bytes_per_s = bytes as f64 / seconds.max(1e-9);
    (bytes_per_s >= 0.01 * GIB).then(|| rate_of(bytes_per_s))
}

/// `1.20 GiB/s`.
pub(crate) fn rate_of(bytes_per_s: f64) -> String {
    format!("{:.2}\u{a0}GiB/s", bytes_per_s / GIB)
}

#[test]
fn lines_are_wrapped_at_the_width() {
    assert_eq!(wrapped("Note: a b.", 60), "Note: a b.\n");
    assert_eq!(wrapped("one two three", 7), "one two\nthree\n");
    assert_eq!(wrapped("one two three", 6), "one\ntwo\nthree\n");
    assert_eq!(wrapped("incomprehensible a", 6), "incomprehensible\na\n");
}
