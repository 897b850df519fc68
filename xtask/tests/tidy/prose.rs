//! The prose of comments and pages: how long its sentences are, and how much of it there is beside the code.
//!
//! A paragraph ends at an empty line, a heading, a table row, a list item or a fence. Code counts as one word where it is
//! inline, and not at all where it is fenced.

use super::lexer::{self, Token};

/// Most words of a sentence.
const SENTENCE_WORDS_MAX: usize = 25;

/// Most words of comments for each word of code, in the sources of all crates together.
const COMMENT_RATIO_MAX: f64 = 0.4;

/// Text of a comment, a docstring or a page, by line.
type Block<'t> = Vec<(usize, &'t str)>;

/// Words of a file's lines that are comments alone, and of its other lines. Fenced examples are neither.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) comment: usize,
    pub(crate) code: usize,
}

/// The sentences that are too long.
pub(crate) fn long_sentences(path: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (line, sentence) in sentences(path, text) {
        let words = count(&sentence);
        if words > SENTENCE_WORDS_MAX {
            problems.push(format!(
                "{path}:{line}: a sentence of {words} words, {SENTENCE_WORDS_MAX} are allowed: {sentence}"
            ));
        }
    }
    problems
}

/// Every sentence of a file's prose, with the line where its paragraph begins.
pub(crate) fn sentences(path: &str, text: &str) -> Vec<(usize, String)> {
    let blocks = match path.rsplit_once('.') {
        Some((_, "rs")) => comments(text, &["//!", "///", "//"]),
        Some((_, "py")) => [comments(text, &["#"]), docstrings(text)].concat(),
        _ => vec![text.lines().enumerate().map(|(index, line)| (index + 1, line)).collect()],
    };
    blocks
        .iter()
        .flat_map(paragraphs)
        .flat_map(|(line, text)| split(&text).into_iter().map(move |s| (line, s)))
        .collect()
}

/// How many words of comments and of code a Rust file has.
pub(crate) fn words(text: &str) -> Words {
    let (mut words, mut fenced) = (Words::default(), false);
    for line in text.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("//") {
            let comment = comment.trim_start_matches(['/', '!']);
            let is_fence = comment.trim_start().starts_with("```");
            fenced ^= is_fence;
            if !fenced && !is_fence {
                words.comment += comment.split_whitespace().count();
            }
        } else {
            fenced = false;
            words.code += line.split_whitespace().count();
        }
    }
    words
}

/// Whether there are too many comments in all.
pub(crate) fn too_many_comments(of_files: impl IntoIterator<Item = Words>) -> Option<String> {
    let sum =
        |all: Words, file: Words| Words { comment: all.comment + file.comment, code: all.code + file.code };
    let Words { comment, code } = of_files.into_iter().fold(Words::default(), sum);
    let most = u32::try_from(code).map_or(f64::MAX, f64::from) * COMMENT_RATIO_MAX;
    let is_too_many = u32::try_from(comment).map_or(f64::MAX, f64::from) > most;
    is_too_many.then(|| {
        format!(
            "{comment} words of comments for {code} of code; at most {COMMENT_RATIO_MAX} for each are allowed"
        )
    })
}

/// Comments between `/*` and its end: they would count as code.
pub(crate) fn block_comments(path: &str, text: &str) -> Vec<String> {
    let found = lexer::tokens(text).into_iter().filter(|(_, token)| *token == Token::BlockComment);
    found.map(|(line, _)| format!("{path}:{line}: a block comment; begin its lines with `//`")).collect()
}

/// Runs of lines that are comments alone, each of one kind.
fn comments<'t>(text: &'t str, markers: &[&'static str]) -> Vec<Block<'t>> {
    let mut blocks: Vec<Block<'t>> = Vec::new();
    let mut last = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let marker = markers.iter().find(|marker| line.starts_with(**marker));
        if let Some(marker) = marker {
            if last != Some(marker) {
                blocks.push(Vec::new());
            }
            let rest = line[marker.len()..].trim_start();
            blocks.last_mut().expect("one was pushed").push((index + 1, rest));
        }
        last = marker;
    }
    blocks
}

/// The texts between triple quotes.
fn docstrings(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut is_inside = false;
    for (index, line) in text.lines().enumerate() {
        for (nth, part) in line.split("\"\"\"").enumerate() {
            if nth > 0 {
                is_inside = !is_inside;
            }
            if is_inside {
                if nth > 0 {
                    blocks.push(Vec::new());
                }
                blocks.last_mut().expect("one was opened").push((index + 1, part.trim()));
            }
        }
    }
    blocks
}

