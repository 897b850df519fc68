//! Public modules of one crate that a reader could take for each other: `hibernate` and `hibernation`.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Item, UseTree, Visibility};

/// Endings that make another form of the same word, the longest first.
const ENDINGS: &[&str] =
    &["ations", "ation", "ating", "ates", "ated", "ate", "ings", "ing", "ers", "er", "ed", "es", "s", "e"];

/// What is left of a word is long enough to tell it from others.
const STEM_LETTERS_MIN: usize = 4;

/// The public modules of a crate's root with one stem: those that it has, and those that it lends.
pub(crate) fn alike(path: &str, text: &str) -> Vec<String> {
    let file = match syn::parse_file(text) {
        Ok(file) => file,
        Err(error) => return vec![format!("{path}: it is not read as Rust: {error}")],
    };
    let mut stems: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let names: Vec<String> = file.items.iter().flat_map(modules).collect();
    for name in &names {
        stems.entry(stem(name)).or_default().insert(name);
    }
    let alike = stems.into_values().filter(|names| names.len() > 1);
    alike.map(|names| format!("{path}: public modules with one stem: {names:?}")).collect()
}

fn modules(item: &Item) -> Vec<String> {
    match item {
        Item::Mod(item) if matches!(item.vis, Visibility::Public(_)) => vec![item.ident.to_string()],
        Item::Use(item) if matches!(item.vis, Visibility::Public(_)) => lent(&item.tree),
        _ => Vec::new(),
    }
}

/// Names that begin with a small letter: modules, and functions, which count as well.
fn lent(tree: &UseTree) -> Vec<String> {
    let names = match tree {
        UseTree::Path(path) => lent(&path.tree),
        UseTree::Name(name) => vec![name.ident.to_string()],
        UseTree::Rename(name) => vec![name.rename.to_string()],
        UseTree::Group(group) => group.items.iter().flat_map(lent).collect(),
        UseTree::Glob(_) => Vec::new(),
        #[allow(unreachable_patterns)] // What later versions of the language have.
        _ => Vec::new(),
    };
    names.into_iter().filter(|name| name.starts_with(|letter: char| letter.is_ascii_lowercase())).collect()
}

fn stem(name: &str) -> &str {
    let stems = ENDINGS.iter().filter_map(|ending| name.strip_suffix(ending));
    stems.into_iter().find(|stem| stem.len() >= STEM_LETTERS_MIN).unwrap_or(name)
}

#[test]
fn modules_that_look_alike_are_found() {
    for text in [
        "pub mod hibernate; pub use core::{budget, hibernation};",
        "pub mod budget; pub mod budgets;",
        "pub use a::sleep; pub mod sleeping { }",
    ] {
        assert_eq!(alike("lib.rs", text).len(), 1, "{text}");
    }
    for text in [
        "mod hibernate; pub mod hibernation;",
        "pub mod host; pub mod disk; pub use a::Host;",
        "pub use core::{Budget, budget, pool, tag};",
        "pub mod tag; pub mod tree;",
    ] {
        assert_eq!(alike("lib.rs", text), [""; 0], "{text}");
    }
}
