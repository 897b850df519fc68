//! The journal on disk: a file for each set, written as a whole or not at all.
//!
//! A folder that is removed meanwhile is made again, and it is checked at each use. What has an entry's name and cannot
//! be one, a directory or a FIFO too, is set aside, and hinders no other. What cannot be read now keeps its name, and is named.
//!
//! The promise needs an order, and no disk. An entry has its name before the first lock or restore that it is about, so that
//! another caller finds it. It means nothing after the system's end, which ends its processes, too. So nothing waits for the
//! disk; what a loss of power leaves empty is of a system that has ended.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use poorwill_core::hibernation::plan::{Journal, JournalEntry, JournalError, ProcessKey};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::error::HibernateError;
use super::identity::PidScope;
use super::locks::Locks;
use super::processes::Processes;
use crate::private_folder;

const EXTENSION: &str = "set";

/// No entry is as large.
const ENTRY_BYTES_MAX: u64 = 4 << 20;

/// Entries of one name that stay aside.
const ASIDE_MAX: usize = 100;

static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// A folder with the entries of sets, of this user alone.
#[derive(Debug)]
pub(super) struct JournalFolder {
    folder: PathBuf,
    /// The processes that its caller can name.
    of: String,
    place: PidScope,
    set_aside: Mutex<Vec<PathBuf>>,
}

/// Of any version's entry.
#[derive(Debug, Deserialize)]
struct Placed {
    place: PidScope,
}

/// What is in a file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    of: String,
    place: PidScope,
    #[serde(flatten)]
    entry: JournalEntry,
}

/// What a file is.
enum EntryFile {
    Here(Box<Record>),
    /// Its processes have ended with their system.
    OfAnotherStart,
    Unreadable,
}

impl JournalFolder {
    /// Opens a folder, which it makes if there is none. Entries of other starts of the system go.
    pub(super) fn open(folder: Option<&Path>, processes: &Processes) -> Result<Self, HibernateError> {
        let folder = folder.map_or_else(default_folder, Path::to_owned);
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        make(&folder)?;
        let of = match processes {
            Processes::Cuda => "cuda".to_owned(),
            Processes::Host(folder) => format!("host:{}", absolute(folder).display()),
        };
        let journal =
            Self { folder: absolute(&folder), of, place: PidScope::here(), set_aside: Mutex::default() };
        journal.check_writable().map_err(|source| HibernateError::Journal {
            action: "write into the folder",
            path: folder,
            source,
        })?;
        journal.records()?;
        Ok(journal)
    }

    /// Made again if it is gone: the system may remove what is temporary, and others may put something in its place.
    pub(super) fn folder(&self) -> Result<&Path, HibernateError> {
        make(&self.folder)?;
        Ok(&self.folder)
    }

