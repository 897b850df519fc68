//! State that survives the service: a file for each started engine, which identifies its process.
//!
//! The file is written before the start, with a mark for the process's environment, and after it, with the process id.
//! So no engine is lost, whenever the service is killed.
//!
//! Promises: the file is complete or absent, whenever the service or the machine ends. No two models share a file. Only
//! its owner can read it, since commands may contain secrets.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::error::SuperviseError;
use super::proc::{self, Identity};

/// The environment variable that identifies an engine that has just started.
pub(super) const MARK: &str = "POORWILL_ENGINE";

/// Longest model name to use unchanged.
const NAME_MAX_BYTES: usize = 200;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    boot: String,
    /// The value of [`MARK`] in the engine's environment.
    pub(super) mark: String,
    /// `None`, and 0 ticks, until the process exists.
    pid: Option<u32>,
    started_ticks: u64,
    /// For readers of the file.
    command: Vec<String>,
    /// The name of its output pipe.
    pub(super) output: Option<String>,
    /// The process that reads it: id and start time.
    reader: (u32, u64),
}

#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
}

/// A new file, ready to replace the old one.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    of: &'a StateFile,
    path: PathBuf,
    file: File,
}

impl Record {
    /// For an engine before its start.
    pub(super) fn new(command: &[String], output: Option<String>) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = proc::identity(std::process::id())?;
        let own = own.ok_or_else(|| io::Error::other("/proc does not show this process"))?;
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            boot: proc::boot(),
            mark: format!("{}-{}-{nth}", own.pid, own.start_ticks),
            pid: None,
            started_ticks: 0,
            command: command.to_vec(),
            output,
            reader: (own.pid, own.start_ticks),
        })
    }

    /// For the same engine after its start.
    pub(super) fn with(mut self, one: Identity) -> Self {
        (self.pid, self.started_ticks) = (Some(one.pid), one.start_ticks);
        self
    }

    /// `None` if it runs no more.
    pub(super) fn process(&self) -> io::Result<Option<Identity>> {
        if self.boot != proc::boot() {
            return Ok(None);
        }
        let Some(pid) = self.pid else { return proc::marked(&format!("{MARK}={}", self.mark)) };
        let one = Identity { pid, start_ticks: self.started_ticks };
        let is_possible = pid > 1 && pid != std::process::id();
        Ok((is_possible && proc::is_alive(one)?).then_some(one))
    }

    pub(super) fn has_reader(&self) -> io::Result<bool> {
        let (pid, start_ticks) = self.reader;
        proc::is_alive(Identity { pid, start_ticks })
    }

    pub(super) fn description(&self) -> String {
        match self.pid {
            Some(pid) => format!("process {pid} of an earlier service"),
            None => "what an earlier service was about to start".to_owned(),
        }
    }
}

impl StateFile {
    pub(super) fn of(model: &str, folder: &Path) -> Self {
        Self { path: folder.join(format!("{}.json", file_name(model))) }
    }

    /// `None` if there is no file.
    pub(super) fn read(&self) -> Result<Option<Record>, SuperviseError> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failed("read", &self.path, &error)),
        };
        let record = serde_json::from_slice(&text).map_err(|error| SuperviseError::State {
            doing: "read",
            path: self.path.clone(),
            reason: format!("{error}; if no engine of it runs any more, remove the file"),
        })?;
        Ok(Some(record))
    }

    /// Opens the new file, in a folder that is made where it is missing.
    pub(super) fn prepare(&self) -> Result<Prepared<'_>, SuperviseError> {
        if let Some(folder) = self.path.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|error| self.failed("make the folder", folder, &error))?;
        }
        let path = self.path.with_extension("json.new");
        let options = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        match options {
            Ok(file) => Ok(Prepared { of: self, path, file }),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    pub(super) fn remove(&self) -> Result<(), SuperviseError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(self.failed("remove", &self.path, &error))
            }
            _ => Ok(()),
        }
    }

    fn failed(&self, doing: &'static str, path: &Path, error: &io::Error) -> SuperviseError {
        SuperviseError::State { doing, path: path.into(), reason: error.to_string() }
    }
}

impl Prepared<'_> {
    pub(super) fn commit(mut self, record: &Record) -> Result<(), SuperviseError> {
        let failed = |error: &io::Error| self.of.failed("write", &self.of.path, error);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(&error.into()))?;
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_all());
        let moved = written.and_then(|()| fs::rename(&self.path, &self.of.path));
        if moved.is_err() {
            // What there is of it takes space. That it stays is no further mistake.
            let _left = fs::remove_file(&self.path);
        }
        let folder = self.of.path.parent().map(File::open);
        let kept = moved.and_then(|()| folder.map_or(Ok(()), |folder| folder?.sync_all()));
        kept.map_err(|error| self.of.failed("write", &self.of.path, &error))
    }
}

/// Unique, and safe as a file name.
pub(crate) fn file_name(model: &str) -> String {
    let mut name = String::new();
    for byte in model.bytes() {
        let is_plain =
            byte.is_ascii_alphanumeric() || b"-_".contains(&byte) || (byte == b'.' && !name.is_empty());
        if is_plain {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02x}"));
        }
    }
    if name.len() > NAME_MAX_BYTES {
        // FNV-1a: stable across builds.
        let mix = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = model.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
        name.truncate(NAME_MAX_BYTES);
        name.push_str(&format!("~{hash:016x}"));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_and_differ() {
        let long = "m".repeat(1000);
        let names = [
            "one",
            "Org/Large-70B:v1",
            "Org%2fLarge",
            "Org/Large",
            "..",
            ".",
            "../x",
            "é",
            &long,
            &long[1..],
        ];
        let safe: Vec<String> = names.iter().map(|name| file_name(name)).collect();
        for (nth, name) in safe.iter().enumerate() {
            assert!(!name.starts_with('.') && !name.contains('/') && name.len() < 230, "{name}");
            assert!(!safe[..nth].contains(name), "{name}");
        }
        assert_eq!(safe[..2], ["one", "Org%2fLarge-70B%3av1"]);
    }
}
