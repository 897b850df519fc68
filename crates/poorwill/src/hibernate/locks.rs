//! One call at a time on a process: a locked file for each, which the kernel frees when its holder ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::error::HibernateError;

/// The right to work on these processes, until it is dropped.
#[derive(Debug)]
#[must_use = "the processes are free again once it is dropped"]
pub(super) struct ProcessLocks {
    files: Vec<(PathBuf, File)>,
}

impl ProcessLocks {
    /// Waits until no other call works on them.
    pub(super) fn take(folder: &Path, pids: &[u32]) -> Result<Self, HibernateError> {
        Ok(Self::of(folder, pids, FlockOperation::LockExclusive)?.unwrap_or(Self { files: Vec::new() }))
    }

    /// `None` if another call works on one of them.
    pub(super) fn try_take(folder: &Path, pids: &[u32]) -> Result<Option<Self>, HibernateError> {
        Self::of(folder, pids, FlockOperation::NonBlockingLockExclusive)
    }

    /// In order of their numbers, so that no two calls wait for each other.
    fn of(folder: &Path, pids: &[u32], how: FlockOperation) -> Result<Option<Self>, HibernateError> {
        let mut pids = pids.to_vec();
        pids.sort_unstable();
        pids.dedup();
        let mut locks = Self { files: Vec::new() };
        for pid in pids {
            let path = folder.join(format!("{pid}.lock"));
            match locked(&path, how) {
                Ok(file) => locks.files.push((path, file)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(source) => return Err(HibernateError::Journal { action: "lock", path, source }),
            }
        }
        Ok(Some(locks))
    }
}

impl Drop for ProcessLocks {
    fn drop(&mut self) {
        for (path, _) in &self.files {
            // Before it is unlocked: who waits for it then sees that it is gone.
            let _ = fs::remove_file(path);
        }
    }
}

/// The locked file at `path`. A holder removes its file, so the one that was waited for may be gone.
fn locked(path: &Path, how: FlockOperation) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
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
                        let locks = ProcessLocks::take(folder, &pids).unwrap();
                        // Each pair of sets shares a process.
                        assert_eq!(at_work.fetch_add(1, Ordering::SeqCst), 0);
                        assert!(ProcessLocks::try_take(folder, &[pids[0]]).unwrap().is_none());
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
        drop(ProcessLocks::take(folder.path(), &[7, 7]).unwrap());
        let missing = ProcessLocks::take(&folder.path().join("missing"), &[7]).unwrap_err();
        assert_eq!(missing.code(), "journal");
    }
}