    /// Entries that were not understood, under their new names, and those left under their own: what cannot be renamed, or
    /// cannot be read now.
    pub(super) fn set_aside(&self) -> Vec<PathBuf> {
        self.set_aside.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All entries whose processes this caller can name.
    pub(super) fn entries(&self) -> Result<Vec<JournalEntry>, HibernateError> {
        Ok(self
            .records()?
            .into_iter()
            .filter(|(_, record)| self.is_own(record))
            .map(|(_, record)| record.entry)
            .collect())
    }

    /// An entry as it is now.
    pub(super) fn entry(&self, id: ProcessKey) -> Result<Option<JournalEntry>, HibernateError> {
        Ok(self.entries()?.into_iter().find(|entry| entry.id() == id))
    }

    fn is_own(&self, record: &Record) -> bool {
        record.of == self.of && record.place == self.place
    }

    fn records(&self) -> Result<Vec<(PathBuf, Record)>, HibernateError> {
        let failed =
            |path: &Path, source| HibernateError::Journal { action: "read", path: path.to_owned(), source };
        let mut records = Vec::new();
        let folder = self.folder()?;
        for found in fs::read_dir(folder).map_err(|error| failed(folder, error))? {
            let path = found.map_err(|error| failed(folder, error))?.path();
            if path.extension().is_none_or(|extension| extension != EXTENSION) {
                continue;
            }
            let entry = match bytes_of(&path) {
                Ok(bytes) => self.read(&bytes),
                // Another caller has removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if is_of_caller(&error) => return Err(failed(&path, error)),
                Err(error) if is_no_entry(&error) => EntryFile::Unreadable,
                // It may be a good one, that cannot be read now.
                Err(_) => {
                    self.note_aside(path);
                    continue;
                }
            };
            match entry {
                EntryFile::Here(record) => records.push((path, *record)),
                EntryFile::OfAnotherStart => drop(fs::remove_file(path)),
                EntryFile::Unreadable => self.put_aside(path),
            }
        }
        Ok(records)
    }

    fn read(&self, bytes: &[u8]) -> EntryFile {
        if bytes.iter().all(|byte| *byte == 0) {
            return EntryFile::OfAnotherStart;
        }
        let place = serde_json::from_slice(bytes).map(|placed: Placed| placed.place);
        if place.is_ok_and(|place| place.boot != self.place.boot) {
            return EntryFile::OfAnotherStart;
        }
        serde_json::from_slice(bytes)
            .map_or(EntryFile::Unreadable, |record| EntryFile::Here(Box::new(record)))
    }

    /// What cannot be renamed is skipped where it is.
    fn put_aside(&self, path: PathBuf) {
        let names = (0_u64..).map(|number| match number {
            0 => path.with_extension("unreadable"),
            more => path.with_extension(format!("{more}.unreadable")),
        });
        let is_free = |aside: &PathBuf| fs::symlink_metadata(aside).is_err();
        let Some(aside) = names.take(ASIDE_MAX).find(is_free) else { return self.note_aside(path) };
        let left = match fs::rename(&path, &aside) {
            Ok(()) => aside,
            Err(error) if error.kind() == ErrorKind::NotFound => return,
            Err(_) => path,
        };
        self.note_aside(left);
    }

    /// Named to the caller, once.
    fn note_aside(&self, left: PathBuf) {
        let mut all = self.set_aside.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains(&left) {
            all.push(left);
        }
    }

    fn path_of(&self, entry: &JournalEntry) -> PathBuf {
        let ProcessKey { pid, start_ticks } = entry.id();
        self.folder.join(format!("{pid}-{start_ticks}.{EXTENSION}"))
    }

    fn check_writable(&self) -> io::Result<()> {
        self.put(&self.folder.join(format!("check-{}", std::process::id())), b"").and_then(fs::remove_file)
    }

    /// Writes beside `path`, then renames.
    fn put(&self, path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
        let (making, mut file) = self.new_file()?;
        let written = file.write_all(bytes).and_then(|()| fs::rename(&making, path));
        if written.is_err() {
            let _ = fs::remove_file(&making);
        }
        written.map(|()| path.to_owned())
    }

    /// A file that was not there, nor a link of its name.
    fn new_file(&self) -> io::Result<(PathBuf, File)> {
        loop {
            let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
            let making = self.folder.join(format!("{}-{number}.making", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&making) {
                // Of a process that had this number before.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                made => return made.map(|file| (making, file)),
            }
        }
    }

    /// A process belongs to one set: where it is in another entry, that one is out of date.
    fn remove_others(&self, entry: &JournalEntry) -> Result<(), HibernateError> {
        for (path, record) in self.records()? {
            let shares = record
                .entry
                .processes
                .iter()
                .any(|process| entry.processes.iter().any(|other| other.key == process.key));
            if self.is_own(&record) && record.entry.id() != entry.id() && shares {
                fs::remove_file(&path).map_err(|source| HibernateError::Journal {
                    action: "remove",
                    path,
                    source,
                })?;
            }
        }
        Ok(())
    }
}

impl Journal for JournalFolder {
    fn write(&self, entry: &JournalEntry) -> Result<(), JournalError> {
        self.folder().map_err(|error| JournalError::new(poorwill_core::chain(&error)))?;
        let record = Record { of: self.of.clone(), place: self.place.clone(), entry: entry.clone() };
        let path = self.path_of(entry);
        let bytes = serde_json::to_vec(&record).map_err(|error| JournalError::new(error.to_string()))?;
        self.put(&path, &bytes).map_err(|error| JournalError::new(format!("{}: {error}", path.display())))?;
        self.remove_others(entry).map_err(|error| JournalError::new(poorwill_core::chain(&error)))
    }

    fn remove(&self, entry: &JournalEntry) -> Result<(), JournalError> {
        let path = self.path_of(entry);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(JournalError::new(format!("{}: {error}", path.display())))
            }
            _ => Ok(()),
        }
    }

