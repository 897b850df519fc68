//! YAML as a tree whose nodes know their place. Aliases are replaced, and `<<` merged.

use std::collections::HashMap;
use std::fmt;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span};

/// Deeper files are refused.
const DEPTH_MAX: usize = 64;
/// Aliases of aliases could make a small file a huge tree.
const NODES_MAX: usize = 100_000;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) place: LineColumn,
    pub(super) yaml: Yaml,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Yaml {
    /// `is_plain` is without quotes, so that it may be a number.
    Scalar {
        text: String,
        is_plain: bool,
    },
    List(Vec<Node>),
    /// In the order of the file.
    Map(Vec<Entry>),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) place: LineColumn,
    pub(super) value: Node,
}

/// Both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct LineColumn {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl fmt::Display for LineColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mistake {
    pub(super) place: LineColumn,
    pub(super) text: String,
}

impl Mistake {
    pub(super) fn at<T>(place: LineColumn, text: impl Into<String>) -> Result<T, Self> {
        Err(Self { place, text: text.into() })
    }
}

impl Node {
    pub(super) fn entries(&self) -> &[Entry] {
        if let Yaml::Map(entries) = &self.yaml { entries } else { &[] }
    }

    pub(super) fn items(&self) -> &[Self] {
        if let Yaml::List(items) = &self.yaml { items } else { &[] }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(&self.yaml, Yaml::Scalar { text, is_plain: true } if matches!(text.as_str(), "" | "~" | "null"))
    }

    /// Numbers are text, too.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.yaml {
            Yaml::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }
}

/// The first document of a file.
pub(super) fn parsed(text: &str) -> Result<Node, Mistake> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = Reader { parser: Parser::new_from_str(text), anchors: HashMap::new(), nodes: 0 };
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamStart | Event::DocumentStart(..) => {}
            Event::StreamEnd | Event::DocumentEnd => return Mistake::at(place(&span), "the file is empty"),
            event => return reader.node(event, &span, 0),
        }
    }
}

struct Reader<'t> {
    parser: Parser<'t, granit_parser::StrInput<'t>>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl<'t> Reader<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Mistake> {
        match self.parser.next_event() {
            Some(event) => event.map_err(|error| mistake(&error)),
            None => Mistake::at(LineColumn { line: 1, column: 1 }, "the file ends too early"),
        }
    }

    fn node(&mut self, event: Event<'t>, span: &Span, depth: usize) -> Result<Node, Mistake> {
        let here = place(span);
        self.nodes += 1;
        if depth > DEPTH_MAX || self.nodes > NODES_MAX {
            return Mistake::at(here, "the file is too deep or too large for a configuration");
        }
        let (yaml, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_text = tag.is_some_and(|tag| tag.suffix() == "str");
                let is_plain = style == ScalarStyle::Plain && !is_text;
                (Yaml::Scalar { text: text.into_owned(), is_plain }, anchor)
            }
            Event::SequenceStart(_, anchor, _) => (Yaml::List(self.list(depth)?), anchor),
            Event::MappingStart(_, anchor, _) => (Yaml::Map(self.map(depth)?), anchor),
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return Mistake::at(here, "this alias is within what it stands for");
                };
                self.nodes += count(&node);
                return Ok(node);
            }
            _ => return Mistake::at(here, "this is no value"),
        };
        let node = Node { place: here, yaml };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node>, Mistake> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, &span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<Entry>, Mistake> {
        let (mut entries, mut merged): (Vec<Entry>, Vec<Node>) = (Vec::new(), Vec::new());
        loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                break;
            }
            let key = self.node(event, &span, depth + 1)?;
            let Yaml::Scalar { text, is_plain } = key.yaml else {
                return Mistake::at(key.place, "a key is a text");
            };
            let (event, span) = self.next()?;
            let value = self.node(event, &span, depth + 1)?;
            if text == "<<" && is_plain {
                merged.push(value);
            } else if entries.iter().any(|entry| entry.key == text) {
                return Mistake::at(key.place, format!("the key `{text}` is there twice"));
            } else {
                entries.push(Entry { key: text, place: key.place, value });
            }
        }
        for source in &merged {
            let sources =
                if let Yaml::List(list) = &source.yaml { &list[..] } else { std::slice::from_ref(source) };
            for entry in sources.iter().flat_map(Node::entries) {
                if !entries.iter().any(|own| own.key == entry.key) {
                    entries.push(entry.clone());
                }
            }
        }
        Ok(entries)
    }
}

