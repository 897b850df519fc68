//! What survives the service: a file for each engine that it started, which says which process that is.
//!
//! It is written twice: before there is a process, with a mark that the process will have in its environment, and again
//! with its number. So there is no moment at which the service may be killed and leave an engine that nobody knows.
//!
//! Promises: the file is whole or not there, whenever the service or the machine ends. No two models have one file.
//! Only its owner may read it, for commands may have secrets in them.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::SuperviseError;
use super::proc::{self, Identity};

/// The name of the variable by which an engine is known that was only just started.
pub(super) const MARK: &str = "POORWILL_ENGINE";

/// The longest name that is kept as it is.
const NAME_MAX_BYTES: usize = 200;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Which start of the machine this is about.
    boot: String,
    /// What its process has in its environment, as [`MARK`].
    pub(super) mark: String,
    /// Nothing, and 0, until there is a process.
    pid: Option<u32>,
    started_ticks: u64,
    /// For people.
    command: Vec<String>,
    /// What its output goes into, as the system names it.
    pub(super) output: Option<String>,
    /// Who reads that.
    reader: (u32, u64),
}

/// The file.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
}

/// A file that is to become the state when there is something to say.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    of: &'a StateFile,
    path: PathBuf,
    file: File,
}

impl Record {
    /// For an engine that is about to be started.
    pub(super) fn new(command: &[String], output: Option<String>) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = proc::identity(std::process::id())?;
        let own = own.ok_or_else(|| io::Error::other("/proc does not show this process"))?;
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            boot: proc::boot(),
            mark: format!("{}-{}-{nth}", own.pid, own.started_ticks),
            pid: None,
            started_ticks: 0,
            command: command.to_vec(),
            output,
            reader: (own.pid, own.started_ticks),
        })
    }

    /// For the same engine, once it is there.
    pub(super) fn with(mut self, one: Identity) -> Self {
        (self.pid, self.started_ticks) = (Some(one.pid), one.started_ticks);
        self
    }

    /// Its process, if that is still there.
    pub(super) fn process(&self) -> io::Result<Option<Identity>> {
        if self.boot != proc::boot() {
            return Ok(None);
        }
        let Some(pid) = self.pid else { return proc::marked(&format!("{MARK}={}", self.mark)) };
        let one = Identity { pid, started_ticks: self.started_ticks };
        let is_possible = pid > 1 && pid != std::process::id();
        Ok((is_possible && proc::is_alive(one)?).then_some(one))
    }

    /// Whether whoever read its output is still there.
    pub(super) fn has_reader(&self) -> io::Result<bool> {
        let (pid, started_ticks) = self.reader;
        proc::is_alive(Identity { pid, started_ticks })
    }

    /// Which process it is, or was, for people.
    pub(super) fn who(&self) -> String {
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

    /// What it says, if it is there.
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

    /// Has everything ready that can fail before there is a process to write about.
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
    /// Makes it the state.
    pub(super) fn commit(mut self, record: &Record) -> Result<(), SuperviseError> {
        let failed = |error: &io::Error| self.of.failed("write", &self.of.path, error);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(&error.into()))?;
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_all());
        let moved = written.and_then(|()| fs::rename(&self.path, &self.of.path));
        let folder = self.of.path.parent().map(File::open);
        let kept = moved.and_then(|()| folder.map_or(Ok(()), |folder| folder?.sync_all()));
        kept.map_err(|error| self.of.failed("write", &self.of.path, &error))
    }
}

/// A name of a file that no other model has, and that is in no other folder.
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
        // FNV-1a: the same with every build.
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
