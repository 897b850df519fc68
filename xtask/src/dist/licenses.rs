//! `cargo xtask licenses`: the licences of all that is linked into the package's libraries and its command, in one
//! file that every wheel contains.
//!
//! For each crate it has the text of one licence that applies, by our preference, and its notices. A crate without a
//! listed licence, or without its text, is a failure. Versions are left out, so the file changes only when a text
//! does. Rust's own library is treated as a crate; the compiler ships its notices.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::steps::{Failure, Step, say, workspace_root};

/// The file. Maturin includes it because of its name.
pub(crate) const FILE: &str = "crates/python/LICENSE-THIRD-PARTY";

/// The crates of the files that a wheel holds: its module, the library to preload, and the command.
const PACKAGES: [&str; 3] = ["poorwill-python", "poorwill-preload", "poorwill-cli"];

/// The accepted licences, preferred first: a phrase of their texts, and names of their files.
const TAKEN: [Licence; 5] = [
    Licence { name: "MIT", says: "Permission is hereby granted, free of charge", file: "MIT" },
    Licence { name: "ISC", says: "Permission to use, copy, modify, and/or distribute", file: "ISC" },
    Licence { name: "Zlib", says: "This software is provided 'as-is'", file: "ZLIB" },
    Licence { name: "BSD-3-Clause", says: "Redistribution and use in source and binary forms", file: "BSD" },
    Licence { name: "Apache-2.0", says: "Apache License", file: "APACHE" },
];

/// The crates of Rust's standard library on Linux, of those in its notices.
const IN_STD: [&str; 6] = ["cfg-if", "foldhash", "gimli", "hashbrown", "libc", "rustc-demangle"];

/// The compiler's notices of the standard library, below its folder.
const STD_NOTICES: &str = "share/doc/rust/COPYRIGHT-library.html";

const STD: &str = "\
The Rust standard library
Copyright The Rust Project Developers (see https://thanks.rust-lang.org)
Copyright 2014 Alex Crichton (library/backtrace)
Copyright 2019 The Crossbeam Project Developers (library/std/src/sync/mpmc)
";

/// The architectures, named alike by Rust and in a wheel's tag.
pub(super) const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

#[derive(Debug, Clone, Copy, PartialEq)]
struct Licence {
    name: &'static str,
    /// A phrase of its text.
    says: &'static str,
    /// A part of its files' names.
    file: &'static str,
}

/// A linked crate, with the texts beside its sources, by name.
#[derive(Debug)]
struct Linked {
    name: String,
    expression: String,
    texts: BTreeMap<String, String>,
}

pub(crate) fn write() -> Result<(), Failure> {
    let path = workspace_root().join(FILE);
    fs::write(&path, wanted()?).map_err(|cause| Failure::File { path, cause })?;
    say(&format!("xtask licenses: {FILE}"));
    Ok(())
}

/// Whether the file has all linked crates. Rust's own library is not checked: another compiler has other notices, or
/// none.
pub(crate) fn check() -> Result<(), Failure> {
    let path = workspace_root().join(FILE);
    let file = fs::read_to_string(&path).map_err(|cause| Failure::File { path: path.clone(), cause })?;
    match missing(&file, &linked()?) {
        Ok(None) => Ok(()),
        Ok(Some(name)) => {
            let problem = format!("{name} is not in it as it is linked; run `cargo xtask licenses`");
            Err(Failure::Content { path, problem })
        }
        Err(problem) => Err(Failure::Content { path, problem }),
    }
}

fn wanted() -> Result<String, Failure> {
    let mut all = linked()?;
    all.extend(in_std()?);
    assembled(&all).map_err(|problem| Failure::Content { path: FILE.into(), problem })
}

/// The first crate with a text that is not in the file below its name.
fn missing(file: &str, all: &[Linked]) -> Result<Option<String>, String> {
    let sections: Vec<(&str, &str)> =
        file.split(&rule()).filter_map(|part| part.split_once("\n\n")).collect();
    for linked in all {
        let is_there = |(place, text): &(usize, String)| {
            sections.iter().any(|(head, has)| {
                head.strip_suffix(&format!(": {}", kind_of(*place)))
                    .is_some_and(|names| names.split(", ").any(|name| name == linked.name))
                    && has.trim_end() == text.trim_end()
            })
        };
        if !chosen(linked)?.iter().all(is_there) {
            return Ok(Some(linked.name.clone()));
        }
    }
    Ok(None)
}

/// The separator between texts.
fn rule() -> String {
    format!("\n{}\n", "=".repeat(80))
}

/// The kind of a text, by its index among the licences.
fn kind_of(place: usize) -> &'static str {
    TAKEN.get(place).map_or("notice", |licence| licence.name)
}

