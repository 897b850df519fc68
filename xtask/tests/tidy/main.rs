//! What can be kept in order by looking at the text of the files.
//!
//! Each check is a pure function from text to a list of problems, with a test beside it which shows
//! that it can fail. The tests here run them over the whole tree.

mod errors;
mod links;
mod prose;
mod roots;
mod safety;
mod tree;
mod types;
mod vocabulary;
mod words;

use tree::{File, crates, files};

/// Crate roots that allow unsafe code; every other root forbids it. `docs/unsafe.md` says why.
const UNSAFE_ROOTS: &[&str] = &[
    "crates/driver/src/lib.rs",
    "crates/fake-libcuda/src/lib.rs",
    "crates/fake-nvml/src/lib.rs",
    "crates/python/src/lib.rs",
];

#[test]
fn crate_roots_say_whether_they_may_be_unsafe() {
    let files = files();
    expect_none(crates().iter().flat_map(|krate| &krate.roots).flat_map(|root| {
        let text = &tree::file(&files, root).text;
        roots::unsafe_attribute(root, text, UNSAFE_ROOTS.contains(&root.as_str()))
    }));
}

#[test]
fn crates_inherit_the_lints_of_the_workspace() {
    let files = files();
    expect_none(
        crates()
            .iter()
            .map(|krate| tree::file(&files, &krate.manifest))
            .flat_map(|manifest| roots::inherited_lints(&manifest.path, &manifest.text)),
    );
}

#[test]
fn rust_files_begin_with_what_they_are_for() {
    expect_none(files().iter().filter(is_rust).flat_map(|file| roots::module_docs(&file.path, &file.text)));
}

#[test]
fn errors_print_a_cause_or_return_it() {
    let is_library = |file: &&File| file.path.contains("/src/");
    let files = files();
    expect_none(
        files
            .iter()
            .filter(is_rust)
            .filter(is_library)
            .flat_map(|file| errors::said_twice(&file.path, &file.text)),
    );
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    let allowed = |file: &&File| {
        let sources = UNSAFE_ROOTS.iter().filter_map(|root| root.rsplit_once('/'));
        sources.into_iter().any(|(folder, _)| file.path.starts_with(&format!("{folder}/")))
    };
    expect_none(
        files()
            .iter()
            .filter(is_rust)
            .filter(allowed)
            .flat_map(|file| safety::unexplained(&file.path, &file.text)),
    );
}

#[test]
fn nothing_is_left_over() {
    expect_none(hand_written(&files()).flat_map(|file| words::left_over(&file.path, &file.text)));
}

#[test]
fn symbolic_links_stay_in_the_tree() {
    let say = |path| format!("{path}: leads nowhere, or out of the tree");
    expect_none(tree::stray_links().into_iter().map(say));
}

#[test]
fn the_project_speaks_of_itself_alone() {
    expect_none(hand_written(&files()).flat_map(|file| words::elsewhere(&file.path, &file.text)));
}

#[test]
fn links_between_pages_resolve() {
    let (files, paths) = (files(), tree::paths());
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let is_page = |file: &&File| file.has_extension(&["md"]);
    expect_none(files.iter().filter(is_page).flat_map(|file| links::broken(&file.path, &file.text, &paths)));
}

#[test]
fn the_readme_names_the_two_commands() {
    expect_none(words::commands("README.md", &tree::file(&files(), "README.md").text));
}

#[test]
fn sentences_are_short() {
    expect_none(
        files()
            .iter()
            .filter(is_written_prose)
            .flat_map(|file| prose::long_sentences(&file.path, &file.text)),
    );
}

#[test]
fn private_words_do_not_come_back() {
    expect_none(
        files()
            .iter()
            .filter(|file| is_written_prose(file) || is_code(file))
            .flat_map(|file| vocabulary::private_words(&file.path, &file.text)),
    );
}

#[test]
fn comments_are_few_beside_the_code() {
    let files = files();
    let sources = files.iter().filter(is_rust).filter(is_source);
    expect_none(prose::too_many_comments(sources.map(|file| prose::words(&file.text))));
}

