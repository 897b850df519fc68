//! What serde writes for the types of the sources.
//!
//! A type is found by its name: in the crate that it is imported from, in its user's, or in the only one that has it.

use std::collections::BTreeMap;

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, Field, Fields, Item, Lit, Meta, Token};

use super::wording::{anchor, cased, may_be_absent, unit, unlinked, with_unit};
use crate::tidy::tree::File;

/// A type that serde writes.
pub(super) struct Written {
    pub(super) krate: String,
    pub(super) name: String,
    path: String,
    item: Item,
    /// Of an enum that names its variants itself: their names.
    names: BTreeMap<String, String>,
}

/// A key of an object, or a value of a text.
pub(super) struct Row {
    /// Where its type is, and its name.
    pub(super) krate: String,
    pub(super) owner: String,
    pub(super) name: String,
    /// Empty of a value.
    pub(super) kind: String,
    pub(super) meaning: Option<String>,
}

/// The names that types give their variants, by type and variant.
type Names = BTreeMap<String, BTreeMap<String, String>>;

#[derive(Default)]
pub(super) struct Types {
    written: BTreeMap<String, Vec<Written>>,
    /// What types write that say it themselves, by crate and name.
    by_hand: BTreeMap<(String, String), &'static str>,
    /// What functions write that `serialize_with` names, by file and name.
    functions: BTreeMap<(String, String), &'static str>,
    /// The crate that a file takes a name from, by both.
    imported: BTreeMap<(String, String), String>,
}

impl Types {
    /// Those of all sources.
    pub(super) fn of(files: &[File]) -> Self {
        let mut types = Self::default();
        for file in files.iter().filter(|file| file.path.contains("/src/") && file.has_extension(&["rs"])) {
            let Some(krate) = file.path.strip_prefix("crates/").and_then(|path| path.split('/').next())
            else {
                continue;
            };
            let parsed = syn::parse_file(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
            types.add_file(krate, &file.path, parsed.items);
        }
        types
    }

    fn add_file(&mut self, krate: &str, path: &str, items: Vec<Item>) {
        let mut names = BTreeMap::new();
        for item in &items {
            match item {
                Item::Fn(item) => {
                    let writes = writes(|calls| calls.visit_item_fn(item));
                    let name = (path.to_owned(), item.sig.ident.to_string());
                    self.functions.extend(writes.map(|writes| (name, writes)));
                }
                Item::Use(item) => self.add_use(path, &item.tree),
                Item::Impl(item) => {
                    let of = (krate.to_owned(), name_of(&item.self_ty));
                    let is_serialize =
                        item.trait_.as_ref().is_some_and(|(_, path, _)| last(path) == "Serialize");
                    if item.trait_.is_none() {
                        names.entry(of.1).or_insert_with(BTreeMap::new).extend(names_of(item));
                    } else if is_serialize && let Some(writes) = writes(|calls| calls.visit_item_impl(item)) {
                        self.by_hand.insert(of, writes);
                    }
                }
                _ => {}
            }
        }
        items.into_iter().for_each(|item| self.add_type(krate, path, item, &names));
    }

    fn add_use(&mut self, path: &str, tree: &syn::UseTree) {
        if let syn::UseTree::Path(tree) = tree
            && let Some(krate) = tree.ident.to_string().strip_prefix("poorwill_")
        {
            let krate = krate.replace('_', "-");
            let names = imports(&tree.tree).into_iter();
            self.imported.extend(names.map(|name| ((path.to_owned(), name), krate.clone())));
        }
    }

    fn add_type(&mut self, krate: &str, path: &str, item: Item, names: &Names) {
        let (name, attributes, variants) = match &item {
            Item::Struct(item) => (item.ident.to_string(), &item.attrs, None),
            Item::Enum(item) => (item.ident.to_string(), &item.attrs, Some(&item.variants)),
            _ => return,
        };
        let is_derived = attributes.iter().any(derives_serialize);
        let names = names.get(&name).filter(|_| !is_derived).cloned().unwrap_or_default();
        let by_hand = (krate.to_owned(), name.clone());
        let is_named = |variants: &Punctuated<syn::Variant, _>| {
            self.by_hand.get(&by_hand) == Some(&"text")
                && variants.iter().all(|variant| names.contains_key(&variant.ident.to_string()))
        };
        if is_derived || variants.is_some_and(is_named) {
            self.by_hand.remove(&by_hand);
            let (krate, path) = (krate.to_owned(), path.to_owned());
            self.written.entry(name.clone()).or_default().push(Written { krate, name, path, item, names });
        }
    }

    /// The type of this name in a crate, or the only one.
    pub(super) fn find(&self, krate: &str, name: &str) -> Option<&Written> {
        let all = self.written.get(name)?;
        let only = || if let [only] = &all[..] { Some(only) } else { None };
        all.iter().find(|written| written.krate == krate).or_else(only)
    }

    fn find_from(&self, of: &Written, name: &str) -> Option<&Written> {
        let krate = self.imported.get(&(of.path.clone(), name.to_owned())).unwrap_or(&of.krate);
        self.find(krate, name)
    }

    /// What is in a type, and the types that it links to.
    pub(super) fn rows<'t>(&'t self, of: &'t Written, links: &mut Vec<&'t Written>) -> Vec<Row> {
        match &of.item {
            Item::Struct(item) => self.rows_of(of, &item.fields, links),
            Item::Enum(item) => self.rows_of_enum(of, item, links),
            _ => Vec::new(),
        }
    }