/// All that cargo links into what a wheel holds for any architecture, except our own crates.
fn linked() -> Result<Vec<Linked>, Failure> {
    let targets = ARCHITECTURES.map(|architecture| format!("{architecture}-unknown-linux-gnu"));
    let tree = ["tree", "--locked", "--prefix", "none"].into_iter();
    let tree = tree.chain(PACKAGES.iter().flat_map(|package| ["--package", package]));
    let which = ["--edges", "normal,no-proc-macro", "--format", "{p}|{l}"];
    let targets = targets.iter().flat_map(|target| ["--target", target]);
    let output = Step::cargo(tree.chain(which).chain(targets)).output()?;
    let folders = folders()?;
    let mut found = BTreeMap::new();
    for line in output.lines() {
        let Some((package, expression)) = line.trim_end_matches(" (*)").split_once('|') else { continue };
        let mut words = package.split(' ');
        let (name, version) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        // A crate from a folder is ours.
        let Some(folder) = folders.get(&(name.to_owned(), version.trim_start_matches('v').to_owned())) else {
            continue;
        };
        let expression = expression.trim_end_matches(" (*)").to_owned();
        let linked = Linked { name: name.to_owned(), expression, texts: texts_in(folder)? };
        found.insert((name.to_owned(), version.to_owned()), linked);
    }
    Ok(found.into_values().collect())
}

/// Where the sources of other packages are, by name and version.
fn folders() -> Result<BTreeMap<(String, String), PathBuf>, Failure> {
    let output = Step::cargo(["metadata", "--locked", "--format-version", "1"]).output()?;
    let json: serde_json::Value = serde_json::from_str(&output)
        .map_err(|error| Failure::Content { path: "cargo metadata".into(), problem: error.to_string() })?;
    let packages = json["packages"].as_array().into_iter().flatten();
    let others = packages.filter(|package| !package["source"].is_null());
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(others
        .map(|package| {
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let folder = manifest.parent().unwrap_or(Path::new("")).to_owned();
            ((text(&package["name"]), text(&package["version"])), folder)
        })
        .collect())
}

/// The files of a folder that are named like a licence or a notice.
fn texts_in(folder: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let failed = |cause| Failure::File { path: folder.to_owned(), cause };
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_one = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"]
            .iter()
            .any(|word| name.starts_with(word));
        if is_one && entry.path().is_file() {
            texts.insert(name, fs::read_to_string(entry.path()).map_err(failed)?);
        }
    }
    Ok(texts)
}

/// The crates of the standard library.
fn in_std() -> Result<Vec<Linked>, Failure> {
    let path = Path::new(&Step::rustc(["--print", "sysroot"]).output()?).join(STD_NOTICES);
    let html = fs::read_to_string(&path).map_err(|cause| Failure::File { path: path.clone(), cause })?;
    let mut all = vec![];
    for name in IN_STD {
        let texts = std_texts(&html, name);
        if texts.is_empty() {
            let problem = format!("it has no notices of {name}, which Rust's library was known to hold");
            return Err(Failure::Content { path, problem });
        }
        let expression = if name == "foldhash" { "Zlib" } else { "MIT OR Apache-2.0" };
        all.push(Linked {
            name: format!("{name} (in Rust's library)"),
            expression: expression.to_owned(),
            texts,
        });
    }
    let mit = all[0].texts.values().find(|text| text.contains(TAKEN[0].says)).cloned().unwrap_or_default();
    let permission = mit.find(TAKEN[0].says).map_or("", |at| &mit[at..]);
    let texts = [("LICENSE-MIT".to_owned(), format!("{STD}\n{permission}"))].into();
    all.push(Linked { name: "std".to_owned(), expression: "MIT OR Apache-2.0".to_owned(), texts });
    Ok(all)
}

