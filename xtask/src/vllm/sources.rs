//! An engine's Python sources: fetched once as an archive of a release, of which the modules are kept.
//!
//! A file of requirements pins a distribution by its digest, and pip refuses any other. A folder gets its name only
//! when it is complete. Its seal names the pin that it was fetched by and the script that unpacked it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::python::environment::Environment;
use crate::steps::{Failure, note, workspace_root};

/// Whose sources, and how they are published.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) name: &'static str,
    /// In cargo's target folder, with one folder per version.
    folder: &'static str,
    /// The folder of the pins, with one file per version.
    pins: &'static str,
    /// The module of the tests that lists its versions.
    pub(super) versions: &'static str,
    /// Has pip fetch one of its archives, whatever this machine is.
    archive: &'static [&'static str],
}

pub(super) const VLLM: Engine = Engine {
    name: "vLLM",
    folder: "vllm-sources",
    pins: "crates/python/tests/vllm_sources",
    versions: "vllm_sources.versions",
    archive: &["--no-binary=:all:", "--no-build-isolation", "--ignore-requires-python"],
};

/// It publishes wheels only.
pub(super) const SGLANG: Engine = Engine {
    name: "SGLang",
    folder: "sglang-sources",
    pins: "crates/python/tests/sglang_sources",
    versions: "sglang_sources.versions",
    archive: &["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_34_x86_64"],
};

/// Unpacks an archive.
const UNPACK: &str = "xtask/src/vllm/unpack.py";

/// The file in a complete folder with its pin and the script.
const SEAL: &str = "poorwill-sources.txt";

/// Replaces a distribution's build backend, so that pip reads its metadata without PyTorch.
const BUILD: &str = "xtask/src/vllm/sdist";

/// One version's sources, complete or not.
#[derive(Debug)]
pub(super) struct Sources {
    engine: &'static Engine,
    version: String,
    folder: PathBuf,
}

impl Sources {
    pub(super) fn of(engine: &'static Engine, version: &str, environment: &Environment) -> Sources {
        Sources { engine, version: version.to_owned(), folder: engine.folder(environment).join(version) }
    }

    /// Fetches it if it is missing.
    pub(super) fn ready(&self, environment: &Environment) -> Result<(), Failure> {
        if self.is_complete() {
            note(&format!("--- {} {}: its sources are here", self.engine.name, self.version));
            return Ok(());
        }
        // Distinct names for versions and archives.
        let [archive, part] = ["archive", "part"].map(|suffix| self.beside(suffix));
        for stale in [&archive, &part, &self.folder] {
            remove(stale)?;
        }
        let done = self.fetch(environment, &archive).and_then(|()| self.unpack(environment, &archive, &part));
        // After a failure, remove what could be taken for complete sources, or takes much space.
        let removed = remove(&archive);
        done.and(removed)
    }

    fn is_complete(&self) -> bool {
        self.wanted().is_ok_and(|wanted| fs::read(self.folder.join(SEAL)).is_ok_and(|has| has == wanted))
    }

    /// The seal of complete sources.
    fn wanted(&self) -> io::Result<Vec<u8>> {
        let [pin, script] = [&*self.pin(), UNPACK].map(|file| fs::read(workspace_root().join(file)));
        Ok([pin?, script?].concat())
    }

    fn fetch(&self, environment: &Environment, into: &Path) -> Result<(), Failure> {
        let pin = self.pin();
        let plainly = ["-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"];
        let alone = ["--no-cache-dir", "--no-deps", "--timeout", "30", "--retries", "2"];
        let archive = self.engine.archive.iter().copied();
        let pinned = ["--require-hashes", "--requirement", &pin, "--dest"];
        let all = plainly.into_iter().chain(alone).chain(archive).chain(pinned).map(OsStr::new);
        let build = workspace_root().join(BUILD);
        let fetch =
            environment.python(all.chain([into.as_os_str()])).env("PYTHONPATH", &build.to_string_lossy());
        let fetched = fetch.run();
        fetched.map(drop).map_err(|cause| Failure::Fetch {
            what: format!("{} {}'s release, which is some 40 MB,", self.engine.name, self.version),
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
        format!("{}/{}.txt", self.engine.pins, self.version)
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.folder.with_file_name(format!("{}.{suffix}", self.version))
    }
}

impl Engine {
    /// The folder of all versions.
    pub(super) fn folder(&self, environment: &Environment) -> PathBuf {
        environment.beside(self.folder)
    }
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

    /// A pinned version; otherwise it has no seal.
    const VERSION: &str = "0.20.2";

    fn sources(version: &str, below: &Path) -> Sources {
        Sources { engine: &VLLM, version: version.to_owned(), folder: below.join(version) }
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