    fn lock_devices(&self, uuids: &BTreeSet<&str>) -> Result<Box<dyn Send>, JournalError> {
        let locks = self.folder().and_then(|folder| Locks::take_devices(folder, uuids.iter().copied()));
        let locks = locks.map_err(|error| JournalError::new(poorwill_core::chain(&error)))?;
        Ok(Box::new(locks))
    }
}

/// Of a regular file of this user. A FIFO is not waited for, and no link is followed.
fn bytes_of(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != geteuid().as_raw() || found.len() > ENTRY_BYTES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    file.take(ENTRY_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether this process lacks something, and the entry may be good.
fn is_of_caller(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
        || error.kind() == ErrorKind::OutOfMemory
}

/// Whether this is known not to be an entry: no regular file of this user, too long, a link, or a socket.
fn is_no_entry(error: &io::Error) -> bool {
    error.kind() == ErrorKind::InvalidData
        || matches!(Errno::from_io_error(error), Some(Errno::LOOP | Errno::NXIO))
}

fn default_folder() -> PathBuf {
    let runtime =
        std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let own = || PathBuf::from(format!("/tmp/poorwill-{}", geteuid().as_raw()));
    runtime.map_or_else(own, |folder| folder.join("poorwill")).join("hibernate")
}

/// The folder as it is, or as it would be from here.
fn absolute(folder: &Path) -> PathBuf {
    fs::canonicalize(folder).or_else(|_| std::path::absolute(folder)).unwrap_or_else(|_| folder.to_owned())
}

fn make(folder: &Path) -> Result<(), HibernateError> {
    private_folder::make(folder).map_err(|(action, source)| HibernateError::Journal {
        action,
        path: folder.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use poorwill_core::hibernation::plan::{SetPhase, SetProcess};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn entry(pids: &[u32], phase: SetPhase) -> JournalEntry {
        let key = |&pid| ProcessKey { pid, start_ticks: u64::from(pid) };
        JournalEntry::new(pids.iter().map(key).map(SetProcess::from), phase)
    }

    fn open(folder: &Path) -> JournalFolder {
        JournalFolder::open(Some(folder), &Processes::Cuda).unwrap()
    }

    #[test]
    fn entries_are_found_by_another_caller() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("made");
        let entries = [entry(&[7, 5], SetPhase::Hibernating), entry(&[6], SetPhase::Hibernated)];
        for entry in &entries {
            open(&folder).write(entry).unwrap();
        }
        let journal = open(&folder);
        let mut found = journal.entries().unwrap();
        found.sort_by_key(JournalEntry::id);
        assert_eq!(found, entries);
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);

        let later = entry(&[5, 7], SetPhase::Resuming);
        journal.write(&later).unwrap();
        assert_eq!(journal.entry(later.id()).unwrap(), Some(later.clone()));
        journal.remove(&later).unwrap();
        journal.remove(&later).unwrap();
        assert_eq!(journal.entries().unwrap(), entries[1..]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_process_is_in_one_entry() {
        let folder = tempfile::tempdir().unwrap();
        let journal = open(folder.path());
        journal.write(&entry(&[5, 6], SetPhase::Hibernated)).unwrap();
        let later = entry(&[6, 7], SetPhase::Hibernating);
        journal.write(&later).unwrap();
        assert_eq!(journal.entries().unwrap(), [later]);
    }

    #[test]
    fn entries_of_other_places_and_processes_are_not_ones_own() {
        let folder = tempfile::tempdir().unwrap();
        let journal = open(folder.path());
        let own = entry(&[5], SetPhase::Hibernating);
        journal.write(&own).unwrap();
        let host = JournalFolder::open(Some(folder.path()), &Processes::Host("/engines".into())).unwrap();
        assert_eq!(host.entries().unwrap(), []);
        let path = journal.path_of(&own);
        let rewrite = |from: &str, to: &str| {
            let text = fs::read_to_string(&path).unwrap();
            fs::write(&path, text.replace(from, to)).unwrap();
        };
        rewrite(&journal.place.namespace, "pid:[1]");
        assert_eq!((open(folder.path()).entries().unwrap(), path.exists()), (vec![], true), "of a container");
        rewrite(&journal.place.boot, "an earlier one");
        assert_eq!((open(folder.path()).entries().unwrap(), path.exists()), (vec![], false));
    }

    #[test]
    fn a_folder_that_cannot_be_trusted_or_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path, words: &[&str]| {
            let error = JournalFolder::open(Some(path), &Processes::Cuda).unwrap_err();
            let message = poorwill_core::chain(&error);
            assert_eq!(error.code(), "journal");
            for word in words {
                assert!(message.contains(word), "{word}: {message}");
            }
        };
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        refused(&file, &["make the folder", "choose another folder"]);
        refused(&file.join("below"), &["make the folder"]);
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        refused(&open, &["others may write", "777"]);
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        refused(&link, &["use the folder"]);
        refused(Path::new("/proc"), &["/proc"]);
    }

    #[test]
    fn a_folder_that_is_replaced_later_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = open(&path);
        let written = entry(&[5], SetPhase::Hibernated);
        journal.write(&written).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = || {
            let errors = [journal.entries().unwrap_err(), journal.folder().unwrap_err()];
            let error = journal.write(&written).unwrap_err().to_string();
            assert_eq!(errors.map(|error| error.code()), ["journal"; 2]);
            error
        };
        assert!(refused().contains("others may write"));
        fs::rename(&path, folder.path().join("theirs")).unwrap();
        symlink("theirs", &path).unwrap();
        assert!(refused().contains("use the folder"));
    }

    #[test]
    fn an_entry_that_cannot_be_read_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let journal = open(folder.path());
        let good = entry(&[5], SetPhase::Hibernated);
        journal.write(&good).unwrap();
        fs::write(folder.path().join("9-9.set"), "{").unwrap();
        let old = r#"{"of":"cuda","place":{"boot":"old","namespace":"x"},"phase":"of a later version"}"#;
        fs::write(folder.path().join("8-8.set"), old).unwrap();
        fs::write(folder.path().join("7-7.set"), [0; 100]).unwrap();
        fs::write(folder.path().join("6-6.set"), "").unwrap();
        assert_eq!(journal.entries().unwrap(), std::slice::from_ref(&good));
        assert_eq!(journal.set_aside(), [folder.path().join("9-9.unreadable")]);
        for ended in ["8-8.set", "7-7.set", "6-6.set"] {
            assert!(!folder.path().join(ended).exists(), "{ended}: its system has ended");
        }
        assert_eq!(open(folder.path()).entries().unwrap(), [good]);
    }

    #[test]
    fn what_is_no_file_of_ones_own_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        let journal = open(folder.path());
        let good = entry(&[5], SetPhase::Hibernated);
        journal.write(&good).unwrap();
        fs::create_dir_all(of("directory.set/below")).unwrap();
        mknodat(CWD, of("fifo.set"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        symlink("loop.set", of("loop.set")).unwrap();
        symlink(journal.path_of(&good), of("link.set")).unwrap();
        symlink("nowhere", of("dangling.set")).unwrap();
        File::create(of("huge.set")).unwrap().set_len(1 << 40).unwrap();
        fs::write(of("closed.set"), "{").unwrap();
        fs::set_permissions(of("closed.set"), fs::Permissions::from_mode(0o000)).unwrap();
        let mut aside = vec!["directory", "fifo", "loop", "link", "dangling", "huge"];
        let mut in_place = vec![];
        if geteuid().is_root() {
            aside.push("closed");
            fs::copy(journal.path_of(&good), of("theirs.set")).unwrap();
            chown(of("theirs.set"), Some(65534), None).unwrap();
            aside.push("theirs");
        } else {
            // It may be a good one.
            in_place.push(of("closed.set"));
        }
        // What was set aside before stays.
        fs::create_dir(of("again.set")).unwrap();
        fs::write(of("again.unreadable"), "first").unwrap();
        let mut wanted: Vec<PathBuf> =
            aside.iter().map(|name| of(name).with_extension("unreadable")).collect();
        wanted.push(of("again.1.unreadable"));
        wanted.extend(in_place.clone());
        wanted.sort();
        for _ in 0..2 {
            assert_eq!(journal.entries().unwrap(), std::slice::from_ref(&good));
            let mut found = journal.set_aside();
            found.sort();
            assert_eq!(found, wanted, "each once");
        }
        let later = open(folder.path());
        assert_eq!((later.entries().unwrap(), later.set_aside()), (vec![good], in_place));
        assert_eq!(fs::read(of("again.unreadable")).unwrap(), b"first");
    }

    #[test]
    fn only_what_is_known_to_be_no_entry_is_set_aside() {
        let kind = |errno: Errno| (is_of_caller(&errno.into()), is_no_entry(&errno.into()));
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(kind(errno), (true, false), "{errno}");
        }
        for errno in [Errno::IO, Errno::ACCESS, Errno::STALE, Errno::TIMEDOUT, Errno::AGAIN] {
            assert_eq!(kind(errno), (false, false), "{errno}");
        }
        for errno in [Errno::LOOP, Errno::NXIO] {
            assert_eq!(kind(errno), (false, true), "{errno}");
        }
    }

    #[test]
    fn a_folder_that_is_removed_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let journal = open(&folder.path().join("journal"));
        fs::remove_dir_all(folder.path().join("journal")).unwrap();
        assert_eq!(journal.entries().unwrap(), []);
        fs::remove_dir_all(folder.path().join("journal")).unwrap();
        let written = entry(&[5], SetPhase::Hibernated);
        journal.write(&written).unwrap();
        assert_eq!(journal.entries().unwrap(), [written]);
        assert_eq!(fs::metadata(journal.folder().unwrap()).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn what_others_can_replace_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let set_mode = |name: &str, mode| {
            fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir_all(folder.path().join("tmp/theirs/journal")).unwrap();
        set_mode("tmp", 0o1777);
        set_mode("tmp/theirs/journal", 0o700);
        let journal = folder.path().join("tmp/theirs/journal");
        let opened = || JournalFolder::open(Some(&journal), &Processes::Cuda);
        assert!(opened().is_ok());
        set_mode("tmp/theirs", 0o777);
        let message = poorwill_core::chain(&opened().unwrap_err());
        assert!(message.contains("theirs above it: others may write"), "{message}");
        set_mode("tmp/theirs", 0o755);
        symlink("theirs", folder.path().join("tmp/link")).unwrap();
        let linked = folder.path().join("tmp/link/journal");
        assert!(JournalFolder::open(Some(&linked), &Processes::Cuda).is_err());
    }
}