/// The notices of a crate on the page about the standard library.
fn std_texts(html: &str, name: &str) -> BTreeMap<String, String> {
    let is_wanted = |section: &&str| {
        let title = section.split("</h3>").next().unwrap_or_default().trim();
        title.rsplit_once('-').is_some_and(|(named, version)| {
            named == name && version.starts_with(|c: char| c.is_ascii_digit())
        })
    };
    let Some(section) = html.split("<h3>📦").skip(1).find(is_wanted) else { return BTreeMap::new() };
    let files = section.split("<summary><code>").skip(1);
    files
        .filter_map(|file| {
            let (name, rest) = file.split_once("</code>")?;
            let text = rest.split_once("<pre>")?.1.split_once("</pre>")?.0;
            Some((name.to_uppercase(), unescaped(text)))
        })
        .collect()
}

fn unescaped(html: &str) -> String {
    let marks =
        [("&lt;", "<"), ("&#60;", "<"), ("&gt;", ">"), ("&#62;", ">"), ("&#34;", "\""), ("&quot;", "\"")];
    let more = [("&#39;", "'"), ("&#38;", "&"), ("&amp;", "&")];
    marks.iter().chain(&more).fold(html.to_owned(), |text, (mark, is)| text.replace(mark, is))
}

/// The file's text: every text once, below the crates that have it.
fn assembled(all: &[Linked]) -> Result<String, String> {
    let mut by_text: BTreeMap<(usize, String), Vec<&str>> = BTreeMap::new();
    for linked in all {
        for (place, text) in chosen(linked)? {
            by_text.entry((place, text)).or_default().push(&linked.name);
        }
    }
    let mut file = "Poorwill's libraries and its command hold the following software of others.\n".to_owned();
    for ((place, text), mut names) in by_text {
        names.sort_unstable();
        names.dedup();
        let _ = write!(file, "{}{}: {}\n\n{text}", rule(), names.join(", "), kind_of(place));
    }
    Ok(file)
}

/// The texts for a crate: one licence of each choice, and all notices, each with its index.
fn chosen(linked: &Linked) -> Result<Vec<(usize, String)>, String> {
    let is_notice = |file: &str| file.starts_with("COPYRIGHT") || file.starts_with("NOTICE");
    let notices = linked.texts.iter().filter(|(file, _)| is_notice(file));
    let mut texts: Vec<_> = notices.map(|(_, text)| (TAKEN.len(), tidied(text))).collect();
    for choice in linked.expression.split(" AND ") {
        texts.push(one_of(choice.trim_matches(['(', ')']), linked)?);
    }
    Ok(texts)
}

/// The text of the preferred licence of a choice, as in `MIT OR Apache-2.0`, with its index.
fn one_of(choice: &str, linked: &Linked) -> Result<(usize, String), String> {
    let Linked { name, expression, texts } = linked;
    let names: Vec<&str> = choice.split('/').flat_map(|part| part.split(" OR ")).map(str::trim).collect();
    let mut is_any_allowed = false;
    for (place, licence) in TAKEN.iter().enumerate().filter(|(_, licence)| names.contains(&licence.name)) {
        is_any_allowed = true;
        let says = |text: &&String| text.contains(licence.says);
        let named =
            texts.iter().filter(|(file, _)| file.contains(licence.file)).map(|(_, text)| text).find(says);
        if let Some(text) = named.or_else(|| texts.values().find(says)) {
            return Ok((place, tidied(text)));
        }
    }
    if is_any_allowed {
        Err(format!("{name} says {expression} and has no text of it"))
    } else {
        Err(format!("{name} has the licence `{expression}`, which is not one that is taken"))
    }
}

