//! vLLM's Python sources: fetched once as wheels, of which little is kept.
//!
//! A wheel is pinned by its digest in a file of requirements, and pip refuses any other. What is there is complete: it
//! takes its name when all of it has been unpacked, with the pin that it was fetched by beside it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::python::environment::Environment;
use crate::steps::{Failure, note, workspace_root};

/// Where the sources lie in cargo's target folder, in a folder for each version.
const FOLDER: &str = "vllm-sources";

/// Where the pins are, in a file for each version.
const PINS: &str = "crates/python/tests/vllm_sources";

/// Unpacks a wheel.
const UNPACK: &str = "xtask/src/vllm/unpack.py";

/// What a complete folder holds its pin in.
const SEAL: &str = "poorwill-sources.txt";

/// Wheels for what vLLM has run on; only what is in all of them is read.
const PLATFORMS: [&str; 2] = ["manylinux_2_35_x86_64", "manylinux_2_28_x86_64"];

/// One version's sources, complete or not.
#[derive(Debug)]
pub(super) struct Sources {
    version: &'static str,
    folder: PathBuf,
}

impl Sources {
    pub(super) fn of(version: &'static str, environment: &Environment) -> Sources {
        Sources { version, folder: folder(environment).join(version) }
    }

    /// Fetches what is not there yet.
    pub(super) fn ready(&self, environment: &Environment) -> Result<(), Failure> {
        if self.is_complete() {
            note(&format!("--- vLLM {}: its sources are here", self.version));
            return Ok(());
        }
        // Named so that no two versions, and no version and its wheel, have the same.
        let [wheel, part] = ["wheel", "part"].map(|suffix| self.beside(suffix));
        for stale in [&wheel, &part, &self.folder] {
            remove(stale)?;
        }
        let done = self.fetch(environment, &wheel).and_then(|()| self.unpack(environment, &wheel, &part));
        // Of a failure nothing is left that would be taken for more than it is, or that takes much room.
        let removed = remove(&wheel);
        done.and(removed)
    }

    fn is_complete(&self) -> bool {
        let pin = fs::read(workspace_root().join(self.pin()));
        pin.is_ok_and(|pin| fs::read(self.folder.join(SEAL)).is_ok_and(|sealed| sealed == pin))
    }

    fn fetch(&self, environment: &Environment, into: &Path) -> Result<(), Failure> {
        let pin = self.pin();
        let plainly = ["-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"];
        let alone =
            ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--timeout", "30", "--retries", "2"];
        let python = ["--python-version", "3.12", "--implementation", "cp"];
        let platforms = PLATFORMS.into_iter().flat_map(|platform| ["--platform", platform]);
        let pinned = ["--require-hashes", "--requirement", &pin, "--dest"];
        let all = plainly.into_iter().chain(alone).chain(python).chain(platforms).chain(pinned);
        let fetched = environment.python(all.map(OsStr::new).chain([into.as_os_str()])).run();
        fetched.map(drop).map_err(|cause| Failure::Fetch {
            what: format!("vLLM {}'s wheel, which is some 300 MB,", self.version),
            cause: Box::new(cause),
        })
    }

    fn unpack(&self, environment: &Environment, wheel: &Path, part: &Path) -> Result<(), Failure> {
        let script = workspace_root().join(UNPACK);
        environment.python([script.as_os_str(), wheel.as_os_str(), part.as_os_str()]).run()?;
        let sealed = fs::copy(workspace_root().join(self.pin()), part.join(SEAL));
        sealed
            .and_then(|_| fs::rename(part, &self.folder))
            .map_err(|cause| Failure::File { path: part.to_owned(), cause })
    }

    /// The file of requirements, from the workspace's root.
    fn pin(&self) -> String {
        format!("{PINS}/{}.txt", self.version)
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.folder.with_file_name(format!("{}.{suffix}", self.version))
    }
}

/// Where all versions are.
pub(super) fn folder(environment: &Environment) -> PathBuf {
    environment.beside(FOLDER)
}

fn remove(folder: &Path) -> Result<(), Failure> {
    if !folder.exists() {
        return Ok(());
    }
    fs::remove_dir_all(folder).map_err(|cause| Failure::File { path: folder.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    use super::super::VERSIONS;
    use super::*;

    fn sources(version: &'static str, below: &Path) -> Sources {
        Sources { version, folder: below.join(version) }
    }

    #[test]
    fn every_version_is_pinned_by_one_digest() {
        for version in VERSIONS {
            let pin =
                fs::read_to_string(workspace_root().join(sources(version, Path::new("")).pin())).unwrap();
            let pins: Vec<&str> = pin.lines().filter(|line| !line.starts_with('#')).collect();
            let [pin] = pins[..] else { panic!("{pin}") };
            let digest = pin.strip_prefix(&format!("vllm=={version} --hash=sha256:")).unwrap();
            assert!(digest.len() == 64 && digest.chars().all(|c| c.is_ascii_hexdigit()), "{digest}");
        }
    }

    #[test]
    fn sources_of_another_pin_are_not_complete() {
        let target = crate::toolchain::target_folder().unwrap();
        let below = target.join(format!("vllm-sources-of-{}", std::process::id()));
        let sources = sources(VERSIONS[0], &below);
        assert!(!sources.is_complete(), "there are none");
        fs::create_dir_all(&sources.folder).unwrap();
        assert!(!sources.is_complete(), "they have no seal");
        fs::write(sources.folder.join(SEAL), "vllm==0.1.0\n").unwrap();
        assert!(!sources.is_complete(), "they were fetched by another pin");
        fs::copy(workspace_root().join(sources.pin()), sources.folder.join(SEAL)).unwrap();
        assert!(sources.is_complete());
        remove(&below).unwrap();
        remove(&below).unwrap();
    }

    #[test]
    fn a_wheel_lies_beside_its_sources() {
        let sources = sources("0.20.2", Path::new("/target/vllm-sources"));
        assert_eq!(sources.beside("wheel"), Path::new("/target/vllm-sources/0.20.2.wheel"));
    }
}
