//! Makes outside text fit for messages.
//!
//! A header may name tensors anything: a megabyte, a terminal escape, a right-to-left override. The results
//! are bounded, without invisible or control characters.

use std::path::Path;

/// Bytes kept of a long text.
struct Limits {
    head: usize,
    tail: usize,
}

const NAME: Limits = Limits { head: 64, tail: 32 };
const REASON: Limits = Limits { head: 240, tail: 40 };
const PATH: Limits = Limits { head: 768, tail: 256 };

pub(crate) fn name(raw: &str) -> String {
    let mut shown = String::from('"');
    push_shortened(&mut shown, raw, &NAME, push_escaped);
    shown.push('"');
    if raw.len() > NAME.head + NAME.tail {
        shown.push_str(&format!(" ({} bytes long)", raw.len()));
    }
    shown
}

/// It may quote the file; keeps quotes and backslashes.
pub(crate) fn reason(raw: &str) -> String {
    let mut shown = String::new();
    push_shortened(&mut shown, raw, &REASON, push_printable);
    shown
}

pub(crate) fn path(raw: &Path) -> String {
    let mut shown = String::new();
    push_shortened(&mut shown, &raw.to_string_lossy(), &PATH, push_printable);
    shown
}

pub(crate) fn shape(dims: &[u64]) -> String {
    let mut shown = String::new();
    let text = dims.iter().take(64).map(u64::to_string).collect::<Vec<_>>().join(", ");
    shown.push('[');
    push_shortened(&mut shown, &text, &NAME, push_printable);
    shown.push(']');
    if dims.len() > 64 {
        shown.push_str(&format!(" (the first 64 of {} dimensions)", dims.len()));
    }
    shown
}

fn push_shortened(shown: &mut String, raw: &str, limits: &Limits, push: fn(&mut String, char)) {
    if raw.len() <= limits.head + limits.tail {
        raw.chars().for_each(|c| push(shown, c));
        return;
    }
    let head = raw.floor_char_boundary(limits.head);
    let tail = raw.ceil_char_boundary(raw.len() - limits.tail);
    raw[..head].chars().for_each(|c| push(shown, c));
    shown.push('…');
    raw[tail..].chars().for_each(|c| push(shown, c));
}

fn push_escaped(shown: &mut String, c: char) {
    if c == '\'' { shown.push(c) } else { shown.extend(c.escape_debug()) }
}

fn push_printable(shown: &mut String, c: char) {
    if matches!(c, '\'' | '"' | '\\') { shown.push(c) } else { shown.extend(c.escape_debug()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_are_only_quoted() {
        assert_eq!(name("model.layers.0.mlp.gate.weight"), "\"model.layers.0.mlp.gate.weight\"");
        assert_eq!(name("größe"), "\"größe\"");
        assert_eq!(name(""), "\"\"");
    }

    #[test]
    fn nothing_a_terminal_acts_on_survives() {
        for hostile in
            ["\u{1b}[2J", "a\rb", "a\nb", "\u{7}", "\u{9b}31m", "\u{202e}txt", "\u{200b}", "\u{2028}"]
        {
            for shown in [name(hostile), reason(hostile), path(Path::new(hostile))] {
                assert!(shown.contains("\\"), "{shown:?}");
                assert!(shown.chars().all(|c| c.is_ascii() && !c.is_control()), "{shown:?}");
            }
        }
    }

    #[test]
    fn an_escaped_name_cannot_be_mistaken_for_another() {
        assert_eq!(name("a\nb"), r#""a\nb""#);
        assert_eq!(name(r"a\nb"), r#""a\\nb""#);
        assert_eq!(name("a\" b"), r#""a\" b""#);
    }

    #[test]
    fn long_texts_keep_their_ends() {
        let long = format!("begin{}end", "x".repeat(1_000_000));
        assert!(name(&long).starts_with("\"beginxxx") && name(&long).contains("xxend\""));
        assert!(name(&long).ends_with("(1000008 bytes long)"));
        for shown in [name(&long), reason(&long), path(Path::new(&long))] {
            assert!(shown.len() < 1100, "{} bytes", shown.len());
        }
    }

    #[test]
    fn shortening_cuts_between_characters() {
        for pad in 0..4 {
            let long = format!("{}{}", "x".repeat(pad), "🦉".repeat(1000));
            assert!(name(&long).contains('…'));
        }
    }

    #[test]
    fn shapes_read_as_in_the_header() {
        assert_eq!(shape(&[]), "[]");
        assert_eq!(shape(&[2, 3]), "[2, 3]");
        assert!(shape(&[u64::MAX; 100_000]).len() < 200);
    }
}
