//! A line of the file with its secrets masked, one star for each character.
//!
//! Comments are secret. Of a file that can be parsed, so are the values that may be; the rest is shown. Of any other file,
//! headers, the first key, punctuation, small numbers and booleans are shown. So a broken string shows nothing.

use std::ops::Range;

/// Longer numbers may be secrets.
const DIGITS_MAX: usize = 6;

/// What is masked besides comments.
#[derive(Debug)]
pub(super) enum Hidden {
    /// Each value, and each word that may be one.
    Everything,
    /// These bytes of the file.
    Spans(Vec<Range<usize>>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScanState {
    Plain,
    Comment,
    /// In a string that ends with this quote.
    Text {
        quote: char,
        is_long: bool,
    },
}

/// The characters of a file up to a line's end, with what the parser takes each for.
struct LineScan<'a> {
    rest: &'a str,
    state: ScanState,
    /// Of open brackets.
    depth: usize,
}

/// The line that begins at byte `start` and ends at `end`.
pub(super) fn masked(text: &str, start: usize, end: usize, hidden: &Hidden) -> String {
    let mut scan = LineScan { rest: text.get(..end).unwrap_or_default(), state: ScanState::Plain, depth: 0 };
    let before = text.get(..start).unwrap_or_default().len();
    while end - scan.rest.len() < before {
        scan.next(&mut String::new());
    }
    let is_value = scan.depth > 0 || scan.state != ScanState::Plain;
    let mut plain = String::new();
    while !scan.rest.is_empty() {
        scan.next(&mut plain);
    }
    match hidden {
        Hidden::Everything => words(&plain, is_value),
        Hidden::Spans(spans) => without(spans, text, before, end, &plain),
    }
}

/// `plain` is the line with stars for strings and comments, so that its first `#` begins a comment.
fn without(spans: &[Range<usize>], text: &str, start: usize, end: usize, plain: &str) -> String {
    let line = text.get(start..end).unwrap_or_default();
    let comment = plain.chars().position(|c| c == '#').unwrap_or(usize::MAX);
    let shown = line.char_indices().enumerate().map(|(nth, (at, c))| {
        let is_hidden = spans.iter().any(|span| span.contains(&(start + at)));
        let is_frame = c.is_whitespace() || ['"', '\''].contains(&c);
        if nth > comment || is_hidden && !is_frame { '*' } else { c }
    });
    shown.collect()
}

impl LineScan<'_> {
    /// Takes one character, or a quote of three. What is in a string or a comment becomes stars.
    fn next(&mut self, to: &mut String) {
        let Some(c) = self.rest.chars().next() else { return };
        let is_triple = |quote: char| self.rest.starts_with(&String::from(quote).repeat(3));
        let mut taken = c.len_utf8();
        let mut shown = c;
        match self.state {
            ScanState::Plain => match c {
                '"' | '\'' => {
                    let is_long = is_triple(c);
                    taken = if is_long { 3 } else { 1 };
                    self.state = ScanState::Text { quote: c, is_long };
                }
                '#' => self.state = ScanState::Comment,
                '[' | '{' => self.depth += 1,
                ']' | '}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            },
            ScanState::Comment if c == '\n' => self.state = ScanState::Plain,
            ScanState::Comment => shown = '*',
            ScanState::Text { quote, is_long } => {
                let is_end = c == quote && (!is_long || is_triple(quote));
                if is_end {
                    taken = if is_long { 3 } else { 1 };
                    self.state = ScanState::Plain;
                } else if c == '\n' && !is_long {
                    self.state = ScanState::Plain;
                } else {
                    // An escaped quote ends no string.
                    let escaped = self.rest.chars().nth(1).filter(|c| *c != '\n');
                    if let Some(escaped) = escaped.filter(|_| c == '\\' && quote == '"') {
                        taken += escaped.len_utf8();
                        to.push('*');
                    }
                    shown = '*';
                }
            }
        }
        let count = if taken == 3 && shown == c && c.is_ascii() { 3 } else { 1 };
        to.extend(std::iter::repeat_n(shown, count));
        self.rest = self.rest.get(taken..).unwrap_or_default();
    }
}

/// Masks words of values that may be secrets. A key of an inline table looks like the end of one.
fn words(line: &str, mut is_value: bool) -> String {
    let is_word = |c: char| c.is_alphanumeric() || !(c.is_whitespace() || "[]{}=,\"'#*".contains(c));
    let mut shown = String::new();
    let mut rest = line;
    while let Some(c) = rest.chars().next() {
        if !is_word(c) {
            is_value |= c == '=';
            shown.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let (word, after) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        let is_number = word.len() <= DIGITS_MAX && word.chars().all(|c| c.is_ascii_digit());
        let is_key = !is_value;
        if is_key || is_number || ["true", "false"].contains(&word) {
            shown.push_str(word);
        } else {
            shown.extend(word.chars().map(|_| '*'));
        }
        rest = after;
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::{Hidden, masked};

    #[test]
    fn a_line_shows_keys_and_no_values() {
        for (line, shown) in [
            ("[front]", "[front]"),
            ("[[model]]", "[[model]]"),
            ("comand = [\"sh\", \"-c\"]", "comand = [\"**\", \"**\"]"),
            ("a = { b = 'x\\', c = true }", "a = { * = '**', * = true }"),
            ("a = \"x\\\"y\" z", "a = \"****\" *"),
            ("level = 3 # text", "level = 3 #*****"),
            ("level = 1234567", "level = *******"),
            ("kays = [sk-one]", "kays = [******]"),
            ("keys = [sk-one==]", "keys = [******==]"),
            ("a = \"unended äöü", "a = \"***********"),
            ("a.b = \"\"", "a.b = \"\""),
        ] {
            assert_eq!(masked(line, 0, line.len(), &Hidden::Everything), shown);
        }
    }

    #[test]
    fn what_began_before_the_line_counts() {
        for (before, line, shown) in [
            ("a = [\n", "  sk-one, \"x\"", "  ******, \"*\""),
            ("a = \"\"\"\n", "secret = \"x\"", "******************"),
            ("a = '''\n", "x''' # y", "*''' #**"),
            ("a = \"unended\n", "key = \"x\"", "key = \"*\""),
            ("# it's\n", "key = 1", "key = 1"),
        ] {
            let text = format!("{before}{line}\nmore");
            let shown = shown.get(..).map(|shown| shown.chars().take(line.len()).collect::<String>());
            let masked = masked(&text, before.len(), before.len() + line.len(), &Hidden::Everything);
            assert_eq!(Some(masked), shown, "{before}");
        }
    }

    #[test]
    fn only_spans_and_comments_are_masked_of_what_can_be_parsed() {
        for (line, secret, shown) in [
            ("url = \"http://h:1\" # sk-1", "", "url = \"http://h:1\" #*****"),
            ("keys = [\"sk-1 ä\", \"b\"]", "\"sk-1 ä\"", "keys = [\"**** *\", \"b\"]"),
            ("a = \"x # y\"", "", "a = \"x # y\""),
            ("n = 12345678", "12345678", "n = ********"),
        ] {
            let at = line.find(secret).unwrap();
            let hidden = Hidden::Spans(std::iter::once(at..at + secret.len()).collect());
            assert_eq!(masked(line, 0, line.len(), &hidden), shown);
        }
    }
}
