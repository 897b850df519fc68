//! Links from a Markdown page to files of the repository.
//!
//! Inline links and images, reference definitions, and the `src` and `href` of HTML. Whether a
//! fragment names a heading is not looked at, and neither are links to other places.

/// The links of the page at `path` that lead to none of `files`.
pub(crate) fn broken(path: &str, page: &str, files: &[&str]) -> Vec<String> {
    let mut problems = Vec::new();
    for (number, line) in prose(page) {
        for target in targets(&line) {
            if leads_elsewhere(target) {
                continue;
            }
            let file = target.split(['#', '?']).next().unwrap_or_default();
            let problem = match resolved(path, file) {
                Some(resolved) if is_there(&resolved, files) => continue,
                Some(resolved) => format!("there is no {resolved}"),
                None => "it leaves the repository".to_owned(),
            };
            problems.push(format!("{path}:{number}: link to `{target}`: {problem}"));
        }
    }
    problems
}

/// The lines outside of fenced code, numbered, with inline code taken out.
fn prose(page: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fence: Option<&str> = None;
    page.lines().enumerate().filter_map(move |(index, line)| {
        let start = line.trim_start();
        let marker = ["```", "~~~"].into_iter().find(|marker| start.starts_with(marker));
        match (fence, marker) {
            (None, Some(_)) => fence = marker,
            (Some(open), Some(close)) if open == close => fence = None,
            (None, None) => return Some((index + 1, line.split('`').step_by(2).collect())),
            _ => {}
        }
        None
    })
}

fn targets(line: &str) -> Vec<&str> {
    let mut targets = Vec::new();
    for (at, opening) in line.match_indices("](") {
        targets.push(destination(&line[at + opening.len()..]));
    }
    if let Some((label, target)) = line.trim_start().split_once("]: ")
        && label.starts_with('[')
        && !label.starts_with("[^")
    {
        targets.push(destination(target));
    }
    for attribute in ["src=\"", "href=\""] {
        for (at, opening) in line.match_indices(attribute) {
            targets.push(line[at + opening.len()..].split('"').next().unwrap_or_default());
        }
    }
    targets
}

/// The destination at the start of `rest`, without a title behind it.
fn destination(rest: &str) -> &str {
    let rest = rest.trim_start();
    if let Some(bracketed) = rest.strip_prefix('<') {
        return bracketed.split('>').next().unwrap_or_default();
    }
    let mut depth = 0_u32;
    let end = rest.find(|c: char| match c {
        '(' => {
            depth += 1;
            false
        }
        ')' if depth > 0 => {
            depth -= 1;
            false
        }
        _ => c == ')' || c.is_whitespace(),
    });
    &rest[..end.unwrap_or(rest.len())]
}

/// A fragment of the same page, or an address with a scheme. A path of the sources, as `crate::Name`, is none.
fn leads_elsewhere(target: &str) -> bool {
    let scheme = target.split_once(':').filter(|(_, rest)| !rest.starts_with(':')).map(|(scheme, _)| scheme);
    target.is_empty()
        || target.starts_with('#')
        || target.starts_with("//")
        || scheme.is_some_and(|scheme| scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)))
}

/// The path from the root for a link on the page at `page`, unless it leads out of the root.
fn resolved(page: &str, target: &str) -> Option<String> {
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let start = if target.starts_with('/') { "" } else { folder };
    let mut parts: Vec<&str> = Vec::new();
    for part in start.split('/').chain(target.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// A file, or a folder with files in it.
fn is_there(path: &str, files: &[&str]) -> bool {
    path.is_empty()
        || files
            .iter()
            .any(|file| file.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[&str] = &["README.md", "docs/design.md", "docs/adr/0001.md", "docs/demo.svg"];

    #[test]
    fn broken_links_are_found() {
        for link in [
            "[design](design.md)",
            "[a](docs/design.md) and [b](docs/none.md#x)",
            "![picture](docs/none.svg \"with a title\")",
            "[page]: docs/none.md",
            "<img src=\"docs/none.svg\" width=\"400\">",
            "[half](docs/des)",
            "[angled](<docs/no such.md>)",
            "[name](crate::Name)",
        ] {
            let problems = broken("README.md", &format!("# Title\n{link}\n"), FILES);
            assert!(
                matches!(&problems[..], [problem] if problem.starts_with("README.md:2: ") && problem.contains("there is no ")),
                "{link}: {problems:?}"
            );
        }
    }

    #[test]
    fn links_are_seen_from_their_page() {
        let page = "[up](../README.md) [down](adr/0001.md#why) [folder](adr) [root](/docs/demo.svg)";
        assert_eq!(broken("docs/design.md", page, FILES), Vec::<String>::new());
        assert_eq!(broken("README.md", page, FILES).len(), 3);
        assert!(broken("README.md", page, FILES)[0].contains("leaves the repository"));
    }

    #[test]
    fn other_places_and_code_are_left_alone() {
        let page = "[web](https://example.org/a.md) [mail](mailto:a@example.org) [here](#words)\n\
                    `[code](none.md)`\n```text\n[fenced](none.md)\n```\n~~~\n```\n[x](none.md)\n~~~\n\
                    [^1]: a footnote\n";
        assert_eq!(broken("README.md", page, FILES), Vec::<String>::new());
    }
}
