//! One wheel: built for its tag, checked, and moved to the folder of released wheels.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::library::{COMMAND_EXPORTS, Glibc, Library, MODULE_EXPORTS, OLDEST_GLIBC, PRELOAD_EXPORTS};
use super::licenses;
use crate::python::environment::Environment;
use crate::python::interpreter::oldest;
use crate::python::package::{PACKAGE, PRELOAD_FILE, PROGRAM, SOURCES};
use crate::steps::{Failure, Step, workspace_root};
use crate::toolchain::target_folder;

/// The version of all wheels of this checkout.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

const NAME: &str = "poorwill";
const LIBRARY: &str = "poorwill/_native.abi3.so";

/// The largest wheel, as people fetch it.
const SIZE_MAX_BYTES: u64 = 12_250_000;

/// What maturin packs beside the module, by the names of cargo's files.
const PRELOAD: &str = "libpoorwill_preload.so";

/// Cargo's profile of all that a wheel holds.
const PROFILE: &str = "wheel";

/// The build of both.
const PACKED: [&str; 6] = ["--package", "poorwill-cli", "--bin", PROGRAM, "--package", "poorwill-preload"];

/// Replaces the path of cargo's sources in the library, which differs between machines.
const CARGO_HOME: &str = "/cargo";

/// A wheel of this version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wheel {
    pub(crate) architecture: &'static str,
}

/// A built wheel. It must not be released before it is checked.
#[derive(Debug)]
pub(crate) struct BuiltWheel {
    wheel: Wheel,
    pub(crate) path: PathBuf,
    unpacked: PathBuf,
}

impl Wheel {
    /// Rust's name of its target.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.architecture)
    }

    fn platform() -> String {
        let [major, minor] = OLDEST_GLIBC;
        format!("manylinux_{major}_{minor}")
    }

    /// The Python versions and the platform, as in a wheel's name.
    fn tag(self) -> String {
        let python = oldest().replace('.', "");
        format!("cp{python}-abi3-{}_{}", Wheel::platform(), self.architecture)
    }

    pub(crate) fn file_name(self) -> String {
        format!("{NAME}-{VERSION}-{}.whl", self.tag())
    }

    /// Builds it small and stripped. Maturin refuses a library that does not fit the tag.
    pub(crate) fn build(self, environment: &Environment) -> Result<BuiltWheel, Failure> {
        let folder = environment.beside("dist-build").join(self.architecture);
        make_empty(&folder)?;
        // A later build in the tree must not pack those for another architecture. An editable installation has its own.
        let before = packed().map(|(name, place)| {
            let library = (name == PRELOAD).then(|| fs::read(&place).ok()).flatten();
            (library, place)
        });
        let built = self.build_packed(environment).and_then(|()| self.build_package(environment, &folder));
        for (bytes, path) in before {
            let put_back = match bytes {
                Some(bytes) => fs::write(&path, bytes),
                None if path.exists() => fs::remove_file(&path),
                None => Ok(()),
            };
            put_back.map_err(|cause| Failure::File { path, cause })?;
        }
        built
    }

    /// Builds the command and the library to preload where maturin packs them from.
    fn build_packed(self, environment: &Environment) -> Result<(), Failure> {
        let [major, minor] = OLDEST_GLIBC;
        let target = format!("{}.{major}.{minor}", self.target());
        let zigbuild = environment.folder().join("bin/cargo-zigbuild");
        let arguments = ["build", "--profile", PROFILE, "--locked", "--lib", "--target", &target].into_iter();
        linked_by_zig(Step::program(zigbuild.as_os_str(), arguments.chain(PACKED)), environment)
            .in_environment(environment.folder())
            .run()?;
        let made = self.made()?;
        for (name, place) in packed() {
            let made = made.join(name);
            let folder = place.parent().map_or(Ok(()), fs::create_dir_all);
            folder
                .and_then(|()| fs::copy(&made, &place))
                .map_err(|cause| Failure::File { path: made, cause })?;
        }
        Ok(())
    }

    /// Where cargo leaves what it made.
    fn made(self) -> Result<PathBuf, Failure> {
        Ok(target_folder()?.join(self.target()).join(PROFILE))
    }

    /// The command as it was built. Unpacked from the wheel it would not be executable.
    pub(crate) fn program(self) -> Result<PathBuf, Failure> {
        self.made().map(|folder| folder.join(PROGRAM))
    }

    fn build_package(self, environment: &Environment, folder: &Path) -> Result<BuiltWheel, Failure> {
        let (manifest, target, platform) =
            (format!("{PACKAGE}/Cargo.toml"), self.target(), Wheel::platform());
        let arguments = ["-m", "maturin", "build", "--profile", PROFILE, "--locked", "--zig", "--auditwheel"];
        let chosen =
            ["check", "--compatibility", &platform, "--target", &target, "--manifest-path", &manifest];
        let arguments = arguments.into_iter().chain(chosen).chain(["--out"]).map(OsStr::new);
        linked_by_zig(environment.python(arguments.chain([folder.as_os_str()])), environment).run()?;
        let path = folder.join(self.file_name());
        if !path.is_file() {
            let problem = format!("maturin did not make it; it made {}", names_in(folder).join(", "));
            return Err(Failure::Content { path, problem });
        }
        let unpacked = folder.join("unpacked");
        let unpack = ["-m", "zipfile", "--extract"].map(OsStr::new).into_iter();
        environment.python(unpack.chain([path.as_os_str(), unpacked.as_os_str()])).run()?;
        Ok(BuiltWheel { wheel: self, path, unpacked })
    }
}

