//! What stands at the top of a file, and in a crate's manifest.

/// A root forbids unsafe code, or allows it where the table of unsafe roots says so.
pub(crate) fn unsafe_attribute(path: &str, text: &str, may_be_unsafe: bool) -> Option<String> {
    let wanted = if may_be_unsafe { "#![allow(unsafe_code)]" } else { "#![forbid(unsafe_code)]" };
    let says_it = text.lines().any(|line| line.trim() == wanted);
    (!says_it).then(|| format!("{path}: a line of its own must say `{wanted}`"))
}

/// The manifest takes the workspace's lint table.
pub(crate) fn inherited_lints(path: &str, manifest: &str) -> Option<String> {
    let mut section = "";
    for line in manifest.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        if line.starts_with('[') {
            section = line;
        }
        let squeezed: String = line.split_whitespace().collect();
        if section == "[lints]" && squeezed == "workspace=true" {
            return None;
        }
    }
    Some(format!("{path}: `[lints]` must say `workspace = true`"))
}

/// The first line of a Rust file is module documentation.
pub(crate) fn module_docs(path: &str, text: &str) -> Option<String> {
    let first = text.lines().next().unwrap_or_default();
    let says_something = first.strip_prefix("//!").is_some_and(|words| !words.trim().is_empty());
    (!says_something).then(|| format!("{path}:1: a file begins with `//!` and what it is for"))
}

#[test]
fn a_root_without_its_attribute_is_found() {
    let forbids = "//! Policy.\n\n#![forbid(unsafe_code)]\n";
    let allows = "//! Machines.\n\n#![allow(unsafe_code)]\n";
    assert_eq!(unsafe_attribute("lib.rs", forbids, false), None);
    assert_eq!(unsafe_attribute("lib.rs", allows, true), None);
    assert!(unsafe_attribute("lib.rs", allows, false).is_some());
    assert!(unsafe_attribute("lib.rs", forbids, true).is_some());
    assert!(unsafe_attribute("lib.rs", "// #![forbid(unsafe_code)]\n", false).is_some());
}

#[test]
fn a_manifest_with_its_own_lints_is_found() {
    assert_eq!(inherited_lints("Cargo.toml", "[package]\n[lints]\nworkspace = true # all\n"), None);
    for wrong in [
        "[package]\nname = \"x\"\n",
        "[lints.rust]\nunsafe_code = \"allow\"\n",
        "[lints]\n# workspace = true\n",
        "[lints]\n[dependencies.serde]\nworkspace = true\n",
    ] {
        assert!(inherited_lints("Cargo.toml", wrong).is_some(), "{wrong}");
    }
}

#[test]
fn a_file_without_docs_is_found() {
    assert_eq!(module_docs("a.rs", "//! Granules.\n"), None);
    for wrong in ["", "//!\n", "// Granules.\n", "\n//! Granules.\n", "use std::fs;\n//! Granules.\n"] {
        assert!(module_docs("a.rs", wrong).is_some(), "{wrong:?}");
    }
}
