//! The place of a rank: one process at a time serves it.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, OFlags, fcntl_lock};
use rustix::io::Errno;

use super::config::GroupConfig;
use super::error::RanksError;
use crate::private_folder;

/// Of this process: the kernel's lock keeps other processes out, and no forked child inherits it.
static TAKEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The right to serve a rank. The kernel ends it with the process.
#[derive(Debug)]
pub(super) struct RankPlace {
    socket: PathBuf,
    lock: PathBuf,
    _file: File,
    pid: u32,
}

impl RankPlace {
    pub(super) fn take(config: &GroupConfig, rank: u32) -> Result<Self, RanksError> {
        let socket = config.socket(rank)?;
        let folder = config.folder();
        private_folder::make(&folder)
            .map_err(|(action, source)| RanksError::folder(action, &folder, source))?;
        let folder = fs::canonicalize(&folder)
            .map_err(|source| RanksError::folder("use the folder", &folder, source))?;
        let lock = folder.join(format!("rank-{rank}.lock"));
        let taken = || RanksError::Taken { rank, name: config.name().to_owned(), path: socket.clone() };
        let mut of_process = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        if of_process.contains(&lock) {
            return Err(taken());
        }
        let failed = |source| RanksError::Serve { action: "lock", path: lock.clone(), source };
        let file = open(&lock).map_err(failed)?;
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => return Err(taken()),
            Err(error) => return Err(failed(error.into())),
        }
        of_process.insert(lock.clone());
        Ok(Self { socket, lock, _file: file, pid: std::process::id() })
    }

    /// In place of the socket that an earlier process left.
    pub(super) fn listen(&self) -> Result<UnixListener, RanksError> {
        let failed = |action| move |source| RanksError::Serve { action, path: self.socket.clone(), source };
        match fs::remove_file(&self.socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove")(error)),
            _ => UnixListener::bind(&self.socket).map_err(failed("serve")),
        }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for RankPlace {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return; // In a forked child it is the parent's.
        }
        // Before the next one has it.
        let _ = fs::remove_file(&self.socket);
        TAKEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.lock);
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path)
}
