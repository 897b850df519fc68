//! The archives beside the wheels: the command for systems without Python, and the package's sources.
//!
//! A command's archive is a prefix, as `/usr/local`: unpacked there, a shell completes, `man` finds the pages, and
//! systemd the unit. Its command is that of the wheel.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::licenses;
use super::wheel::{VERSION, make_empty};
use crate::python::environment::Environment;
use crate::python::package::{PACKAGE, PROGRAM};
use crate::steps::{Failure, Step, workspace_root};

/// Where shells look for the completions of a command, below a prefix.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/poorwill"),
    ("fish", "share/fish/vendor_completions.d/poorwill.fish"),
    ("zsh", "share/zsh/site-functions/_poorwill"),
];

const PAGES: &str = "share/man/man1";

/// What lies in the tree, and where below a prefix it goes.
const FILES: [(&str, &str); 5] = [
    ("contrib/poorwill-rotate.service", "lib/systemd/system/poorwill-rotate.service"),
    ("LICENSE-APACHE", "share/doc/poorwill/LICENSE-APACHE"),
    ("LICENSE-MIT", "share/doc/poorwill/LICENSE-MIT"),
    (licenses::FILE, "share/doc/poorwill/LICENSE-THIRD-PARTY"),
    ("contrib/README.md", "share/doc/poorwill/README.md"),
];

/// What the source archive must hold: the crates that the backend builds, and at its root what the backend reads.
const IN_THE_SOURCES: [&str; 7] = [
    "Cargo.lock",
    "backend/poorwill_backend.py",
    "crates/cli/Cargo.toml",
    "crates/preload/Cargo.toml",
    "crates/python/Cargo.toml",
    "data/purelib/poorwill.pth",
    "pyproject.toml",
];

/// The files that the command itself prints: completions and man pages.
#[derive(Debug)]
pub(crate) struct Printed(PathBuf);

impl Printed {
    /// Asks the command of a wheel for this machine.
    pub(crate) fn by(program: &Path, folder: &Path) -> Result<Printed, Failure> {
        let folder = folder.join("printed");
        make_empty(&folder)?;
        let pages = folder.join(PAGES);
        Step::program(program.as_os_str(), [OsStr::new("man"), pages.as_os_str()]).run()?;
        for (shell, place) in COMPLETIONS {
            let script = Step::program(program.as_os_str(), ["completions", shell]).output()?;
            let path = folder.join(place);
            let made = path.parent().map_or(Ok(()), fs::create_dir_all);
            made.and_then(|()| fs::write(&path, format!("{script}\n")))
                .map_err(|cause| Failure::File { path, cause })?;
        }
        Ok(Printed(folder))
    }
}

/// Packs the command of a wheel with what it printed. Returns the archive's path.
pub(crate) fn pack(
    target: &str,
    program: &Path,
    printed: &Printed,
    [work, out]: [&Path; 2],
) -> Result<PathBuf, Failure> {
    let name = format!("poorwill-{VERSION}-{target}");
    let prefix = work.join(&name);
    make_empty(&prefix)?;
    for folder in ["bin", PAGES] {
        let path = prefix.join(folder);
        fs::create_dir_all(&path).map_err(|cause| Failure::File { path, cause })?;
    }
    copy(program, &prefix.join("bin").join(PROGRAM))?;
    for (from, place) in FILES {
        copy(&workspace_root().join(from), &prefix.join(place))?;
    }
    for (_, place) in COMPLETIONS {
        copy(&printed.0.join(place), &prefix.join(place))?;
    }
    for page in names_in(&printed.0.join(PAGES))? {
        copy(&printed.0.join(PAGES).join(&page), &prefix.join(PAGES).join(&page))?;
    }
    let path = out.join(format!("{name}.tar.gz"));
    let how = ["--owner=0", "--group=0", "--numeric-owner", "--sort=name", "--mode=u=rwX,go=rX"];
    let create = ["--create", "--gzip", "--file"].map(OsStr::new).into_iter().chain([path.as_os_str()]);
    let from = [OsStr::new("--directory"), work.as_os_str(), OsStr::new(&name)];
    Step::program(OsStr::new("tar"), create.chain(how.map(OsStr::new)).chain(from)).run()?;
    Ok(path)
}

