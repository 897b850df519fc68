//! Whether the links of HTML pages lead anywhere.

use std::collections::{HashMap, HashSet};

/// How many links there are from `pages` to each other and to `files`, and those that lead nowhere. Paths are from the
/// book's folder.
pub(super) fn broken(pages: &[(String, String)], files: &[String]) -> (usize, Vec<String>) {
    let ids: HashMap<&str, HashSet<&str>> =
        pages.iter().map(|(path, html)| (path.as_str(), values(html, " id=\"").collect())).collect();
    let files: HashSet<&str> = files.iter().map(String::as_str).collect();
    let (mut count, mut problems) = (0, Vec::new());
    // Its links are made for pages that the server does not know, from the server's root; print joins all pages into one.
    let own = pages.iter().filter(|(path, _)| path != "404.html" && path != "print.html");
    for (path, html) in own {
        let links = values(html, " href=\"").chain(values(html, " src=\""));
        for link in links.filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            count += 1;
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let to = if file.is_empty() { Some(path.clone()) } else { resolved(path, file) };
            let problem = match to {
                None => Some("it leaves the book".to_owned()),
                Some(to) if !files.contains(to.as_str()) => Some(format!("there is no {to}")),
                Some(to) if !fragment.is_empty() => {
                    let is_there = ids.get(to.as_str()).is_some_and(|ids| ids.contains(fragment));
                    (!is_there).then(|| format!("nothing in {to} is named `{fragment}`"))
                }
                Some(_) => None,
            };
            problems.extend(problem.map(|problem| format!("{path}: link to `{link}`: {problem}")));
        }
    }
    problems.sort();
    problems.dedup();
    (count, problems)
}

/// The values of an attribute, which is given with the space before it and the quote after it.
fn values<'h>(html: &'h str, attribute: &'static str) -> impl Iterator<Item = &'h str> {
    html.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
}

fn resolved(page: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('?').next().unwrap_or_default().split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_fragments_are_followed() {
        let page = |path: &str, html: &str| (path.to_owned(), html.to_owned());
        let pages = [
            page(
                "a.html",
                r##"<h1 id="top"></h1><a href="x/b.html#there"></a><a href="#top"></a><img src="p.svg">
                   <a href="https://example.org/#no"></a>"##,
            ),
            page(
                "x/b.html",
                r##"<h1 id="there"></h1><a href="../a.html#none"></a><a href="c.html"></a><a href="../../a.html"></a>"##,
            ),
            page("404.html", r#"<a href="/nowhere.html"></a>"#),
        ];
        let files = ["a.html", "x/b.html", "p.svg", "404.html"].map(str::to_owned);
        let (links, problems) = broken(&pages, &files);
        assert_eq!(links, 6);
        assert_eq!(
            problems,
            [
                "x/b.html: link to `../../a.html`: it leaves the book",
                "x/b.html: link to `../a.html#none`: nothing in a.html is named `none`",
                "x/b.html: link to `c.html`: there is no x/c.html",
            ]
        );
    }
}
