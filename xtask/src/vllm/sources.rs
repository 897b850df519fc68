//! vLLM's Python sources: fetched once as source distributions, of which the modules are kept.
//!
//! A distribution is pinned by its digest in a file of requirements, and pip refuses any other. What is there is
//! complete: it takes its name when all of it has been unpacked, with a seal of the pin that it was fetched by and of the
//! script that unpacked it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::python::environment::Environment;
use crate::steps::{Failure, note, workspace_root};

/// Where the sources lie in cargo's target folder, in a folder for each version.
const FOLDER: &str = "vllm-sources";

/// Where the pins are, in a file for each version.
const PINS: &str = "crates/python/tests/vllm_sources";

/// Unpacks a distribution.
const UNPACK: &str = "xtask/src/vllm/unpack.py";

/// What a complete folder holds its pin and the script in.
const SEAL: &str = "poorwill-sources.txt";

/// What pip takes for the build of a distribution, which needs no PyTorch to state its metadata.
const BUILD: &str = "xtask/src/vllm/sdist";

/// One version's sources, complete or not.
#[derive(Debug)]
pub(super) struct Sources {
    version: String,
    folder: PathBuf,
}

impl Sources {
    pub(super) fn of(version: &str, environment: &Environment) -> Sources {
        Sources { version: version.to_owned(), folder: folder(environment).join(version) }
    }

    /// Fetches what is not there yet.
    pub(super) fn ready(&self, environment: &Environment) -> Result<(), Failure> {
        if self.is_complete() {
            note(&format!("--- vLLM {}: its sources are here", self.version));
            return Ok(());
        }
        // Named so that no two versions, and no version and its archive, have the same.
        let [archive, part] = ["archive", "part"].map(|suffix| self.beside(suffix));
        for stale in [&archive, &part, &self.folder] {
            remove(stale)?;
        }
        let done = self.fetch(environment, &archive).and_then(|()| self.unpack(environment, &archive, &part));
        // Of a failure nothing is left that would be taken for more than it is, or that takes much room.
        let removed = remove(&archive);
        done.and(removed)
    }

    fn is_complete(&self) -> bool {
        self.wanted().is_ok_and(|wanted| fs::read(self.folder.join(SEAL)).is_ok_and(|has| has == wanted))
    }

    /// What the seal says of sources that are complete.
    fn wanted(&self) -> io::Result<Vec<u8>> {
        let [pin, script] = [&*self.pin(), UNPACK].map(|file| fs::read(workspace_root().join(file)));
        Ok([pin?, script?].concat())
    }

    fn fetch(&self, environment: &Environment, into: &Path) -> Result<(), Failure> {
        let pin = self.pin();
        let plainly = ["-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"];
        let alone = ["--no-cache-dir", "--no-deps", "--no-binary=:all:", "--timeout", "30", "--retries", "2"];
        let unbuilt = ["--no-build-isolation", "--ignore-requires-python"];
        let pinned = ["--require-hashes", "--requirement", &pin, "--dest"];
        let all = plainly.into_iter().chain(alone).chain(unbuilt).chain(pinned).map(OsStr::new);
        let build = workspace_root().join(BUILD);
        let fetch =
            environment.python(all.chain([into.as_os_str()])).env("PYTHONPATH", &build.to_string_lossy());
        let fetched = fetch.run();
        fetched.map(drop).map_err(|cause| Failure::Fetch {
            what: format!("vLLM {}'s source distribution, which is some 40 MB,", self.version),
            cause: Box::new(cause),
        })
    }

    fn unpack(&self, environment: &Environment, archive: &Path, part: &Path) -> Result<(), Failure> {
        let script = workspace_root().join(UNPACK);
        environment.python([script.as_os_str(), archive.as_os_str(), part.as_os_str()]).run()?;
        self.wanted()
            .and_then(|wanted| fs::write(part.join(SEAL), wanted))
            .and_then(|()| fs::rename(part, &self.folder))
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
    use super::*;

    /// One that is pinned, or it has no seal.
    const VERSION: &str = "0.20.2";

    fn sources(version: &str, below: &Path) -> Sources {
        Sources { version: version.to_owned(), folder: below.join(version) }
    }

    #[test]
    fn sources_of_another_pin_are_not_complete() {
        let target = crate::toolchain::target_folder().unwrap();
        let below = target.join(format!("vllm-sources-of-{}", std::process::id()));
        let sources = sources(VERSION, &below);
        assert!(!sources.is_complete(), "there are none");
        fs::create_dir_all(&sources.folder).unwrap();
        assert!(!sources.is_complete(), "they have no seal");
        fs::write(sources.folder.join(SEAL), "vllm==0.1.0\n").unwrap();
        assert!(!sources.is_complete(), "they were fetched by another pin");
        fs::copy(workspace_root().join(sources.pin()), sources.folder.join(SEAL)).unwrap();
        assert!(!sources.is_complete(), "another script unpacked them");
        fs::write(sources.folder.join(SEAL), sources.wanted().unwrap()).unwrap();
        assert!(sources.is_complete());
        remove(&below).unwrap();
        remove(&below).unwrap();
    }

    #[test]
    fn an_archive_lies_beside_its_sources() {
        let sources = sources(VERSION, Path::new("/target/vllm-sources"));
        assert_eq!(sources.beside("archive"), Path::new("/target/vllm-sources/0.20.2.archive"));
    }
}
