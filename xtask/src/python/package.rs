//! Installs the package from the run's single build into a virtual environment.
//!
//! The Python files and the libraries are copied, and maturin writes the metadata with entry points. So the tests
//! see what a wheel installs; `cargo xtask dist` checks the wheel itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::environment::Venv;
use crate::build::Built;
use crate::steps::{Failure, workspace_root};

pub(crate) const PACKAGE: &str = "crates/python";
pub(crate) const SOURCES: &str = "crates/python/python/poorwill";

const MODULE: &str = "poorwill";

/// The native module's file in the package.
const NATIVE_FILE: &str = "_native.abi3.so";

/// The library to preload, in the package. Its users look for this name.
pub(crate) const PRELOAD_FILE: &str = "compat/torch_memory_saver_hook_mode_preload.abi3.so";

/// The package's program, in an environment's `bin` and in the data that maturin packs.
pub(crate) const PROGRAM: &str = "poorwill";

/// Installs the package into the environment, replacing another.
pub(crate) fn install(venv: &Venv, built: &Built) -> Result<(), Failure> {
    let packages = site_packages(venv)?;
    let at = |path: &Path| {
        let path = path.to_owned();
        move |cause| Failure::File { path, cause }
    };
    remove_old(&packages).map_err(at(&packages))?;
    let folder = packages.join(MODULE);
    copy_folder(&workspace_root().join(SOURCES), &folder).map_err(at(&folder))?;
    for (library, name) in [(&built.native, NATIVE_FILE), (&built.preload, PRELOAD_FILE)] {
        let file = folder.join(name);
        let made = file.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| fs::copy(library, &file)).map_err(at(library))?;
    }
    let program = venv.folder().join("bin").join(PROGRAM);
    // What runs yet keeps the file that it has.
    let removed = if program.exists() { fs::remove_file(&program) } else { Ok(()) };
    removed.and_then(|()| fs::copy(&built.command, &program)).map_err(at(&built.command))?;
    let metadata = ["-m", "maturin", "pep517", "write-dist-info", "--metadata-directory"].map(Into::into);
    let metadata = metadata.into_iter().chain([packages.into_os_string()]);
    venv.python(metadata).within(&workspace_root().join(PACKAGE)).run().map(drop)
}

/// The folder where the environment's interpreter finds packages.
fn site_packages(venv: &Venv) -> Result<PathBuf, Failure> {
    let ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    venv.python(["-I", "-c", ask]).output().map(PathBuf::from)
}

fn remove_old(packages: &Path) -> io::Result<()> {
    for entry in fs::read_dir(packages)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_metadata = name.starts_with(&format!("{MODULE}-")) && name.ends_with(".dist-info");
        if name == MODULE || is_metadata {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Copies all files except those that Python or a build in the tree left there.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, into) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "__pycache__" {
                copy_folder(&path, &into)?;
            }
        } else if path.extension().is_none_or(|ending| ending != "so") {
            fs::copy(&path, &into)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_are_copied_and_only_ours_is_removed() {
        let folder = crate::toolchain::target_folder().unwrap();
        let folder = folder.join(format!("xtask-package-{}", std::process::id()));
        let [from, packages] = ["from", "packages"].map(|name| folder.join(name));
        for path in [
            "from/a/__pycache__",
            "packages/poorwill/old",
            "packages/poorwill-0.0.1.dist-info",
            "packages/poorwill_x",
        ] {
            fs::create_dir_all(folder.join(path)).unwrap();
        }
        for file in ["from/x.py", "from/_native.abi3.so", "from/a/y.pyi", "from/a/__pycache__/y.pyc"] {
            fs::write(folder.join(file), file).unwrap();
        }
        remove_old(&packages).unwrap();
        copy_folder(&from, &packages.join(MODULE)).unwrap();
        let at = |path: &str| packages.join(path).exists();
        assert!(at("poorwill/x.py") && at("poorwill/a/y.pyi") && at("poorwill_x"));
        assert!(!at("poorwill/_native.abi3.so") && !at("poorwill/a/__pycache__") && !at("poorwill/old"));
        assert!(!at("poorwill-0.0.1.dist-info"));
        fs::remove_dir_all(folder).unwrap();
    }
}
