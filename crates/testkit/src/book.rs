//! The snippets of the project's pages.

use std::fs;
use std::path::{Path, PathBuf};

/// Code between fences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snippet {
    /// The page, from the repository's root.
    pub page: String,
    /// The line of its first fence, from 1.
    pub line: usize,
    /// The code, with its line ends.
    pub code: String,
}

/// All snippets in `language` of the README, CONTRIBUTING, and `docs/`, except records of the past (decisions
/// and benchmarks).
///
/// # Panics
/// Where a page cannot be read.
#[must_use]
pub fn snippets(language: &str) -> Vec<Snippet> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    pages_below(&root.join("docs"), &mut pages);
    pages.sort();
    let found = pages.iter().flat_map(|page| {
        let name = page.strip_prefix(&root).unwrap_or(page).display().to_string();
        cut(&name, &fs::read_to_string(page).unwrap(), language)
    });
    found.collect()
}

/// What follows one of `starts` in the lines of the snippets for a shell: the words, and where they stand.
///
/// Continued lines are joined. Variables before a command, comments, and what the shell takes for itself are left out.
///
/// # Panics
/// Where a page cannot be read.
#[must_use]
pub fn command_lines(starts: &[&str]) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for snippet in snippets("sh") {
        let text = snippet.code.replace("\\\n", " ");
        for line in text.lines() {
            let line = line.split(" #").next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().skip_while(|word| is_variable(word)).collect();
            let line = words.join(" ");
            let Some(arguments) = starts.iter().find_map(|start| line.strip_prefix(start)) else { continue };
            let words = arguments.split_whitespace().take_while(|word| !is_shells(word));
            found.push((
                format!("{}:{}: {line}", snippet.page, snippet.line),
                words.map(str::to_owned).collect(),
            ));
        }
    }
    found
}

fn is_variable(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

/// Whether the shell takes this word, and what follows it, for itself.
fn is_shells(word: &str) -> bool {
    ["|", ">", "&&", "&", ";", "2>", ">>"].contains(&word)
}

fn pages_below(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_record = path.ends_with("adr") || path.ends_with("benchmarks");
        if path.is_dir() && !is_record {
            pages_below(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

fn cut(page: &str, text: &str, language: &str) -> Vec<Snippet> {
    let mut snippets = Vec::new();
    let mut open: Option<(bool, Snippet)> = None;
    for (index, line) in text.lines().enumerate() {
        let fence = line.trim_start().strip_prefix("```");
        open = match (open, fence) {
            (None, Some(tag)) => {
                let is_wanted = tag.split([',', ' ']).next() == Some(language);
                Some((is_wanted, Snippet { page: page.to_owned(), line: index + 1, code: String::new() }))
            }
            (Some((is_wanted, snippet)), Some(_)) => {
                snippets.extend(is_wanted.then_some(snippet));
                None
            }
            (Some((is_wanted, mut snippet)), None) => {
                snippet.code += line;
                snippet.code += "\n";
                Some((is_wanted, snippet))
            }
            (None, None) => None,
        };
    }
    snippets
}

#[test]
fn snippets_are_cut_by_their_language() {
    let page = "# A\n```sh\none\n\ntwo\n```\n```python\nno\n```\n- b\n  ```sh,ignore\n  three\n  ```\n";
    let cut = cut("a.md", page, "sh");
    let snippet = |line, code: &str| Snippet { page: "a.md".into(), line, code: code.into() };
    assert_eq!(cut, [snippet(2, "one\n\ntwo\n"), snippet(11, "  three\n")]);
}

#[test]
fn the_pages_have_snippets() {
    assert!(snippets("sh").iter().any(|snippet| snippet.page == "README.md"));
    assert!(snippets("sh").iter().any(|snippet| snippet.page.starts_with("docs/")));
    assert!(!snippets("sh").iter().any(|snippet| snippet.page.starts_with("docs/adr/")));
}
