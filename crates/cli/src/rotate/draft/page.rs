//! TOML with comments, as a person would write it.

use toml::Value;

/// Longer comments get another line.
const COMMENT_WIDTH: usize = 100;

#[derive(Debug, Default)]
pub(super) struct Page(String);

impl Page {
    pub(super) fn text(self) -> String {
        self.0
    }

    pub(super) fn blank(&mut self) {
        self.0 += "\n";
    }

    pub(super) fn comment(&mut self, text: &str) {
        let mut line = String::from("#");
        // A control character would end the comment, or is not allowed in one.
        for word in text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty())
        {
            if line.len() > 1 && line.chars().count() + word.chars().count() >= COMMENT_WIDTH {
                self.0 += &format!("{line}\n");
                line = String::from("#");
            }
            line = line + " " + word;
        }
        self.0 += &format!("{line}\n");
    }

    /// A header, such as `[front]`, or one with a quoted part.
    pub(super) fn header(&mut self, header: &str) {
        self.0 += &format!("{header}\n");
    }

    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0 += &format!("{} = {}\n", quoted_key(key), value.into());
    }

    /// A key that its reader may set. The value has one line.
    pub(super) fn suggest(&mut self, key: &str, value: impl Into<Value>, meaning: &str) {
        let behind = if meaning.is_empty() { String::new() } else { format!("  # {meaning}") };
        self.0 += &format!("# {key} = {}{behind}\n", value.into());
    }
}

/// As it is, or in quotes.
pub(super) fn quoted_key(key: &str) -> String {
    let is_plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    if is_plain { key.to_owned() } else { basic(key) }
}

/// On one line, with escapes.
fn basic(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted += &format!("\\u{:04X}", u32::from(c)),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_written_is_read_back() {
        for text in [
            "",
            "a",
            "\"",
            "'",
            "\\n",
            "a\nb\r\tc",
            "\u{7f}\u{0}\u{1b}",
            "'''\"\"\"",
            "${X} #",
            "\u{1f600}\u{e9}",
            " ",
        ] {
            let mut page = Page::default();
            page.comment(&format!("a {text} b"));
            page.set("one", text);
            page.set("list", vec![text.to_owned(), "x".to_owned()]);
            page.header(&format!("[t.{}]", quoted_key(text)));
            page.set(text, true);
            let page = page.text();
            let read: toml::Table = page.parse().unwrap_or_else(|error| panic!("{page}{error}"));
            assert_eq!(read["one"].as_str(), Some(text), "{page}");
            assert_eq!(read["list"][0].as_str(), Some(text), "{page}");
            assert_eq!(read["t"][text][text].as_bool(), Some(true), "{page}");
        }
    }

    #[test]
    fn long_comments_are_wrapped() {
        let mut page = Page::default();
        page.comment(&"word ".repeat(60));
        let text = page.text();
        assert!(text.lines().count() == 4 && text.lines().all(|line| line.len() <= 100), "{text}");
        assert_eq!(text.matches("word").count(), 60);
    }
}