impl BuiltWheel {
    /// Checks its size, its tag, its metadata and its libraries. Returns the oldest glibc that it runs with.
    pub(crate) fn check(&self) -> Result<Glibc, Failure> {
        if let Some(problem) = too_large(self.size_bytes()?) {
            return Err(Failure::Content { path: self.path.clone(), problem });
        }
        self.check_metadata()?;
        let about = self.unpacked.join(format!("{NAME}-{VERSION}.dist-info/WHEEL"));
        let text =
            fs::read_to_string(&about).map_err(|cause| Failure::File { path: about.clone(), cause })?;
        if tags(&text) != [self.wheel.tag()] {
            let problem = format!("its tags are {:?}, and not {}", tags(&text), self.wheel.tag());
            return Err(Failure::Content { path: about, problem });
        }
        let strays: Vec<String> = files_below(&self.unpacked.join(NAME))?
            .iter()
            .map(|path| path.strip_prefix(&self.unpacked).unwrap_or(path).to_string_lossy().into_owned())
            .filter(|path| !belongs(path))
            .collect();
        if !strays.is_empty() {
            let problem = format!("it holds what lay about in the tree: {}", strays.join(", "));
            return Err(Failure::Content { path: self.path.clone(), problem });
        }
        self.check_libraries()
    }

    /// Checks that the metadata state what it is, for which Pythons, and under which licence.
    fn check_metadata(&self) -> Result<(), Failure> {
        let folder = self.unpacked.join(format!("{NAME}-{VERSION}.dist-info"));
        let read = |path: PathBuf| {
            fs::read_to_string(&path).map_err(|cause| Failure::File { path: path.clone(), cause })
        };
        let path = folder.join("METADATA");
        let readme = read(workspace_root().join(PACKAGE).join("README.md"))?;
        if let Some(problem) = lacking(&read(path.clone())?, &readme) {
            return Err(Failure::Content { path, problem });
        }
        let source = workspace_root().join(licenses::FILE);
        let path = folder.join("licenses").join(source.file_name().unwrap_or_default());
        if read(path.clone())? != read(source)? {
            let problem = format!("it is not {}", licenses::FILE);
            return Err(Failure::Content { path, problem });
        }
        Ok(())
    }

    /// Checks both libraries and the command.
    fn check_libraries(&self) -> Result<Glibc, Failure> {
        let module = self.check_library(LIBRARY, MODULE_EXPORTS)?;
        let preload = self.check_library(&preload_library(), PRELOAD_EXPORTS)?;
        let command = self.check_library(&program_in_wheel(), COMMAND_EXPORTS)?;
        Ok(module.max(preload).max(command))
    }

    fn check_library(&self, library: &str, exports: &[&str]) -> Result<Glibc, Failure> {
        let path = self.unpacked.join(library);
        let problem = match Library::read(&path)?.checked(exports) {
            Ok(glibc) => {
                let bytes = fs::read(&path).map_err(|cause| Failure::File { path: path.clone(), cause })?;
                let sources = cargo_home().join("registry");
                if !contains(&bytes, sources.as_os_str().as_encoded_bytes()) {
                    return Ok(glibc);
                }
                format!("it names {}, a folder of this machine", sources.display())
            }
            Err(problems) => problems.join("; "),
        };
        Err(Failure::Content { path, problem })
    }

