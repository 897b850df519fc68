//! The arrows inside crates: which module uses which.
//!
//! In each folder of the table the modules, files and folders alike, use each other in one direction: there is no circle,
//! neither between them nor inside of the folders among them. And what changes is private: no field of a type that has a
//! lock, an atomic or a method that changes it can be seen outside of its file. Folders that are held in this way need no
//! limit on how long a file may be. Where a folder has layers, each uses its own and those below it.
//!
//! An arrow is a path to another module, in a `use` or anywhere else, macros included. What a module only re-exports it
//! does not use; who uses what is re-exported uses where it comes from. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Fields, ImplItem, Item, ItemImpl, ItemMod, ItemStruct, ItemUse, UseTree, Visibility};

use crate::held::{HELD, LAYERS, OPEN};

/// One test for both, since reading the folders is most of the work.
#[test]
fn modules_use_each_other_in_one_direction_and_what_changes_is_private() {
    let held: Vec<(&str, Module)> =
        HELD.iter().map(|folder| (*folder, Module::read(&root().join(folder)))).collect();
    let circles = |(folder, module): &(&str, Module)| {
        let circles = module.circles_at(&mut place(folder));
        circles.into_iter().map(|circle| format!("{folder}: {circle}")).collect::<Vec<_>>()
    };
    let mut problems: Vec<String> = held.iter().flat_map(circles).collect();
    problems.extend(opened(&held));
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn layers_use_what_is_below_them() {
    let up = |(folder, layers): &(&str, &[&[&str]])| {
        let up = Module::read(&root().join(folder)).not_down(&mut place(folder), layers);
        up.into_iter().map(|up| format!("{folder}: {up}")).collect::<Vec<_>>()
    };
    let problems: Vec<String> = LAYERS.iter().flat_map(up).collect();
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

/// What changes and can be seen outside of its file, but for `OPEN`, and what needs no exception any more.
fn opened(held: &[(&str, Module)]) -> Vec<String> {
    let open = held.iter().flat_map(|(folder, module)| {
        let crate_folder = folder.split_once("/src").map_or(*folder, |(crate_folder, _)| crate_folder);
        module.open_state().into_iter().map(move |(module, name)| (crate_folder, module, name))
    });
    let (known, new): (Vec<_>, Vec<_>) =
        open.partition(|(folder, _, name)| OPEN.contains(&(*folder, name.as_str())));
    let told = |(folder, module, name): &(&str, String, String)| {
        format!("{folder}: {module}: `{name}` changes, and not all its fields are private")
    };
    let mut problems: Vec<String> = new.iter().map(told).collect();
    let is_left =
        |(folder, name): &(&str, &str)| known.iter().any(|known| (known.0, &*known.2) == (*folder, *name));
    let closed = OPEN.iter().filter(|open| !is_left(open));
    problems
        .extend(closed.map(|(folder, name)| format!("{folder}: `{name}` is closed; take it out of OPEN")));
    problems
}

/// Where a folder is in its crate.
fn place(folder: &str) -> Vec<String> {
    let (_, below) = folder.split_once("/src").expect("sources lie in `src`");
    below.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// As cargo says now: checkouts that share a target folder share this test's program.
fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&own).parent().expect("xtask lies in the workspace").to_owned()
}

/// A module: its own items, and the modules below it that have files of their own.
#[derive(Default)]
struct Module {
    name: String,
    file: Option<syn::File>,
    below: BTreeMap<String, Module>,
}

impl Module {
    /// The modules of a folder. Its own file is `lib.rs`, `main.rs` or `mod.rs` in it, or the one beside it.
    fn read(folder: &Path) -> Self {
        let name = folder.file_name().expect("a folder has a name").to_string_lossy().into_owned();
        let mut module = Self { name, ..Self::default() };
        let beside = folder.with_extension("rs");
        if beside.is_file() {
            module.file = Some(parse(&beside));
        }
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for entry in entries {
            let path = entry.expect("folders of the workspace can be read").path();
            let stem = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
            if path.is_dir() {
                module.below.insert(stem, Self::read(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                match &*stem {
                    "lib" | "main" | "mod" => module.file = Some(parse(&path)),
                    _ if path.with_extension("").is_dir() => {} // Read with its folder.
                    _ => {
                        let file = Some(parse(&path));
                        module.below.insert(stem.clone(), Self { name: stem, file, below: BTreeMap::new() });
                    }
                }
            }
        }
        let declared = module.declared();
        // What is only included, as data or for tests, is no module.
        module.below.retain(|name, _| declared.contains(name));
        module
    }

    /// A folder of these files.
    fn of(files: &[(&str, &str)]) -> Self {
        let mut module = Self { name: "top".into(), ..Self::default() };
        for (path, text) in files {
            let file = Some(syn::parse_file(text).expect("the text is Rust"));
            let mut at = &mut module;
            for part in path.split('/').filter(|part| *part != "mod") {
                at = at.below.entry(part.to_owned()).or_default();
                at.name = part.to_owned();
            }
            at.file = file;
        }
        module
    }

    fn items(&self) -> impl Iterator<Item = &Item> {
        self.file.iter().flat_map(|file| &file.items)
    }

    /// The modules that it declares and that are not for tests.
    fn declared(&self) -> BTreeSet<String> {
        let modules = self.items().filter_map(|item| match item {
            Item::Mod(item) if !is_for_tests(&item.attrs) => Some(item.ident.to_string()),
            _ => None,
        });
        modules.collect()
    }

    /// Where names that it re-exports come from, among the modules below it.
    fn reexports(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        for item in self.items() {
            let Item::Use(item) = item else { continue };
            for path in paths(&item.tree) {
                let path: Vec<&String> = path.iter().filter(|part| *part != "self").collect();
                if let [module, .., name] = &path[..]
                    && self.below.contains_key(*module)
                {
                    names.insert((*name).clone(), (*module).clone());
                }
            }
        }
        names
    }

    /// The circles between its modules, and inside of them. It is `at` this place of its crate.
    fn circles_at(&self, at: &mut Vec<String>) -> Vec<String> {
        let arrows = self.arrows_at(at);
        let folder = if at.is_empty() { self.name.clone() } else { at.join("/") };
        let mut problems: Vec<String> =
            circle(&arrows).map(|circle| format!("{folder}: {}", circle.join(" → "))).into_iter().collect();
        for (name, module) in &self.below {
            at.push(name.clone());
            problems.extend(module.circles_at(at));
            at.pop();
        }
        problems
    }

    /// The arrows that do not lead down these layers, and the modules that are in none of them.
    fn not_down(&self, at: &mut Vec<String>, layers: &[&[&str]]) -> Vec<String> {
        let layer = |name: &str| layers.iter().position(|modules| modules.contains(&name));
        let homeless = self.below.keys().filter(|name| layer(name).is_none());
        let mut problems: Vec<String> = homeless.map(|name| format!("`{name}` is in no layer")).collect();
        for (from, used) in self.arrows_at(at) {
            let is_up = |to: &&String| layer(to) < layer(&from);
            problems.extend(used.iter().filter(is_up).map(|to| format!("{from} → {to} leads up")));
        }
        problems
    }

    /// Which of its modules uses which. It is `at` this place of its crate.
    fn arrows_at(&self, at: &mut Vec<String>) -> BTreeMap<String, BTreeSet<String>> {
        let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let (reexports, here) = (self.reexports(), at.clone());
        let target = |path: &[String]| {
            let path = path.strip_prefix(&here[..])?;
            let first = path.first()?;
            let below = self.below.contains_key(first).then_some(first).or_else(|| reexports.get(first));
            Some(below.cloned().unwrap_or_else(|| OWN.to_owned()))
        };
        let mut add = |from: &str, used: Vec<Vec<String>>| {
            let to = used.iter().filter_map(|path| target(path)).filter(|to| to != from);
            arrows.entry(from.to_owned()).or_default().extend(to);
        };
        add(OWN, Uses::of(self, at, false));
        for (name, module) in &self.below {
            at.push(name.clone());
            let used = module.all_uses(at);
            at.pop();
            add(name, used);
        }
        arrows
    }

    /// What it and all below it use.
    fn all_uses(&self, at: &mut Vec<String>) -> Vec<Vec<String>> {
        let mut used = Uses::of(self, at, true);
        for (name, module) in &self.below {
            at.push(name.clone());
            used.extend(module.all_uses(at));
            at.pop();
        }
        used
    }

    /// Types whose state can be changed and seen from other files, after their modules.
    fn open_state(&self) -> Vec<(String, String)> {
        let impls = self.items().filter_map(|item| match item {
            Item::Impl(item) => Some(item),
            _ => None,
        });
        let changed: BTreeSet<String> = impls.filter(|item| changes(item)).filter_map(subject).collect();
        let structs = self.items().filter_map(|item| match item {
            Item::Struct(item) => Some(item),
            _ => None,
        });
        let mut problems: Vec<(String, String)> = structs
            .filter(|item| changed.contains(&item.ident.to_string()) || has_lock(item))
            .filter(|item| is_visible(&item.fields))
            .map(|item| (self.name.clone(), item.ident.to_string()))
            .collect();
        problems.extend(self.below.values().flat_map(Self::open_state));
        problems
    }
}

/// A module's own file, among the modules below it.
const OWN: &str = "mod";

fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_test = |meta: &syn::MetaList| meta.tokens.to_string() == "test";
        attribute.path().is_ident("cfg") && attribute.meta.require_list().is_ok_and(is_test)
    })
}

