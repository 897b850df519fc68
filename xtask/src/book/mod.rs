//! `cargo xtask book`: `docs/` as a book of HTML pages with a search, in cargo's target folder.
//!
//! mdBook makes it from a copy of `docs/`, in which links that leave `docs/` have become plain text: the book stands
//! alone. Afterwards every link of every page must lead to a page, and its fragment to an element of it.

mod files;
mod html;
mod mdbook;
mod source;

use std::path::Path;
use std::time::Instant;

use self::files::{files_below, inside, read};
use self::mdbook::Mdbook;
use crate::steps::{Failure, note, say, workspace_root};
use crate::toolchain::target_folder;

/// Makes the book. `Some` says why there is none, which is a failure under continuous integration.
pub(crate) fn run() -> Result<Option<String>, Failure> {
    let start = Instant::now();
    let mdbook = match Mdbook::ready() {
        Ok(mdbook) => mdbook,
        Err(cause) if std::env::var_os("CI").is_none() => {
            let why = format!("no book made: {cause}");
            note(&format!("!!! skipped: {why}"));
            return Ok(Some(why));
        }
        Err(cause) => return Err(cause),
    };
    let target = target_folder()?;
    let (source, book) = (target.join("book-source"), target.join("book"));
    let docs = workspace_root().join("docs");
    let unlisted = source::unlisted(&docs)?;
    if !unlisted.is_empty() {
        let problem = format!("does not list {}", unlisted.join(", "));
        return Err(Failure::Content { path: docs.join("SUMMARY.md"), problem });
    }
    source::copy(&docs, &source)?;
    mdbook.build(&source, &book)?;
    let (pages, links) = check(&book)?;
    say(&format!(
        "xtask book: {pages} pages, {links} links, {} in {:.1} s",
        book.join("index.html").display(),
        start.elapsed().as_secs_f64()
    ));
    Ok(None)
}

/// Follows the links of all pages. Returns how many pages and links there are; none of either is a failure.
fn check(book: &Path) -> Result<(usize, usize), Failure> {
    let mut pages = Vec::new();
    for path in files_below(book)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "html")) {
        pages.push((inside(book, &path), read(&path)?));
    }
    let files: Vec<String> = files_below(book)?.iter().map(|path| inside(book, path)).collect();
    let (links, broken) = html::broken(&pages, &files);
    let failed = |problem: String| Err(Failure::Content { path: book.to_owned(), problem });
    match (pages.len(), links) {
        (0, _) => failed("has no HTML page, so nothing was checked".to_owned()),
        (count, 0) => failed(format!("has {count} pages without a link, so nothing was checked")),
        _ if !broken.is_empty() => failed(broken.join("\n")),
        (count, links) => Ok((count, links)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_book_without_pages_or_links_is_a_failure() {
        let book = target_folder().unwrap().join(format!("book-of-nothing-{}", std::process::id()));
        fs::create_dir_all(&book).unwrap();
        let problem = || check(&book).unwrap_err().to_string();
        fs::write(book.join("style.css"), "").unwrap();
        assert!(problem().contains("no HTML page"), "{}", problem());
        fs::write(book.join("index.html"), "<p>text</p>").unwrap();
        assert!(problem().contains("1 pages without a link"), "{}", problem());
        fs::write(book.join("index.html"), r#"<a href="none.html"></a>"#).unwrap();
        assert!(problem().contains("there is no none.html"), "{}", problem());
        fs::write(book.join("index.html"), r#"<a href="index.html"></a>"#).unwrap();
        assert_eq!(check(&book).unwrap(), (1, 1));
        fs::remove_dir_all(&book).unwrap();
    }
}
