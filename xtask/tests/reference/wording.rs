//! Words of the page of JSON.

pub(super) fn may_be_absent(kind: &str) -> String {
    format!("{}; may be absent", kind.trim_end_matches("; may be absent"))
}

/// Numbers in it are of this unit, and those of an object that it links to.
pub(super) fn with_unit(kind: &str, unit: &str) -> String {
    let number = ["integer", "number", ")"].into_iter().find_map(|end| Some(kind.find(end)? + end.len()));
    let Some(end) = number else { return kind.to_owned() };
    format!("{} ({unit}){}", &kind[..end], &kind[end..])
}

/// As names end.
pub(super) fn unit(name: &str) -> Option<&'static str> {
    let ends = [
        ("bytes_per_s", "bytes/s"),
        ("gib_per_s", "GiB/s"),
        ("bytes", "bytes"),
        ("seconds", "s"),
        ("_ms", "ms"),
        ("_s", "s"),
    ];
    let is_unit = |end: &str| name.ends_with(end) || end == "bytes" && name.contains("_bytes_");
    ends.iter().find(|(end, _)| is_unit(end)).map(|(_, unit)| *unit)
}

pub(super) fn cased(name: &str, case: Option<&str>) -> String {
    match case {
        Some("snake_case") => {
            let words = name.char_indices().map(|(at, letter)| match letter.is_ascii_uppercase() {
                true if at > 0 => format!("_{}", letter.to_ascii_lowercase()),
                _ => letter.to_ascii_lowercase().to_string(),
            });
            words.collect()
        }
        Some("lowercase") => name.to_ascii_lowercase(),
        None => name.to_owned(),
        Some(other) => panic!("{other} is not known here"),
    }
}

pub(super) fn anchor(title: &str) -> String {
    title.to_ascii_lowercase().replace(' ', "-")
}

/// The words of links to the sources, and the last names of those that are names.
pub(super) fn unlinked(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let Some((words, after)) = after.split_once(']') else { break };
        let name = words.strip_prefix('`').and_then(|words| words.strip_suffix('`'));
        let path = after.strip_prefix('(').and_then(|after| after.split_once(')'));
        rest = path.map_or(after, |(_, after)| after);
        plain += before;
        plain += &match (name, path) {
            (Some(name), _) => format!("`{}`", name.rsplit("::").next().unwrap_or(name)),
            (None, Some((path, _))) if is_of_sources(path) => words.to_owned(),
            (None, Some((path, _))) => format!("[{words}]({path})"),
            (None, None) => format!("[{words}]"),
        };
    }
    plain + rest
}

fn is_of_sources(path: &str) -> bool {
    path.contains("::") || path.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

#[test]
fn names_units_and_links_are_read() {
    assert_eq!(cased("DoesNotFit", Some("snake_case")), "does_not_fit");
    assert_eq!(unit("link_gib_per_s"), Some("GiB/s"));
    assert_eq!([unit("host_bytes_used"), unit("rounds")], [Some("bytes"), None]);
    assert_eq!(with_unit("list of integer or null", "bytes"), "list of integer (bytes) or null");
    assert_eq!(with_unit("[Spread](#spread)", "s"), "[Spread](#spread) (s)");
    assert_eq!(with_unit("text", "s"), "text");
    assert_eq!(unlinked("As [`Self::wake_s`], or [`x`](super::X)."), "As `wake_s`, or `x`.");
    assert_eq!(unlinked("[Some](crate::A::B) of [that](Word) [1]."), "Some of that [1].");
    assert_eq!(unlinked("A [page](commands.md#a), [open"), "A [page](commands.md#a), [open");
}
