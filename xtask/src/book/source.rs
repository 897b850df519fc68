//! The copy of `docs/` that the book is made from.

use std::fs;
use std::path::Path;

use super::files::{files_below, inside, read};
use crate::steps::Failure;

/// What mdBook calls the page of a folder: it renames `README.md` to it, but not the links there.
const OF_FOLDER: (&str, &str) = ("README.md", "index.md");

/// Copies all files, with links that leave the folder as plain text and paths.
pub(super) fn copy(docs: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| Failure::File { path, cause }
    };
    if to.exists() {
        fs::remove_dir_all(to).map_err(failed(to))?;
    }
    for path in files_below(docs)? {
        let name = inside(docs, &path);
        let copy = to.join(name.replace(OF_FOLDER.0, OF_FOLDER.1));
        let folder = copy.parent().unwrap_or(to);
        fs::create_dir_all(folder).map_err(failed(folder))?;
        if name.ends_with(".md") {
            fs::write(&copy, alone(&name, &read(&path)?)).map_err(failed(&copy))?;
        } else {
            fs::copy(&path, &copy).map_err(failed(&copy))?;
        }
    }
    Ok(())
}

/// The pages that the table of contents leaves out: mdBook would leave them out silently.
pub(super) fn unlisted(docs: &Path) -> Result<Vec<String>, Failure> {
    let summary = read(&docs.join("SUMMARY.md"))?;
    let pages =
        files_below(docs)?.into_iter().map(|path| inside(docs, &path)).filter(|name| name.ends_with(".md"));
    Ok(pages.filter(|name| name != "SUMMARY.md" && !summary.contains(&format!("]({name})"))).collect())
}

/// A page whose links that leave the folder are plain text, with the path from the root of the checkout. `name` is the page's path from there.
fn alone(name: &str, page: &str) -> String {
    let depth = name.matches('/').count();
    let mut fenced = false;
    let mut text = String::with_capacity(page.len());
    for line in page.split_inclusive('\n') {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        match fenced || is_fence {
            true => text.push_str(line),
            false => text.push_str(&line_alone(depth, line)),
        }
    }
    text
}

fn line_alone(depth: usize, line: &str) -> String {
    let (mut text, mut rest) = (String::new(), line);
    while let Some(middle) = rest.find("](") {
        let target = rest[middle + 2..].split([')', ' ']).next().unwrap_or_default();
        let begin = rest[..middle].rfind('[');
        let end = rest[middle..].find(')').map(|at| middle + at + 1);
        match (begin, end, outside(depth, target)) {
            (Some(begin), Some(end), Some(path)) => {
                let words = &rest[begin + 1..middle];
                text.push_str(rest[..begin].trim_end_matches('!'));
                text.push_str(words);
                if !words.contains(&path) {
                    text.push_str(&format!(" (`{path}`)"));
                }
                rest = &rest[end..];
            }
            _ => {
                text.push_str(&rest[..middle + 2]);
                match target.contains("://") {
                    true => text.push_str(target),
                    false => text.push_str(&target.replace(OF_FOLDER.0, OF_FOLDER.1)),
                }
                rest = &rest[middle + 2 + target.len()..];
            }
        }
    }
    text + rest
}

/// Where a relative target leads from the root of the checkout, if it leaves the folder that the page lies `depth`
/// folders below.
fn outside(depth: usize, target: &str) -> Option<String> {
    let (mut folders, mut path) = (depth + 1, Vec::new());
    let target = if target.contains("://") { "" } else { target };
    for part in target.split('#').next().unwrap_or_default().split('/') {
        match part {
            ".." if path.pop().is_none() => folders = folders.saturating_sub(1),
            ".." | "" | "." => {}
            part => path.push(part),
        }
    }
    (folders == 0).then(|| path.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_a_folder_lead_to_its_page() {
        let page = "[all](adr/README.md#rows) [web](https://example.org/README.md) `README.md`\n";
        assert_eq!(
            alone("a.md", page),
            "[all](adr/index.md#rows) [web](https://example.org/README.md) `README.md`\n"
        );
    }

    #[test]
    fn links_that_leave_become_text() {
        let page = "See [the code](../crates/core/src/lib.rs), [here](vllm.md#a) and [`x`](adr/../../README.md \"t\").\n\
                    ```sh\n[a](../b)\n```\n![picture](../x.svg) [web](https://example.org/../a)\n";
        let expected = "See the code (`crates/core/src/lib.rs`), [here](vllm.md#a) and `x` (`README.md`).\n\
                        ```sh\n[a](../b)\n```\npicture (`x.svg`) [web](https://example.org/../a)\n";
        assert_eq!(alone("index.md", page), expected);
        assert_eq!(
            alone("adr/1.md", "[a](../design.md) [b](../../README.md)"),
            "[a](../design.md) b (`README.md`)"
        );
        assert_eq!(alone("a.md", "[`contrib/x`](../contrib/x#y)"), "`contrib/x`");
    }
}