/// Removes differences between copies of one text: trailing spaces, and empty lines around it.
fn tidied(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    format!("{}\n", lines.join("\n").trim_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIT: &str =
        "Copyright (c) 2020 Ada\n\nPermission is hereby granted, free of charge, to any person\n";

    fn a_crate(expression: &str, texts: &[(&str, &str)]) -> Linked {
        let texts = texts.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect();
        Linked { name: "ada".to_owned(), expression: expression.to_owned(), texts }
    }

    #[test]
    fn the_preferred_licence_stands_there_with_the_notices() {
        let texts = [("COPYRIGHT", "By Ada\n"), ("LICENSE-APACHE", "Apache License\n"), ("LICENSE-MIT", MIT)];
        for expression in
            ["MIT OR Apache-2.0", "Apache-2.0/MIT", "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"]
        {
            let file = assembled(&[a_crate(expression, &texts)]).unwrap();
            assert!(file.contains("ada: MIT\n\nCopyright (c) 2020 Ada"), "{file}");
            assert!(file.contains("ada: notice\n\nBy Ada") && !file.contains("Apache License"), "{file}");
        }
        let file = assembled(&[a_crate("Apache-2.0", &texts)]).unwrap();
        assert!(file.contains("ada: Apache-2.0\n\nApache License\n"), "{file}");
    }

    #[test]
    fn licences_that_hold_together_all_stand_there() {
        let isc = "Permission to use, copy, modify, and/or distribute\n";
        let texts = [("LICENSE-APACHE", "Apache License\n"), ("LICENSE-OTHER", isc)];
        let file = assembled(&[a_crate("Apache-2.0 AND (ISC OR GPL-3.0-only)", &texts)]).unwrap();
        assert!(file.contains("ada: Apache-2.0\n") && file.contains("ada: ISC\n"), "{file}");
        let problem = assembled(&[a_crate("Apache-2.0 AND ISC", &texts[..1])]).unwrap_err();
        assert!(problem.contains("has no text of it"), "{problem}");
    }

    #[test]
    fn one_text_of_several_crates_stands_there_once() {
        let other =
            Linked { name: "bob".to_owned(), ..a_crate("MIT", &[("LICENSE", &MIT.replace("Ada", "Ada  "))]) };
        let file = assembled(&[other, a_crate("MIT", &[("LICENSE-MIT", MIT)])]).unwrap();
        assert!(file.contains("ada, bob: MIT\n") && file.matches("hereby granted").count() == 1, "{file}");
    }

    #[test]
    fn linked_crates_missing_from_the_file_are_named() {
        let notice = [("COPYRIGHT", "By Ada\n"), ("LICENSE-MIT", MIT)];
        let bob = || Linked { name: "bob".to_owned(), ..a_crate("MIT", &[("LICENSE", MIT)]) };
        let file = assembled(&[a_crate("MIT", &notice), bob()]).unwrap();
        assert_eq!(missing(&file, &[a_crate("MIT", &notice), bob()]).unwrap(), None);
        // The file may have more than is linked.
        assert_eq!(missing(&file, &[bob()]).unwrap(), None);
        let eve = Linked { name: "eve".to_owned(), ..bob() };
        assert_eq!(missing(&file, &[bob(), eve]).unwrap(), Some("eve".to_owned()));
        for (from, to) in [("By Ada", "By Eve"), ("2020", "2021"), ("ada: notice", "ada: MIT")] {
            let other = file.replace(from, to);
            assert_eq!(
                missing(&other, &[a_crate("MIT", &notice)]).unwrap(),
                Some("ada".to_owned()),
                "{from}"
            );
        }
        assert!(missing(&file, &[a_crate("GPL-3.0-only", &notice)]).is_err());
    }

    #[test]
    fn crates_without_an_accepted_licence_are_named() {
        for (expression, texts, says) in [
            ("GPL-3.0-only", &[("LICENSE", MIT)][..], "`GPL-3.0-only`, which is not one that is taken"),
            ("MIT AND GPL-3.0-only", &[("LICENSE", MIT)], "not one that is taken"),
            ("", &[("LICENSE", MIT)], "not one that is taken"),
            ("MIT", &[], "ada says MIT and has no text of it"),
            ("MIT", &[("LICENSE", "Do what you like.")], "has no text of it"),
        ] {
            let problem = assembled(&[a_crate(expression, texts)]).unwrap_err();
            assert!(problem.contains(says), "{problem}");
        }
    }

    #[test]
    fn notices_of_rusts_library_are_read() {
        let html = "<h3>📦 gimli-0.1</h3> <summary><code>LICENSE-MIT</code></summary> <pre>\nA &#60;a@b&#62;\n</pre>\
                    <h3>📦 gimli-more-0.1</h3> <summary><code>LICENSE</code></summary> <pre>B</pre>";
        let texts = std_texts(html, "gimli");
        assert_eq!(texts, [("LICENSE-MIT".to_owned(), "\nA <a@b>\n".to_owned())].into());
        assert!(std_texts(html, "more").is_empty());
    }
}