#[test]
fn a_type_name_has_one_meaning_in_a_crate() {
    let files = files();
    expect_none(crates().iter().flat_map(|krate| {
        let folder = krate.manifest.trim_end_matches("/Cargo.toml");
        let sources =
            files.iter().filter(is_rust).filter(|file| file.path.starts_with(&format!("{folder}/src/")));
        types::collisions(folder, sources.map(|file| (file.path.as_str(), file.text.as_str())))
    }));
}

/// Sources of the crates, and pages that people read from one end to the other: no decisions of old, and no records of
/// measurements.
fn is_written_prose(file: &&File) -> bool {
    let is_page = file.has_extension(&["md"])
        && !["docs/adr/", "docs/benchmarks/", "docs/reference/", "bench/"]
            .iter()
            .any(|folder| file.path.starts_with(folder));
    is_page || is_source(file) && file.has_extension(&["rs"]) || is_package(file)
}

/// Names are looked at in tests, too.
fn is_code(file: &&File) -> bool {
    file.has_extension(&["rs", "py"])
        && (file.path.starts_with("crates/") || file.path.starts_with("xtask/src/"))
}

fn is_source(file: &&File) -> bool {
    file.path.strip_prefix("crates/").and_then(|path| path.split('/').nth(1)) == Some("src")
}

fn is_package(file: &File) -> bool {
    file.path.starts_with("crates/python/python/") && file.has_extension(&["py"])
}

/// Most words of a page, and of all pages that people read.
const PAGE_WORDS_MAX: usize = 2_500;
const README_WORDS_MAX: usize = 900;
const BOOK_WORDS_MAX: usize = 20_000;

#[test]
fn pages_are_short() {
    let files = files();
    let is_read = |file: &&File| {
        let is_book =
            file.path.starts_with("docs/") || ["README.md", "CONTRIBUTING.md"].contains(&file.path.as_str());
        is_book && is_written_prose(file) && file.has_extension(&["md"])
    };
    let words: Vec<(&str, usize)> = files
        .iter()
        .filter(is_read)
        .map(|file| (file.path.as_str(), file.text.split_whitespace().count()))
        .collect();
    assert!(words.len() > 10, "{words:?}");
    let most = |path: &str| if path == "README.md" { README_WORDS_MAX } else { PAGE_WORDS_MAX };
    let long = words.iter().filter(|(path, words)| *words > most(path));
    let problems: Vec<String> = long.map(|(path, words)| format!("{path}: {words} words")).collect();
    let all: usize = words.iter().map(|(_, words)| words).sum();
    let in_all =
        (all > BOOK_WORDS_MAX).then(|| format!("all pages: {all} words, {BOOK_WORDS_MAX} are allowed"));
    expect_none(problems.into_iter().chain(in_all));
}

#[test]
fn the_container_has_the_compiler_and_the_files_that_it_names() {
    let files = files();
    let container = &tree::file(&files, "contrib/container/Containerfile").text;
    let version =
        tree::file(&files, "Cargo.toml").text.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let version = version.expect("the workspace names its Rust").trim_matches('"');
    assert!(
        container.contains(&format!("FROM rust:{version}-")),
        "Rust {version} builds the rest of the project"
    );
    let copied = container
        .lines()
        .filter_map(|line| line.strip_prefix("COPY LICENSE"))
        .flat_map(str::split_whitespace);
    assert!(copied.count() > 1);
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        assert!(container.contains(name));
        tree::file(&files, name);
    }
}

fn is_rust(file: &&File) -> bool {
    file.has_extension(&["rs"])
}

/// All files but those that cargo writes.
fn hand_written(files: &[File]) -> impl Iterator<Item = &File> {
    files.iter().filter(|file| !file.path.ends_with("Cargo.lock"))
}

fn expect_none(problems: impl IntoIterator<Item = String>) {
    let problems: Vec<String> = problems.into_iter().collect();
    assert!(problems.is_empty(), "{} problems:\n{}\n", problems.len(), problems.join("\n"));
}
