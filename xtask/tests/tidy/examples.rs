//! Every type that a user can name has an example, which documentation tests run.
//!
//! Types that a macro makes are not seen.

use syn::visit::{self, Visit};

/// Sources of the crates whose types users name: the library with all that it exports, and the estimates of kernels.
pub(crate) const OF_USERS: [&str; 3] = ["crates/core/src/", "crates/poorwill/src/", "crates/triton/src/"];

/// Public types without an example.
#[derive(Default)]
struct Bare(Vec<String>);

impl Bare {
    fn look_at(&mut self, ident: &syn::Ident, visibility: &syn::Visibility, attributes: &[syn::Attribute]) {
        let is_public = matches!(visibility, syn::Visibility::Public(_));
        if is_public && !attributes.iter().any(is_hidden) && !has_example(attributes) {
            self.0.push(ident.to_string());
        }
    }
}

fn is_hidden(attribute: &syn::Attribute) -> bool {
    let is_hidden = |meta: syn::meta::ParseNestedMeta<'_>| match meta.path.is_ident("hidden") {
        true => Ok(()),
        false => Err(meta.error("something else")),
    };
    attribute.path().is_ident("doc") && attribute.parse_nested_meta(is_hidden).is_ok()
}

/// A fence with another word, as for a picture in text, begins no example.
fn has_example(attributes: &[syn::Attribute]) -> bool {
    let fences = attributes.iter().filter_map(doc).map(|line| line.trim().to_owned());
    fences
        .filter(|line| line.starts_with("```"))
        .step_by(2)
        .any(|fence| ["```", "```no_run"].contains(&&*fence))
}

/// A line of documentation.
fn doc(attribute: &syn::Attribute) -> Option<String> {
    let syn::Meta::NameValue(meta) = &attribute.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &meta.value else { return None };
    meta.path.is_ident("doc").then(|| text.value())
}

impl Visit<'_> for Bare {
    fn visit_item_struct(&mut self, item: &syn::ItemStruct) {
        self.look_at(&item.ident, &item.vis, &item.attrs);
    }

    fn visit_item_enum(&mut self, item: &syn::ItemEnum) {
        self.look_at(&item.ident, &item.vis, &item.attrs);
    }

    fn visit_item_trait(&mut self, item: &syn::ItemTrait) {
        self.look_at(&item.ident, &item.vis, &item.attrs);
    }

    /// Types of tests are no user's.
    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, _: &syn::ItemFn) {}
}

/// The public types of a file that have no example.
pub(crate) fn missing(path: &str, text: &str) -> Vec<String> {
    let file = match syn::parse_file(text) {
        Ok(file) => file,
        Err(error) => return vec![format!("{path}: it is not read as Rust: {error}")],
    };
    let mut bare = Bare::default();
    bare.visit_file(&file);
    bare.0.iter().map(|name| format!("{path}: `{name}` is public and has no example")).collect()
}

#[test]
fn public_types_without_an_example_are_found() {
    let example = "/// A.\n///\n/// ```\n/// f();\n/// ```\n";
    for (item, is_found) in [
        ("/// A.\n#[derive(Debug)]\npub struct A;", true),
        ("pub trait A {}", true),
        ("mod inner {\n    pub enum A {}\n}", true),
        ("/// ```text\n/// a\n/// ```\npub struct A;", true),
        ("pub(crate) struct A;", false),
        ("struct A;", false),
        ("/// A.\n#[doc(hidden)]\npub struct A;", false),
        ("mod tests {\n    pub struct A;\n}", false),
        ("fn f() {\n    pub struct A;\n}", false),
        (&format!("{example}pub struct A;"), false),
        (&format!("{}pub enum A {{}}", example.replace("```\n/// f", "```no_run\n/// f")), false),
    ] {
        assert_eq!(missing("a.rs", item).len(), usize::from(is_found), "{item}");
    }
    assert_eq!(missing("a.rs", "pub struct A;"), ["a.rs: `A` is public and has no example"]);
    assert_eq!(missing("a.rs", "pub struct {").len(), 1);
}