    /// The keys of one variant.
    pub(super) fn rows_of_variant<'t>(&'t self, of: &'t Written, variant: &str) -> Vec<Row> {
        let Item::Enum(item) = &of.item else { panic!("{} has no variants", of.name) };
        let found = item.variants.iter().find(|one| one.ident == variant);
        let found = found.unwrap_or_else(|| panic!("{} has no {variant}", of.name));
        self.rows_of(of, &found.fields, &mut Vec::new())
    }

    fn rows_of<'t>(&'t self, of: &'t Written, fields: &Fields, links: &mut Vec<&'t Written>) -> Vec<Row> {
        fields.iter().flat_map(|field| self.rows_of_field(of, field, links)).collect()
    }

    fn rows_of_field<'t>(&'t self, of: &'t Written, field: &Field, links: &mut Vec<&'t Written>) -> Vec<Row> {
        let serde = Settings::of(&field.attrs);
        if serde.has("skip") {
            return Vec::new();
        }
        if serde.has("flatten") {
            return self.rows_of_flattened(of, &field.ty, links);
        }
        let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
        let mut kind = match serde.value("serialize_with") {
            Some(function) => self.functions[&(of.path.clone(), function)].to_owned(),
            None => self.kind(of, &field.ty, links),
        };
        if serde.has("skip_serializing_if") {
            kind = may_be_absent(kind.trim_end_matches(" or null"));
        }
        if let Some(unit) = unit(&name) {
            kind = with_unit(&kind, unit);
        }
        vec![of.row(serde.value("rename").unwrap_or(name), kind, meaning(&field.attrs))]
    }

    fn rows_of_flattened<'t>(
        &'t self,
        of: &'t Written,
        ty: &syn::Type,
        links: &mut Vec<&'t Written>,
    ) -> Vec<Row> {
        let is_option = name_of(ty) == "Option";
        let inner = if is_option { arguments(ty)[0] } else { ty };
        let name = name_of(inner);
        let inner = self.find_from(of, &name).unwrap_or_else(|| panic!("{}: there is no {name}", of.path));
        let mut rows = self.rows(inner, links);
        if is_option {
            rows.iter_mut().for_each(|row| row.kind = may_be_absent(&row.kind));
        }
        rows
    }

    fn rows_of_enum<'t>(
        &'t self,
        of: &'t Written,
        item: &syn::ItemEnum,
        links: &mut Vec<&'t Written>,
    ) -> Vec<Row> {
        let serde = Settings::of(&item.attrs);
        let name = |variant: &syn::Variant| {
            let name = variant.ident.to_string();
            let by_hand = of.names.get(&name).cloned();
            by_hand.unwrap_or_else(|| cased(&name, serde.value("rename_all").as_deref()))
        };
        let values =
            item.variants.iter().map(|variant| of.row(name(variant), String::new(), meaning(&variant.attrs)));
        if item.variants.iter().all(|variant| matches!(variant.fields, Fields::Unit)) {
            return values.collect();
        }
        let (Some(tag), Some(content)) = (serde.value("tag"), serde.value("content")) else {
            panic!("{}: `{}` is written in a form that this page does not know yet", of.path, of.name)
        };
        let contents = item.variants.iter().flat_map(|variant| &variant.fields);
        let mut kinds: Vec<String> = contents.map(|field| self.kind(of, &field.ty, links)).collect();
        kinds.dedup();
        let names = item.variants.iter().map(|variant| format!("`{}`", name(variant)));
        let names = format!("One of {}.", names.collect::<Vec<_>>().join(", "));
        vec![
            of.row(tag, "text".to_owned(), Some(names)),
            of.row(content, kinds.join(" or "), Some("The details.".to_owned())),
        ]
    }

    /// In words.
    fn kind<'t>(&'t self, of: &'t Written, ty: &syn::Type, links: &mut Vec<&'t Written>) -> String {
        let inner = match ty {
            syn::Type::Reference(reference) => return self.kind(of, &reference.elem, links),
            syn::Type::Tuple(tuple) => {
                let kinds: Vec<_> = tuple.elems.iter().map(|ty| self.kind(of, ty, links)).collect();
                return format!("list of {}", kinds.join(" and "));
            }
            syn::Type::Array(array) => return format!("list of {}", self.kind(of, &array.elem, links)),
            syn::Type::Slice(slice) => return format!("list of {}", self.kind(of, &slice.elem, links)),
            _ => arguments(ty),
        };
        let mut of_inner = |at: usize| inner.get(at).map(|ty| self.kind(of, ty, links)).unwrap_or_default();
        match &*name_of(ty) {
            "u8" | "u16" | "u32" | "u64" | "usize" | "i64" | "NonZeroU32" | "NonZeroU64" => {
                "integer".to_owned()
            }
            "f32" | "f64" => "number".to_owned(),
            "bool" => "bool".to_owned(),
            "str" | "String" | "PathBuf" | "SocketAddr" => "text".to_owned(),
            "Option" => format!("{} or null", of_inner(0)),
            "Vec" => format!("list of {}", of_inner(0)),
            "Box" => of_inner(0),
            "BTreeMap" => format!("object of {} by {}", of_inner(1), of_inner(0)),
            name => match self.writes_by_hand(&of.krate, name) {
                Some(writes) => writes.to_owned(),
                None => self.linked(of, name, links),
            },
        }
    }

    fn writes_by_hand(&self, krate: &str, name: &str) -> Option<&'static str> {
        let here = self.by_hand.get(&(krate.to_owned(), name.to_owned()));
        let mut all = self.by_hand.iter().filter(|((_, of), _)| of == name).map(|(_, writes)| writes);
        here.or_else(|| if self.written.contains_key(name) { None } else { all.next() }).copied()
    }

    fn linked<'t>(&'t self, of: &'t Written, name: &str, links: &mut Vec<&'t Written>) -> String {
        let found = self.find_from(of, name);
        let found = found.unwrap_or_else(|| panic!("{}: what is written for {name}?", of.path));
        if let Item::Struct(item) = &found.item
            && let Fields::Unnamed(fields) = &item.fields
            && let Some(only) = fields.unnamed.first()
        {
            return self.kind(found, &only.ty, links);
        }
        links.push(found);
        format!("[{name}](#{})", anchor(&found.title(self)))
    }
}