    pub(crate) fn size_bytes(&self) -> Result<u64, Failure> {
        let about = fs::metadata(&self.path);
        about.map(|about| about.len()).map_err(|cause| Failure::File { path: self.path.clone(), cause })
    }

    /// Moves it to the checked wheels, and returns its path.
    pub(crate) fn hand_out(self, folder: &Path) -> Result<PathBuf, Failure> {
        let path = folder.join(self.wheel.file_name());
        fs::rename(&self.path, &path).map(|()| path.clone()).map_err(|cause| Failure::File { path, cause })
    }
}

fn too_large(size_bytes: u64) -> Option<String> {
    (size_bytes > SIZE_MAX_BYTES).then(|| {
        format!("it has {size_bytes} bytes, and may have {SIZE_MAX_BYTES}: see what the command links")
    })
}

/// The tags in a wheel's WHEEL file.
fn tags(about: &str) -> Vec<String> {
    about.lines().filter_map(|line| line.strip_prefix("Tag:")).map(|tag| tag.trim().to_owned()).collect()
}

/// What a wheel's METADATA lack.
fn lacking(metadata: &str, readme: &str) -> Option<String> {
    let (head, description) = metadata.split_once("\n\n").unwrap_or((metadata, ""));
    let oldest = format!("Classifier: Programming Language :: Python :: {}", oldest());
    let wanted = ["Description-Content-Type: text/markdown", "License-File: LICENSE-THIRD-PARTY", &oldest];
    let missing = wanted.iter().find(|wanted| !head.lines().any(|line| line.starts_with(**wanted)));
    match missing {
        Some(missing) => Some(format!("it does not say `{missing}`")),
        None if description.trim() != readme.trim() => Some("its description is not README.md".to_owned()),
        None => None,
    }
}

/// Whether a file of the package is ours, by its name.
fn belongs(path: &str) -> bool {
    let is_python = path.ends_with(".py") || path.ends_with(".pyi") || path.ends_with("/py.typed");
    path == LIBRARY || path == preload_library() || is_python
}