fn paragraphs(block: &Block<'_>) -> Vec<(usize, String)> {
    let (mut paragraphs, mut begins, mut fenced) = (Vec::<(usize, String)>::new(), true, false);
    for (number, line) in block {
        let line = line.trim();
        if line.starts_with("```") {
            (fenced, begins) = (!fenced, true);
            continue;
        }
        let is_definition = line.starts_with('[') && line.contains("]: ");
        let is_prose = !line.is_empty() && !line.starts_with(['|', '#', '<']) && !is_definition;
        if fenced || !is_prose {
            begins = true;
            continue;
        }
        let item = list_item(line);
        match paragraphs.last_mut().filter(|_| !begins && item.is_none()) {
            Some((_, text)) => {
                text.push(' ');
                text.push_str(line);
            }
            None => paragraphs.push((*number, item.unwrap_or(line).to_owned())),
        }
        begins = false;
    }
    paragraphs
}

/// What stands after the marker of a list item.
fn list_item(line: &str) -> Option<&str> {
    let bullet = ["- ", "* ", "+ "].into_iter().find_map(|marker| line.strip_prefix(marker));
    bullet.or_else(|| {
        let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let is_numbered = rest.len() < line.len();
        [". ", ") "].into_iter().find_map(|marker| rest.strip_prefix(marker)).filter(|_| is_numbered)
    })
}

/// The sentences of a paragraph, inline code and addresses of links taken out.
fn split(paragraph: &str) -> Vec<String> {
    let mut text = String::new();
    for (nth, part) in paragraph.split('`').enumerate() {
        text.push_str(if nth % 2 == 0 { part } else { "CODE" });
    }
    let mut plain = String::new();
    for (nth, part) in text.split("](").enumerate() {
        let rest = if nth == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) };
        plain.push_str(rest);
    }
    for short in ["e.g.", "i.e.", "etc.", "vs.", "cf."] {
        plain = plain.replace(short, short.trim_end_matches('.'));
    }
    let mut sentences = vec![String::new()];
    for word in plain.split_whitespace() {
        let last = sentences.last_mut().expect("there is always one");
        if !last.is_empty() {
            last.push(' ');
        }
        last.push_str(word);
        if word.trim_end_matches(['"', '\'', ')', ']', '*', '_']).ends_with(['.', '!', '?']) {
            sentences.push(String::new());
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

fn count(sentence: &str) -> usize {
    sentence.split_whitespace().filter(|word| word.contains(|c: char| c.is_ascii_alphanumeric())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: usize) -> String {
        format!("{} end.", vec!["word"; words - 1].join(" "))
    }

    #[test]
    fn long_sentences_are_found_in_every_kind_of_file() {
        let (long, short) = (of(SENTENCE_WORDS_MAX + 1), of(SENTENCE_WORDS_MAX));
        for (path, before, after) in [
            ("a.rs", "/// ", "\nfn f() {}"),
            ("a.rs", "//! ", ""),
            ("a.rs", "    // ", ""),
            ("a.py", "# ", ""),
            ("a.py", "def f():\n    \"\"\"", "\"\"\""),
            ("a.md", "- ", ""),
        ] {
            let problems = long_sentences(path, &format!("{before}{long}{after}\n"));
            assert_eq!(problems.len(), 1, "{path} {before}");
            assert_eq!(long_sentences(path, &format!("{before}{short} {short}{after}\n")), [""; 0]);
        }
        assert!(long_sentences("a.rs", &format!("let s = \"{long}\";\n")).is_empty());
    }

    #[test]
    fn sentences_go_over_lines_and_end_where_paragraphs_do() {
        let half = "word ".repeat(20);
        assert_eq!(long_sentences("a.rs", &format!("/// {half}\n/// {half}\n")).len(), 1);
        for between in ["///", "/// - item", "/// | a | b |", "/// # Errors", "fn f() {}"] {
            let text = format!("/// {half}\n{between}\n/// # Heading\n/// {half}\n");
            assert!(long_sentences("a.rs", &text).is_empty(), "{between}");
        }
        let fenced = format!("{half}\n```sh\n{half}{half}\n```\n{half}\n");
        assert!(long_sentences("a.md", &fenced).is_empty());
    }

    #[test]
    fn code_and_addresses_are_few_words() {
        let text = format!("See `{}` and [the page](a%20b%20c.md) for i.e. more.", "a ".repeat(40));
        assert_eq!(split(&text), ["See CODE and [the page for i.e more."]);
    }

    #[test]
    fn block_comments_are_found() {
        let problems = block_comments("a.rs", "// one\nf(\"/*\");\n/* two */\n");
        assert_eq!(problems, ["a.rs:3: a block comment; begin its lines with `//`"]);
    }

    #[test]
    fn comments_are_weighed_against_code() {
        let text = "//! One two.\n//!\n//! ```\n//! let not = counted;\n//! ```\nfn f() {} // beside\n";
        assert_eq!(words(text), Words { comment: 2, code: 5 });
        assert!(too_many_comments([Words { comment: 40, code: 99 }]).is_some());
        assert_eq!(
            too_many_comments([Words { comment: 40, code: 50 }, Words { comment: 0, code: 50 }]),
            None
        );
    }
}
