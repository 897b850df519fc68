//! `cargo xtask release --dry-run`: all that can be checked before a release, and what a person does then.
//!
//! Nothing is published from here. Each check runs whatever became of those before, so that one run names everything.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::steps::{Failure, Step, note, say, workspace_root};
use crate::toolchain::target_folder;
use crate::{book, dist};

/// What remains for a person when every check has passed, in this order.
const BY_HAND: &[&str] = &[
    "choose the public repository, with private reports of vulnerabilities (SECURITY.md), and the book's address",
    "set `repository` in Cargo.toml; in crates/python/pyproject.toml Repository, Changelog, Documentation (the book)",
    "Rust's registry: an account with a confirmed address, `cargo login`, and every name of our crates free or yours",
    "the Python index: an account with a token for uploads, and the name `poorwill` free or yours",
    "a key for signed tags (`git config user.signingkey`), whose public half the repository's site has",
    "`git grep -n -e 'first release' -e 'is released yet' README.md docs`: remove what holds only before a release",
    "name the version and the day in CHANGELOG.md, and commit",
    "run `cargo xtask release --dry-run` again, over that commit",
    "git tag --sign v$VERSION && git push origin v$VERSION",
    "cargo publish --workspace --locked; where the registry limits new crates, wait, and `--exclude` those that are there",
    "upload the wheels (x86-64 and aarch64) and the source archive of `cargo xtask dist` to the Python index",
    "publish the release of the tag at the repository's site, with its section of CHANGELOG.md, the archives with the \
     command, which `cargo xtask dist` prints beside each wheel, and their checksums",
    "put the book (`cargo xtask book`) at its address",
    "in fresh environments: pip install poorwill==$VERSION; cargo install --locked poorwill-cli@$VERSION; try both",
    "begin the next version: `version` in Cargo.toml, and `## Unreleased` in CHANGELOG.md",
];

/// A package has no profile of the workspace. With these most of what it needs was compiled for tests already.
const AS_TESTS_HAVE_IT: [[&str; 2]; 2] = [
    ["CARGO_PROFILE_DEV_DEBUG", "line-tables-only"],
    ["CARGO_PROFILE_DEV_BUILD_OVERRIDE_DEBUG", "line-tables-only"],
];

/// A named check.
type Check = (&'static str, fn() -> Result<(), Failure>);

const CHECKS: [Check; 4] = [
    ("the changelog names what is new", changelog),
    ("every crate can be published", crates),
    ("the wheels pass their checks", wheels),
    ("the book is whole", whole_book),
];

pub(crate) fn dry_run() -> Result<(), Failure> {
    let start = Instant::now();
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        match check() {
            Ok(()) => note(&format!("--- ready: {name}")),
            Err(failure) => {
                note(&format!("!!! not ready: {name}: {failure}"));
                failed.push(name.to_owned());
            }
        }
    }
    if !failed.is_empty() {
        return Err(Failure::Parts { failed });
    }
    let version = env!("CARGO_PKG_VERSION");
    say(&format!(
        "xtask release: {version} passes every check in {:.1} s; by hand:",
        start.elapsed().as_secs_f64()
    ));
    for (number, step) in BY_HAND.iter().enumerate() {
        say(&format!("  {}. {}", number + 1, step.replace("$VERSION", version)));
    }
    Ok(())
}

fn changelog() -> Result<(), Failure> {
    let path = workspace_root().join("CHANGELOG.md");
    let text = fs::read_to_string(&path).map_err(|cause| Failure::File { path: path.clone(), cause })?;
    match changes(&text, env!("CARGO_PKG_VERSION")) {
        0 => Err(no_changes(&path)),
        _ => Ok(()),
    }
}

fn no_changes(path: &Path) -> Failure {
    let problem = format!("has no list under `## Unreleased` or `## {}`", env!("CARGO_PKG_VERSION"));
    Failure::Content { path: path.to_owned(), problem }
}

/// How many items stand under the heading of this version, or of the next.
fn changes(text: &str, version: &str) -> usize {
    let mut is_ours = false;
    let mut items = 0;
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let first = heading.split_whitespace().next().unwrap_or_default();
            let name = first.trim_start_matches('[').trim_end_matches(']');
            is_ours = name == "Unreleased" || name == version;
        }
        items += usize::from(is_ours && line.starts_with("- "));
    }
    items
}