/// What maturin packs beside the module, and where it finds it. The package's data has what it installs as programs.
fn packed() -> [(&'static str, PathBuf); 2] {
    [
        (PROGRAM, Path::new(PACKAGE).join("data/scripts").join(PROGRAM)),
        (PRELOAD, Path::new(SOURCES).join(PRELOAD_FILE)),
    ]
    .map(|(name, place)| (name, workspace_root().join(place)))
}

fn program_in_wheel() -> String {
    format!("{NAME}-{VERSION}.data/scripts/{PROGRAM}")
}

fn preload_library() -> String {
    format!("{NAME}/{PRELOAD_FILE}")
}

/// With the options of all builds that zig links.
fn linked_by_zig(step: Step, environment: &Environment) -> Step {
    let cache = environment.beside("zig").to_string_lossy().into_owned();
    step.env("CARGO_ZIGBUILD_PYTHON_PATH", &environment.interpreter().to_string_lossy())
        .env("CARGO_ZIGBUILD_CACHE_DIR", &cache)
        .env("ZIG_GLOBAL_CACHE_DIR", &cache)
        .env("CARGO_ENCODED_RUSTFLAGS", &remapped(&cargo_home()))
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let all = |entries: fs::ReadDir| entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let paths: io::Result<Vec<PathBuf>> = fs::read_dir(&folder).and_then(all);
        for path in paths.map_err(|cause| Failure::File { path: folder, cause })? {
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    Ok(files)
}

/// Makes the folder, or empties it.
pub(crate) fn make_empty(folder: &Path) -> Result<(), Failure> {
    let removed = if folder.exists() { fs::remove_dir_all(folder) } else { Ok(()) };
    removed
        .and_then(|()| fs::create_dir_all(folder))
        .map_err(|cause| Failure::File { path: folder.to_owned(), cause })
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The folder of cargo's sources of dependencies. Panics name the files that they come from.
pub(crate) fn cargo_home() -> PathBuf {
    match std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()) {
        Some(home) => home.into(),
        None => Path::new(&std::env::var_os("HOME").unwrap_or_else(|| OsString::from("/"))).join(".cargo"),
    }
}

/// Options by which the compiler names no folder of this machine.
fn remapped(cargo_home: &Path) -> String {
    format!("--remap-path-prefix={}={CARGO_HOME}", cargo_home.display())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::workspace_root;

    #[test]
    fn a_wheel_is_named_after_its_tag() {
        let wheel = Wheel { architecture: "x86_64" };
        assert_eq!(wheel.tag(), "cp310-abi3-manylinux_2_28_x86_64");
        assert_eq!(wheel.file_name(), format!("poorwill-{VERSION}-{}.whl", wheel.tag()));
        assert_eq!(wheel.target(), "x86_64-unknown-linux-gnu");
    }

    #[test]
    fn a_large_wheel_is_refused() {
        assert_eq!(too_large(SIZE_MAX_BYTES), None);
        let problem = too_large(SIZE_MAX_BYTES + 1).unwrap();
        assert!(problem.starts_with("it has 12250001 bytes, and may have 12250000"), "{problem}");
    }

    #[test]
    fn the_backend_packs_the_same_files_at_the_same_places() {
        let backend = workspace_root().join(PACKAGE).join("backend/poorwill_backend.py");
        let text = fs::read_to_string(backend).unwrap();
        for (_, place) in packed() {
            let place = place.strip_prefix(workspace_root().join(PACKAGE)).unwrap().display().to_string();
            assert!(text.contains(&format!("Path(\"{place}\")")), "{place}");
        }
        let pairs = PACKED.chunks(2).map(|pair| format!("\"{}\"", pair.join("\", \"")));
        for pair in pairs {
            assert!(text.contains(&pair), "{pair}");
        }
    }

    #[test]
    fn the_tags_of_a_wheel_are_read() {
        let about = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp310-abi3-a\nTag: cp310-abi3-b\n";
        assert_eq!(tags(about), ["cp310-abi3-a", "cp310-abi3-b"]);
        assert_eq!(tags("Wheel-Version: 1.0\n"), [""; 0]);
    }

    #[test]
    fn missing_metadata_are_named() {
        let oldest = oldest();
        let output = format!(
            "Name: poorwill\nClassifier: Programming Language :: Python :: {oldest}\n\
             License-File: LICENSE-THIRD-PARTY\n\
             Description-Content-Type: text/markdown; charset=UTF-8; variant=GFM\n\n# Poorwill\n\nWords.\n"
        );
        let readme = "# Poorwill\n\nWords.\n";
        assert_eq!(lacking(&output, readme), None);
        for missing in ["Classifier", "License-File", "Description-Content-Type"] {
            let problem = lacking(&output.replace(missing, "X"), readme).unwrap();
            assert!(problem.contains(&format!("does not say `{missing}")), "{problem}");
        }
        assert_eq!(lacking(&output, "Other").unwrap(), "its description is not README.md");
        assert!(lacking("", readme).is_some());
    }

    #[test]
    fn stray_files_do_not_belong_into_a_wheel() {
        for path in
            ["poorwill/__init__.py", "poorwill/_native.pyi", "poorwill/py.typed", LIBRARY, &preload_library()]
        {
            assert!(belongs(path), "{path}");
        }
        for path in ["poorwill/__pycache__/demo.cpython-311.pyc", "poorwill/_native.so", "poorwill/core"] {
            assert!(!belongs(path), "{path}");
        }
        let found = files_below(&workspace_root().join("xtask/src/dist")).unwrap();
        assert!(found.iter().any(|path| path.ends_with("dist/wheel.rs")), "{found:?}");
        assert!(files_below(Path::new("/poorwill-no-such-folder")).is_err());
    }

    #[test]
    fn folders_of_this_machine_are_found_in_bytes() {
        assert!(contains(b"\0/home/me/.cargo/registry/src\0", b"/home/me/.cargo/registry"));
        assert!(!contains(b"\0/cargo/registry/src\0", b"/home/me/.cargo/registry"));
        let flag = remapped(Path::new("/home/a b/.cargo"));
        assert_eq!(flag, "--remap-path-prefix=/home/a b/.cargo=/cargo");
    }
}