fn count(node: &Node) -> usize {
    let inner: usize = node.items().iter().map(count).sum();
    1 + inner + node.entries().iter().map(|entry| count(&entry.value)).sum::<usize>()
}

fn place(span: &Span) -> LineColumn {
    LineColumn { line: span.start.line(), column: span.start.col() + 1 }
}

fn mistake(error: &ScanError) -> Mistake {
    let marker = error.marker();
    let place = LineColumn { line: marker.line(), column: marker.col() + 1 };
    Mistake { place, text: format!("it is no YAML: {}", error.info()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(node: &Node) -> String {
        match &node.yaml {
            Yaml::Scalar { text, is_plain: true } => text.clone(),
            Yaml::Scalar { text, .. } => format!("{text:?}"),
            Yaml::List(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(" ")),
            Yaml::Map(entries) => {
                let entries = entries.iter().map(|entry| format!("{}:{}", entry.key, shown(&entry.value)));
                format!("{{{}}}", entries.collect::<Vec<_>>().join(" "))
            }
        }
    }

    #[test]
    fn nodes_are_read_in_order() {
        for (text, expected) in [
            ("b: 1\na: 'x'\nc: [~, {d: 2}]", "{b:1 a:\"x\" c:[~ {d:2}]}"),
            ("a: |\n  one\n  two\nb: >\n  one\n  two\n", "{a:\"one\\ntwo\\n\" b:\"one two\\n\"}"),
            ("a: &x {k: 1}\nb: *x\n", "{a:{k:1} b:{k:1}}"),
            ("a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  l: 3\n", "{a:{k:1 l:2} b:{l:3 k:1}}"),
            ("a: &x {k: 1}\nb: &y {k: 2, m: 4}\nc: {<<: [*x, *y]}\n", "{a:{k:1} b:{k:2 m:4} c:{k:1 m:4}}"),
            ("\u{feff}# c\na: !!str 1\n---\nb: 2", "{a:\"1\"}"),
        ] {
            let node = parsed(text).unwrap_or_else(|mistake| panic!("{text}: {mistake:?}"));
            assert_eq!(shown(&node), expected, "{text}");
        }
        let node = parsed("a:\n  b: [x, y]\n").unwrap();
        let entry = &node.entries()[0].value.entries()[0];
        assert_eq!(entry.place, LineColumn { line: 2, column: 3 });
        assert_eq!(entry.value.items()[1].place, LineColumn { line: 2, column: 10 });
    }

    #[test]
    fn mistakes_have_their_place() {
        for (text, line, column, words) in [
            ("", 1, 1, "the file is empty"),
            ("a: 1\nb: [1\nc: 2\n", 3, 2, "it is no YAML"),
            ("a: 1\na: 2", 2, 1, "the key `a` is there twice"),
            ("a: *x", 1, 4, "it is no YAML"),
            ("? [a]\n: b", 1, 3, "a key is a text"),
            ("a: &x [*x]", 1, 8, "within what it stands for"),
        ] {
            let mistake = parsed(text).expect_err(text);
            assert!(mistake.text.contains(words), "{text}: {mistake:?}");
            assert_eq!((mistake.place.line, mistake.place.column), (line, column), "{text}: {mistake:?}");
        }
    }

    #[test]
    fn a_small_file_makes_no_huge_tree() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for nth in 1..9 {
            let alias = format!("*a{}", nth - 1);
            text += &format!("a{nth}: &a{nth} [{}]\n", vec![alias; 10].join(", "));
        }
        assert!(parsed(&text).unwrap_err().text.contains("too large"));
        assert!(parsed(&"[".repeat(100)).is_err());
    }
}