/// Packs every crate and compiles it from its package.
fn crates() -> Result<(), Failure> {
    forget_unpacked(&dist::cargo_home().join("registry/src"), env!("CARGO_PKG_VERSION"))?;
    forget_compiled(&target_folder()?.join("debug/.fingerprint"))?;
    let step = Step::cargo(["publish", "--workspace", "--dry-run", "--locked"]);
    AS_TESTS_HAVE_IT.iter().fold(step, |step, [name, value]| step.env(name, value)).run().map(drop)
}

/// Removes our crates that an earlier check unpacked.
///
/// Cargo reads a version that it unpacked before, not the package that it has just made: the registry of packages under
/// way has no name, so its folder of sources begins with a dash.
fn forget_unpacked(sources: &Path, version: &str) -> Result<(), Failure> {
    for registry in
        folders(sources)?.iter().filter(|registry| is_named(registry, |name| name.starts_with('-')))
    {
        let is_ours = |name: &str| name.starts_with("poorwill") && name.ends_with(&format!("-{version}"));
        for unpacked in folders(registry)?.iter().filter(|unpacked| is_named(unpacked, is_ours)) {
            fs::remove_dir_all(unpacked).map_err(|cause| Failure::File { path: unpacked.clone(), cause })?;
        }
    }
    Ok(())
}

/// Has Cargo compile our crates again. It takes a version of a registry to be what it compiled before.
fn forget_compiled(fingerprints: &Path) -> Result<(), Failure> {
    for ours in
        folders(fingerprints)?.iter().filter(|path| is_named(path, |name| name.starts_with("poorwill")))
    {
        fs::remove_dir_all(ours).map_err(|cause| Failure::File { path: ours.clone(), cause })?;
    }
    Ok(())
}

fn is_named(path: &Path, is_right: impl Fn(&str) -> bool) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_right)
}

/// What lies in a folder, and nothing where there is none.
fn folders(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |cause| Failure::File { path: path.to_owned(), cause };
    match fs::read_dir(path) {
        Ok(entries) => {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(failed)
        }
        Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(cause) => Err(failed(cause)),
    }
}

fn wheels() -> Result<(), Failure> {
    made(dist::run()?)
}

fn whole_book() -> Result<(), Failure> {
    made(book::run()?)
}

/// What cannot be made here cannot be released from here.
fn made(left_out: Option<String>) -> Result<(), Failure> {
    left_out.map_or(Ok(()), |what| Err(Failure::Missing { what }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_counted_under_their_heading_only() {
        let text = "# Changelog\n## Unreleased\n### Core\n- a\n  more\n- b\n## 0.0.9\n- c\n";
        assert_eq!(changes(text, "0.1.0"), 2);
        assert_eq!(changes(text, "0.0.9"), 3);
        assert_eq!(changes("## [0.1.0] - 2026\n- a\n", "0.1.0"), 1);
        for other in [
            "## 0.0.9\n- c\n",
            "## 0.1.01\n- c\n",
            "## [0.1.0-rc.1]\n- c\n",
            "## of 0.1.0\n- c\n",
            "##\n- c\n",
        ] {
            assert_eq!(changes(other, "0.1.0"), 0, "{other}");
        }
    }

    #[test]
    fn only_what_an_earlier_check_unpacked_is_forgotten() {
        let folder = std::env::temp_dir().join(format!("poorwill-release-{}", std::process::id()));
        let sources = folder.join("src");
        forget_unpacked(&sources, "0.1.0").unwrap();
        let kept = ["-1f/poorwill-core-0.0.9", "-1f/other-0.1.0", "index-1f/poorwill-core-0.1.0"];
        let ours = ["-1f/poorwill-0.1.0/src", "-2e/poorwill-core-0.1.0"];
        for path in kept.iter().chain(&ours) {
            fs::create_dir_all(sources.join(path)).unwrap();
        }
        forget_unpacked(&sources, "0.1.0").unwrap();
        assert!(kept.iter().all(|path| sources.join(path).exists()));
        assert!(!ours.iter().any(|path| sources.join(path).exists()));
        assert!(!sources.join("-1f/poorwill-0.1.0").exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_was_compiled_of_other_crates_stays() {
        let folder = std::env::temp_dir().join(format!("poorwill-compiled-{}", std::process::id()));
        forget_compiled(&folder).unwrap();
        for name in ["poorwill-1f", "poorwill-core-2e", "serde-1f"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        forget_compiled(&folder).unwrap();
        assert_eq!(folders(&folder).unwrap(), [folder.join("serde-1f")]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_was_not_made_is_not_ready() {
        assert!(made(None).is_ok());
        assert!(matches!(made(Some("no book".into())), Err(Failure::Missing { what }) if what == "no book"));
    }
}