impl Written {
    /// With the crate where several have one of its name.
    pub(super) fn title(&self, types: &Types) -> String {
        match types.written.get(&self.name).map_or(0, Vec::len) {
            1 => self.name.clone(),
            _ => format!("{} of {}", self.name, self.krate),
        }
    }

    fn row(&self, name: String, kind: String, meaning: Option<String>) -> Row {
        Row { krate: self.krate.clone(), owner: self.name.clone(), name, kind, meaning }
    }
}

/// Settings of serde.
struct Settings(Vec<Meta>);

impl Settings {
    fn of(attributes: &[Attribute]) -> Self {
        let serde = attributes.iter().filter(|attribute| attribute.path().is_ident("serde"));
        Self(serde.flat_map(metas).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|meta| meta.path().is_ident(name))
    }

    fn value(&self, name: &str) -> Option<String> {
        self.0.iter().find(|meta| meta.path().is_ident(name)).and_then(text_of)
    }
}

fn metas(attribute: &Attribute) -> Punctuated<Meta, Token![,]> {
    attribute.parse_args_with(Punctuated::parse_terminated).unwrap_or_default()
}

fn text_of(meta: &Meta) -> Option<String> {
    let Meta::NameValue(meta) = meta else { return None };
    let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &meta.value else { return None };
    Some(text.value())
}