/// The paths that a `use` names, each part a name.
fn paths(tree: &UseTree) -> Vec<Vec<String>> {
    match tree {
        UseTree::Path(path) => {
            let rest = paths(&path.tree);
            let before = |mut rest: Vec<String>| {
                rest.insert(0, path.ident.to_string());
                rest
            };
            rest.into_iter().map(before).collect()
        }
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(name) => vec![vec![name.ident.to_string()]],
        UseTree::Glob(_) => vec![vec!["*".into()]],
        UseTree::Group(group) => group.items.iter().flat_map(paths).collect(),
        #[allow(unreachable_patterns)] // What later versions of the language have.
        _ => Vec::new(),
    }
}

/// Collects what a file uses, as paths from the top.
struct Uses<'a> {
    /// Where the file is, with modules inside of it.
    at: Vec<String>,
    below: &'a BTreeMap<String, Module>,
    found: Vec<Vec<String>>,
    /// Whether re-exports count.
    all: bool,
}

impl Uses<'_> {
    fn of(module: &Module, at: &[String], all: bool) -> Vec<Vec<String>> {
        let mut uses = Uses { at: at.to_vec(), below: &module.below, found: Vec::new(), all };
        if let Some(file) = &module.file {
            uses.visit_file(file);
        }
        uses.found
    }

    /// Notes a path that leads to a module of the folder.
    fn add(&mut self, path: &[String]) {
        let mut at = self.at.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => {
                at.clear();
                rest = &path[1..];
            }
            Some("self") => rest = &path[1..],
            Some("super") => {
                while let Some((first, others)) = rest.split_first()
                    && first == "super"
                {
                    if at.pop().is_none() {
                        return; // Above the top.
                    }
                    rest = others;
                }
            }
            Some(first) if self.below.contains_key(first) => {}
            _ => return,
        }
        self.found.push([at, rest.to_vec()].concat());
    }

    /// Paths in what a macro is given.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) if !path.is_empty() && colons == 2 => path.push(name.to_string()),
                TokenTree::Ident(name) => {
                    self.add(&std::mem::replace(&mut path, vec![name.to_string()]));
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.add(&std::mem::take(&mut path));
                    self.scan(group.stream());
                }
                _ => self.add(&std::mem::take(&mut path)),
            }
            colons = 0;
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if is_for_tests(&item.attrs) || item.content.is_none() {
            return;
        }
        self.at.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.at.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_reexport = !matches!(item.vis, Visibility::Inherited);
        if !is_for_tests(&item.attrs) && (self.all || !is_reexport) {
            paths(&item.tree).iter().for_each(|path| self.add(path));
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {
        // `pub(in path)` is no use of it.
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if parts.len() > 1 {
            self.add(&parts);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        visit::visit_macro(self, item);
        self.scan(item.tokens.clone());
    }
}

/// A circle, its first member again at its end.
fn circle(arrows: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn walk<'a>(
        at: &'a String,
        arrows: &'a BTreeMap<String, BTreeSet<String>>,
        way: &mut Vec<&'a String>,
        done: &mut BTreeSet<&'a String>,
    ) -> Option<Vec<String>> {
        if let Some(first) = way.iter().position(|before| *before == at) {
            return Some(way[first..].iter().chain([&at]).map(|name| (*name).clone()).collect());
        }
        if !done.insert(at) {
            return None;
        }
        way.push(at);
        let found = arrows.get(at).into_iter().flatten().find_map(|next| walk(next, arrows, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    arrows.keys().find_map(|from| walk(from, arrows, &mut Vec::new(), &mut done))
}

/// Whether an `impl` of a type's own has a method that changes it.
fn changes(item: &ItemImpl) -> bool {
    item.trait_.is_none()
        && item.items.iter().any(|item| match item {
            ImplItem::Fn(method) => method
                .sig
                .receiver()
                .is_some_and(|receiver| receiver.reference.is_some() && receiver.mutability.is_some()),
            _ => false,
        })
}

/// The name of the type that an `impl` is of.
fn subject(item: &ItemImpl) -> Option<String> {
    match &*item.self_ty {
        syn::Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
        _ => None,
    }
}

/// Whether a field is a lock, an atomic or a cell.
fn has_lock(item: &ItemStruct) -> bool {
    struct Locks(bool);
    impl<'ast> Visit<'ast> for Locks {
        fn visit_path_segment(&mut self, part: &'ast syn::PathSegment) {
            let name = part.ident.to_string();
            let locks =
                ["Mutex", "RwLock", "Condvar", "Cell", "RefCell", "UnsafeCell", "OnceCell", "OnceLock"];
            self.0 |= locks.contains(&&*name) || name.starts_with("Atomic");
            visit::visit_path_segment(self, part);
        }
    }
    let mut locks = Locks(false);
    locks.visit_fields(&item.fields);
    locks.0
}

fn is_visible(fields: &Fields) -> bool {
    fields.iter().any(|field| !matches!(field.vis, Visibility::Inherited))
}

mod the_checker {
    use super::*;

    #[test]
    fn finds_circles_wherever_the_arrows_are() {
        for arrow in [
            "use super::b::B;",
            "use crate::b::{self};",
            "fn f() { super::b::f() }",
            "fn f() { println!(\"{}\", super::b::f()) }",
            "mod inner { use super::super::b::B; }",
            "use super::B;",
        ] {
            let files = [("mod", "mod a; mod b; pub use b::B;"), ("a", arrow), ("b", "use super::a::A;")];
            assert_eq!(Module::of(&files).circles_at(&mut Vec::new()), ["top: a → b → a"], "{arrow}");
        }
        let inside =
            [("mod", "mod a;"), ("a/mod", "mod b; use self::b::B; pub struct A;"), ("a/b", "use super::A;")];
        assert_eq!(Module::of(&inside).circles_at(&mut Vec::new()), ["a: b → mod → b"]);
        let folders = [
            ("a/mod", ""),
            ("a/x", "use super::super::b::y::Y;"),
            ("b/mod", ""),
            ("b/y", "use crate::a::A;"),
        ];
        assert_eq!(Module::of(&folders).circles_at(&mut Vec::new()), ["top: a → b → a"]);
        let long = [("a", "use super::b::B;"), ("b", "use super::c::C;"), ("c", "use super::a::A;")];
        assert_eq!(Module::of(&long).circles_at(&mut Vec::new()), ["top: a → b → c → a"]);
    }

    #[test]
    fn finds_arrows_that_lead_up_and_modules_in_no_layer() {
        let files = [
            ("mod", "mod a; mod b; mod c; use self::a::A;"),
            ("a", "use super::b::B;"),
            ("b", ""),
            ("c", ""),
        ];
        let up = |layers: &[&[&str]]| Module::of(&files).not_down(&mut Vec::new(), layers);
        assert_eq!(up(&[&["mod"], &["a", "c"], &["b"]]), [""; 0]);
        assert_eq!(up(&[&["mod"], &["b", "c"], &["a"]]), ["a → b leads up"]);
        assert_eq!(up(&[&["mod"], &["a"], &["b"]]), ["`c` is in no layer"]);
    }

    #[test]
    fn lets_one_direction_reexports_and_tests_pass() {
        let files = [
            ("mod", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("a", "use super::b::B; use std::fmt; /// See [`super::b`]."),
            ("b", "#[cfg(test)] mod tests { use super::super::a::A; } pub struct B;"),
        ];
        let files = files.map(|(path, text)| (path, text.replace("/// See [`super::b`].", "")));
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, &**text)).collect();
        assert_eq!(Module::of(&files).circles_at(&mut Vec::new()), Vec::<String>::new());
    }

    #[test]
    fn finds_state_that_is_open() {
        let found = |text| Module::of(&[("a", text)]).open_state().len();
        for text in [
            "struct A { pub(super) n: u8 } impl A { fn f(&mut self) {} }",
            "struct A { n: u8, pub m: u8 } impl A { fn f(&self) {} } impl A { fn g(&mut self) {} }",
            "struct A { pub(crate) n: std::sync::Arc<Mutex<u8>> }",
            "struct A(pub(super) AtomicU64);",
        ] {
            assert_eq!(found(text), 1, "{text}");
        }
        for text in [
            "struct A { n: Mutex<u8> } impl A { fn f(&mut self) {} }",
            "pub struct A { pub n: u8 } impl A { fn f(mut self) -> Self { self } fn g(&self) {} }",
            "pub struct A { pub n: u8 } impl Iterator for A { fn next(&mut self) {} }",
        ] {
            assert_eq!(found(text), 0, "{text}");
        }
    }

    #[test]
    fn reads_the_workspace() {
        let driver = Module::read(&root().join("crates/driver/src"));
        assert!(
            driver.below["cuda"].below.contains_key("state")
                && driver.below["host"].below.contains_key("state")
        );
        let uses = driver.all_uses(&mut Vec::new());
        assert!(uses.contains(&["cuda", "vm", "Vm"].map(str::to_owned).to_vec()), "{uses:?}");
    }
}