/// Packs the package's sources, and checks that cargo finds every crate in them. Returns the archive's path.
pub(crate) fn pack_sources(environment: &Environment, out: &Path) -> Result<PathBuf, Failure> {
    let work = environment.beside("dist-build").join("sources");
    make_empty(&work)?;
    let arguments = ["-m", "maturin", "sdist", "--manifest-path"].map(OsStr::new).into_iter();
    let manifest = workspace_root().join(PACKAGE).join("Cargo.toml");
    let chosen = [manifest.as_os_str(), OsStr::new("--out"), work.as_os_str()];
    environment.python(arguments.chain(chosen)).run()?;
    let name = format!("poorwill-{VERSION}");
    let made = work.join(format!("{name}.tar.gz"));
    let unpack = ["--extract", "--file"].map(OsStr::new).into_iter().chain([made.as_os_str()]);
    Step::program(OsStr::new("tar"), unpack.chain([OsStr::new("--directory"), work.as_os_str()])).run()?;
    let root = work.join(&name);
    if let Some(missing) = IN_THE_SOURCES.iter().find(|file| !root.join(file).is_file()) {
        return Err(Failure::Content { path: made, problem: format!("it has no {missing}") });
    }
    Step::cargo(["metadata", "--offline", "--format-version", "1"]).within(&root).output()?;
    let path = out.join(format!("{name}.tar.gz"));
    copy(&made, &path)?;
    Ok(path)
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let made = to.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| fs::copy(from, to))
        .map(drop)
        .map_err(|cause| Failure::File { path: from.to_owned(), cause })
}

fn names_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| PathBuf::from(entry.file_name()))).collect()
    });
    entries.map_err(|cause| Failure::File { path: folder.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toolchain::target_folder;

    #[test]
    fn an_archive_is_a_prefix_with_completions_pages_and_unit() {
        let work = target_folder().unwrap().join(format!("xtask-archive-{}", std::process::id()));
        let printed = work.join("printed");
        let program = work.join("poorwill");
        let pages = ["poorwill.1", "poorwill-demo.1"].map(|page| format!("{PAGES}/{page}"));
        let places = COMPLETIONS.iter().map(|(_, place)| *place).chain(pages.iter().map(String::as_str));
        for path in places.map(|place| printed.join(place)).chain([program.clone()]) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "of a test\n").unwrap();
        }
        let path = pack("paper-unknown-linux-gnu", &program, &Printed(printed), [&work, &work]).unwrap();
        let list = [OsStr::new("--list"), OsStr::new("--file"), path.as_os_str()];
        let listed = Step::program(OsStr::new("tar"), list).output().unwrap();
        let prefix = format!("poorwill-{VERSION}-paper-unknown-linux-gnu/");
        let mut files: Vec<_> = listed.lines().filter(|line| !line.ends_with('/')).collect();
        files.sort_unstable();
        let mut wanted: Vec<String> = COMPLETIONS.iter().map(|(_, place)| (*place).to_owned()).collect();
        wanted.extend(FILES.iter().map(|(_, place)| (*place).to_owned()));
        wanted.extend(pages);
        wanted.push("bin/poorwill".to_owned());
        let mut wanted: Vec<String> = wanted.iter().map(|file| format!("{prefix}{file}")).collect();
        wanted.sort_unstable();
        assert_eq!(files, wanted);
        fs::remove_dir_all(work).unwrap();
    }

    #[test]
    fn the_unit_starts_the_command_where_the_archive_puts_it() {
        let (unit, _) = FILES[0];
        let text = fs::read_to_string(workspace_root().join(unit)).unwrap();
        assert!(text.contains("\nExecStart=/usr/local/bin/poorwill rotate "), "{text}");
    }
}
