//! One meaning for each type name in a crate, and none that could mean anything.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

/// Names that modules of one crate share by custom: each module's own result.
const BY_CUSTOM: &[&str] = &["Result"];

/// Which crate, which name, and why both are right.
const EXCEPTIONS: &[(&str, &str, &str)] = &[];

/// Too common for a name alone.
const BARE: [&str; 6] = ["Target", "Outcome", "State", "Kind", "Place", "Part"];

#[derive(Default)]
struct Types(Vec<String>);

impl Visit<'_> for Types {
    fn visit_item_struct(&mut self, item: &syn::ItemStruct) {
        self.0.push(item.ident.to_string());
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &syn::ItemEnum) {
        self.0.push(item.ident.to_string());
        visit::visit_item_enum(self, item);
    }

    fn visit_item_union(&mut self, item: &syn::ItemUnion) {
        self.0.push(item.ident.to_string());
        visit::visit_item_union(self, item);
    }

    fn visit_item_trait(&mut self, item: &syn::ItemTrait) {
        self.0.push(item.ident.to_string());
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &syn::ItemType) {
        self.0.push(item.ident.to_string());
        visit::visit_item_type(self, item);
    }

    /// Types of tests and of functions are seen there only.
    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, _: &syn::ItemFn) {}

    fn visit_impl_item_fn(&mut self, _: &syn::ImplItemFn) {}
}

/// The names that more than one type of the crate at `folder` has, those whose whole is a word that any crate could have,
/// and the files that cannot be parsed.
pub(crate) fn unclear<'f>(folder: &str, files: impl IntoIterator<Item = (&'f str, &'f str)>) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut problems = Vec::new();
    for (path, text) in files {
        let file = match syn::parse_file(text) {
            Ok(file) => file,
            Err(error) => {
                problems.push(format!("{path}: it is not read as Rust: {error}"));
                continue;
            }
        };
        let mut types = Types::default();
        types.visit_file(&file);
        for name in types.0 {
            if BARE.contains(&name.as_str()) {
                problems.push(format!("{path}: `{name}` does not say of what: give it a second word"));
            }
            places.entry(name).or_default().push(path);
        }
    }
    let is_allowed = |name: &str| {
        BY_CUSTOM.contains(&name) || EXCEPTIONS.iter().any(|(krate, of, _)| *krate == folder && *of == name)
    };
    let shared = places.into_iter().filter(|(name, paths)| paths.len() > 1 && !is_allowed(name));
    problems.extend(
        shared.map(|(name, paths)| {
            format!("{folder}: `{name}` is {} types: {}", paths.len(), paths.join(", "))
        }),
    );
    problems
}

#[test]
fn a_bare_name_is_found_and_an_associated_type_is_none() {
    for text in
        ["struct State;", "mod a { pub enum Kind {} }", "type Outcome<T> = Option<T>;", "trait Part {}"]
    {
        assert_eq!(unclear("crates/x", [("a.rs", text)]).len(), 1, "{text}");
    }
    let associated = "impl Deref for A { type Target = u8; } struct PoolState; mod tests { struct State; }";
    assert_eq!(unclear("crates/x", [("a.rs", associated)]), [""; 0]);
}

#[test]
fn a_file_that_is_no_rust_is_found() {
    let problems =
        unclear("crates/x", [("a.rs", "struct A;"), ("b.rs", "struct B;\nstruct {"), ("c.rs", "")]);
    assert!(matches!(&problems[..], [problem] if problem.starts_with("b.rs: ")), "{problems:?}");
}

#[test]
fn two_types_of_one_name_are_found() {
    let one = "struct Plan; enum Way { A } type Short = u8; fn f() { struct Inner; }";
    let two = "trait Plan {} union Way { a: u8 } mod tests { struct Short; } fn g() { struct Inner; } struct Result;";
    let problems =
        unclear("crates/x", [("a.rs", one), ("b.rs", two), ("c.rs", "type Result<T> = Option<T>;")]);
    assert_eq!(
        problems,
        ["crates/x: `Plan` is 2 types: a.rs, b.rs", "crates/x: `Way` is 2 types: a.rs, b.rs"]
    );
}

#[test]
fn exceptions_have_reasons() {
    assert!(EXCEPTIONS.iter().all(|(_, _, why)| why.split_whitespace().count() > 2));
}
