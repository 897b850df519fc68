//! The strings and the block comments of a Rust file, found without a parser: macros' arguments count as well.

/// What stands at a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Token {
    /// The text between the quotes, with a space for each escape.
    Text(String),
    BlockComment,
}

/// The tokens in their order, each with its first line.
pub(crate) fn tokens(text: &str) -> Vec<(usize, Token)> {
    let (mut tokens, mut line, mut rest) = (Vec::new(), 1, text);
    let mut last = ' ';
    while let Some(c) = rest.chars().next() {
        let is_prefixed = !last.is_alphanumeric() || "bc".contains(last);
        let is_raw = c == 'r' && is_prefixed && last != '_';
        let (token, len) = if rest.starts_with("//") {
            (None, rest.find('\n').unwrap_or(rest.len()))
        } else if rest.starts_with("/*") {
            (Some(Token::BlockComment), block_comment(rest))
        } else if c == '"' {
            let len = quoted(rest, '"');
            (Some(Token::Text(without_escapes(&rest[1..len.max(2) - 1]))), len)
        } else if c == '\'' {
            (None, character(rest))
        } else if let Some((within, len)) = raw(rest).filter(|_| is_raw) {
            (Some(Token::Text(within.to_owned())), len)
        } else {
            (None, c.len_utf8())
        };
        tokens.extend(token.map(|token| (line, token)));
        let (taken, after) = rest.split_at(len);
        line += taken.matches('\n').count();
        (last, rest) = (c, after);
    }
    tokens
}

/// Strings of a Python file that begin and end on a line, with the line.
pub(crate) fn strings_of_python(text: &str) -> Vec<(usize, String)> {
    let mut strings = Vec::new();
    for (line, mut rest) in (1..).zip(text.lines()) {
        while let Some(at) = rest.find(['#', '"', '\'']) {
            rest = &rest[at..];
            let Some(quote @ ('"' | '\'')) = rest.chars().next() else { break };
            let len = quoted(rest, quote);
            strings.push((line, without_escapes(&rest[1..len.max(2) - 1])));
            rest = &rest[len..];
        }
    }
    strings
}

/// Comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0_u32, 0);
    while at < text.len() {
        let two = text.as_bytes().get(at..at + 2);
        if two == Some(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if two == Some(b"*/") {
            (depth, at) = (depth - 1, at + 2);
        } else {
            at += 1;
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Bytes up to and with the closing quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// A character, or the quote of a lifetime.
fn character(text: &str) -> usize {
    let mut after = text.chars().skip(1);
    let is_character = match (after.next(), after.next()) {
        (Some('\\'), _) => true,
        (_, second) => second == Some('\''),
    };
    if is_character { quoted(text, '\'') } else { 1 }
}

fn raw(text: &str) -> Option<(&str, usize)> {
    let hashes = text[1..].bytes().take_while(|b| *b == b'#').count();
    let within = text[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let len = within.find(&end)?;
    Some((&within[..len], 2 + hashes + len + end.len()))
}

fn without_escapes(text: &str) -> String {
    let (mut plain, mut is_escaped) = (String::new(), false);
    for c in text.chars() {
        if is_escaped || c == '\\' {
            is_escaped = !is_escaped;
            // Lines are counted in what is left.
            plain.push(if c == '\n' { '\n' } else { ' ' });
        } else {
            plain.push(c);
        }
    }
    plain
}

#[test]
fn strings_are_found_with_their_lines() {
    let text = |text: &str| Token::Text(text.to_owned());
    for (code, found) in [
        ("f(\"a b\");\ng(\"c\")", vec![(1, text("a b")), (2, text("c"))]),
        ("f(\"a\\\"b\\nc\")", vec![(1, text("a  b  c"))]),
        ("f(\"a\nb\", \"c\")", vec![(1, text("a\nb")), (2, text("c"))]),
        ("f(r\"a\\\", br#\"b\"c\"#)", vec![(1, text("a\\")), (1, text("b\"c"))]),
        ("f(r#type, for\"a\")", vec![(1, text("a"))]),
        ("f('\"', '\\'', \"a\"); fn g<'a>(of: &'a str)", vec![(1, text("a"))]),
        ("// it's \"one\"\nf(\"\") // \"two\"", vec![(2, text(""))]),
        ("/// \"a\"\nf(\"// b\")", vec![(2, text("// b"))]),
    ] {
        assert_eq!(tokens(code), found, "{code}");
    }
}

#[test]
fn strings_of_python_are_found_with_their_lines() {
    let strings = strings_of_python("a = 'b' # it's\nf(\"it's\", 'a\\'b')\n");
    let expected = [(1, "b"), (2, "it's"), (2, "a  b")].map(|(line, text)| (line, text.to_owned()));
    assert_eq!(strings, expected);
}

#[test]
fn block_comments_are_found_and_what_looks_like_them_is_not() {
    let code = "f(\"/*\"); // /* not\n/* one /* \"in\" */\n */ g(\"a\") /** two */";
    let a = Token::Text("a".to_owned());
    assert_eq!(
        tokens(code),
        [(1, Token::Text("/*".to_owned())), (2, Token::BlockComment), (3, a), (3, Token::BlockComment)]
    );
    assert_eq!(tokens("/* open"), [(1, Token::BlockComment)]);
}
