//! The program mdBook: one that is installed in the version that is pinned, or one that is built once and kept.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::steps::{Failure, Step};
use crate::toolchain::target_folder;

/// Pages are the same everywhere, so the version is.
const VERSION: &str = "0.5.4";

#[derive(Debug)]
pub(super) struct Mdbook {
    program: PathBuf,
}

impl Mdbook {
    /// Finds the program, or builds it, which takes minutes.
    pub(super) fn ready() -> Result<Mdbook, Failure> {
        let kept = kept_in(&cache_folder()?);
        let program = [PathBuf::from("mdbook"), kept.join("bin/mdbook")].into_iter().find(|at| is_pinned(at));
        if let Some(program) = program {
            return Ok(Mdbook { program });
        }
        install(&kept)?;
        Ok(Mdbook { program: kept.join("bin/mdbook") })
    }

    pub(super) fn build(&self, source: &Path, book: &Path) -> Result<(), Failure> {
        let args = [OsStr::new("build"), source.as_os_str(), OsStr::new("--dest-dir"), book.as_os_str()];
        Step::program(self.program.as_os_str(), args).run().map(drop)
    }
}

/// The user's folder for what can be made again, so that all checkouts share the program; else cargo's.
fn cache_folder() -> Result<PathBuf, Failure> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    own.map_or_else(target_folder, |folder| Ok(folder.join("poorwill")))
}

fn kept_in(cache: &Path) -> PathBuf {
    cache.join(format!("mdbook-{VERSION}"))
}

fn is_pinned(program: &Path) -> bool {
    let version = Step::program(program.as_os_str(), ["--version"]).output_if_there();
    version.is_some_and(|version| version.trim_start_matches("mdbook v") == VERSION)
}

fn install(root: &Path) -> Result<(), Failure> {
    let words = [
        "install",
        "mdbook",
        "--version",
        VERSION,
        "--locked",
        "--no-default-features",
        "--features",
        "search",
    ];
    let scratch = target_folder()?.join("mdbook-build");
    let install = words.into_iter().map(OsStr::new).chain([
        OsStr::new("--root"),
        root.as_os_str(),
        OsStr::new("--target-dir"),
        scratch.as_os_str(),
    ]);
    let installed = Step::cargo(install).run();
    // Some hundred MB that nothing reads again.
    let _ = std::fs::remove_dir_all(&scratch);
    installed
        .map(drop)
        .map_err(|cause| Failure::Fetch { what: format!("mdBook {VERSION}"), cause: Box::new(cause) })
}
