//! One call at a time on a process, and one restore at a time on a device.
//!
//! Each has a locked file, which the kernel frees when its holder ends. Who needs both takes the processes first.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::error::HibernateError;

/// The right to work on these processes or devices, until it is dropped.
#[derive(Debug)]
#[must_use = "they are free again once it is dropped"]
pub(super) struct Locks {
    files: Vec<(PathBuf, File)>,
}

impl Locks {
    /// Waits until no other call works on these processes.
    pub(super) fn take(folder: &Path, pids: &[u32]) -> Result<Self, HibernateError> {
        Self::wait(folder, names(pids))
    }

    /// Waits until no other call restores on these devices.
    pub(super) fn take_devices<'u>(
        folder: &Path,
        uuids: impl IntoIterator<Item = &'u str>,
    ) -> Result<Self, HibernateError> {
        // They come from the journal or the driver, and name a file.
        let name = |uuid: &str| {
            let safe = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
            format!("device-{}.lock", uuid.chars().map(safe).collect::<String>())
        };
        Self::wait(folder, uuids.into_iter().map(name).collect())
    }

    fn wait(folder: &Path, names: BTreeSet<String>) -> Result<Self, HibernateError> {
        Ok(Self::of(folder, names, FlockOperation::LockExclusive)?.unwrap_or(Self { files: Vec::new() }))
    }

    /// `None` if another call works on one of them.
    pub(super) fn try_take(folder: &Path, pids: &[u32]) -> Result<Option<Self>, HibernateError> {
        Self::of(folder, names(pids), FlockOperation::NonBlockingLockExclusive)
    }

    /// In order of their names, so that no two calls wait for each other.
    fn of(
        folder: &Path,
        names: BTreeSet<String>,
        how: FlockOperation,
    ) -> Result<Option<Self>, HibernateError> {
        let mut locks = Self { files: Vec::new() };
        for name in names {
            let path = folder.join(name);
            match locked(&path, how) {
                Ok(file) => locks.files.push((path, file)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(source) => return Err(HibernateError::Journal { action: "lock", path, source }),
            }
        }
        Ok(Some(locks))
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        for (path, _) in &self.files {
            // Before it is unlocked: who waits for it then sees that it is gone.
            let _ = fs::remove_file(path);
        }
    }
}

fn names(pids: &[u32]) -> BTreeSet<String> {
    pids.iter().map(|pid| format!("{pid}.lock")).collect()
}

/// The locked file at `path`. A holder removes its file, so the one that was waited for may be gone.
fn locked(path: &Path, how: FlockOperation) -> io::Result<File> {
    loop {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)?;
        match flock(&file, how) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            locked => locked?,
        }
        let found = fs::symlink_metadata(path);
        if found.is_ok_and(|found| found.ino() == file.metadata().map_or(0, |own| own.ino())) {
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn one_call_at_a_time_works_on_a_process() {
        let folder = tempfile::tempdir().unwrap();
        let at_work = AtomicU32::new(0);
        thread::scope(|scope| {
            for pids in [[1, 2], [2, 1], [2, 3], [3, 1]] {
                let (folder, at_work) = (folder.path(), &at_work);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let locks = Locks::take(folder, &pids).unwrap();
                        // Each pair of sets shares a process.
                        assert_eq!(at_work.fetch_add(1, Ordering::SeqCst), 0);
                        assert!(Locks::try_take(folder, &[pids[0]]).unwrap().is_none());
                        at_work.fetch_sub(1, Ordering::SeqCst);
                        drop(locks);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files go with their holders");
    }

    #[test]
    fn a_process_named_twice_is_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        drop(Locks::take(folder.path(), &[7, 7]).unwrap());
        let missing = Locks::take(&folder.path().join("missing"), &[7]).unwrap_err();
        assert_eq!(missing.code(), "journal");
    }

    #[test]
    fn one_restore_at_a_time_on_a_device() {
        let folder = tempfile::tempdir().unwrap();
        let at_work = AtomicU32::new(0);
        thread::scope(|scope| {
            for uuids in [["b/../x", "a"], ["a", "b/../x"]] {
                let (folder, at_work) = (folder.path(), &at_work);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let locks = Locks::take_devices(folder, uuids).unwrap();
                        assert_eq!(at_work.fetch_add(1, Ordering::SeqCst), 0);
                        at_work.fetch_sub(1, Ordering::SeqCst);
                        drop(locks);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("elsewhere", folder.path().join("7.lock")).unwrap();
        assert_eq!(Locks::take(folder.path(), &[7]).unwrap_err().code(), "journal");
        assert!(!folder.path().join("elsewhere").exists());
    }
}