fn derives_serialize(attribute: &Attribute) -> bool {
    attribute.path().is_ident("derive")
        && metas(attribute).iter().any(|meta| last(meta.path()) == "Serialize")
}

/// What the first call of a serializer writes.
#[derive(Default)]
struct Calls(Option<&'static str>);

impl Visit<'_> for Calls {
    fn visit_expr_method_call(&mut self, call: &syn::ExprMethodCall) {
        let writes = match &*call.method.to_string() {
            "serialize_str" | "collect_str" => Some("text"),
            "serialize_u8" | "serialize_u64" => Some("integer"),
            "serialize_f64" => Some("number"),
            _ => None,
        };
        self.0 = self.0.or(writes);
        visit::visit_expr_method_call(self, call);
    }
}

fn writes(visited: impl FnOnce(&mut Calls)) -> Option<&'static str> {
    let mut calls = Calls::default();
    visited(&mut calls);
    calls.0
}

/// What the functions `name` and `as_str` return for each variant.
fn names_of(item: &syn::ItemImpl) -> BTreeMap<String, String> {
    let mut arms = Arms::default();
    for function in &item.items {
        if let syn::ImplItem::Fn(function) = function
            && ["name", "as_str"].contains(&&*function.sig.ident.to_string())
        {
            arms.visit_impl_item_fn(function);
        }
    }
    arms.0
}

#[derive(Default)]
struct Arms(BTreeMap<String, String>);

impl Visit<'_> for Arms {
    fn visit_arm(&mut self, arm: &syn::Arm) {
        if let syn::Pat::Path(pattern) = &arm.pat
            && let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &*arm.body
        {
            self.0.insert(last(&pattern.path), text.value());
        }
    }
}

/// What a `use` takes in.
fn imports(tree: &syn::UseTree) -> Vec<String> {
    match tree {
        syn::UseTree::Path(path) => imports(&path.tree),
        syn::UseTree::Group(group) => group.items.iter().flat_map(imports).collect(),
        syn::UseTree::Name(name) => vec![name.ident.to_string()],
        syn::UseTree::Rename(_) | syn::UseTree::Glob(_) => Vec::new(),
    }
}

fn last(path: &syn::Path) -> String {
    path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default()
}

fn name_of(ty: &syn::Type) -> String {
    if let syn::Type::Path(path) = ty { last(&path.path) } else { String::new() }
}

fn arguments(ty: &syn::Type) -> Vec<&syn::Type> {
    let syn::Type::Path(path) = ty else { return Vec::new() };
    let Some(syn::PathArguments::AngleBracketed(of)) = path.path.segments.last().map(|last| &last.arguments)
    else {
        return Vec::new();
    };
    let types = of
        .args
        .iter()
        .filter_map(|one| if let syn::GenericArgument::Type(ty) = one { Some(ty) } else { None });
    types.collect()
}

/// The first paragraph of its documentation.
fn meaning(attributes: &[Attribute]) -> Option<String> {
    let lines = attributes.iter().filter(|attribute| attribute.path().is_ident("doc"));
    let lines: Vec<String> = lines.filter_map(|attribute| text_of(&attribute.meta)).collect();
    let paragraph: Vec<&str> =
        lines.iter().map(|line| line.trim()).take_while(|line| !line.is_empty()).collect();
    let text = paragraph.join(" ").replace("`None`", "`null`").replace('|', "\\|");
    (!text.is_empty()).then(|| unlinked(&text))
}
