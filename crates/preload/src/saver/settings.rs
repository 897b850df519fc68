//! Settings of the whole process.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::code::{Failure, Result};
use crate::environment::{self, RETAIN};
use crate::sync::lock;

const AS_THE_ENVIRONMENT_SAYS: u8 = 2;

#[derive(Debug)]
pub(crate) struct Settings {
    margin_bytes: AtomicU64,
    retains: AtomicU8,
    disk: Mutex<DiskFolder>,
}

#[derive(Debug)]
struct DiskFolder {
    set: Option<PathBuf>,
    /// Once a disk is open.
    used: Option<PathBuf>,
}

impl Settings {
    pub(super) const fn new() -> Self {
        Self {
            margin_bytes: AtomicU64::new(0),
            retains: AtomicU8::new(AS_THE_ENVIRONMENT_SAYS),
            disk: Mutex::new(DiskFolder { set: None, used: None }),
        }
    }

    pub(super) fn margin_bytes(&self) -> u64 {
        self.margin_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_margin_bytes(&self, margin_bytes: u64) {
        self.margin_bytes.store(margin_bytes, Ordering::Relaxed);
    }

    /// Whether backups can still be read after a resume.
    pub(crate) fn retains(&self) -> Result<bool> {
        match self.retains.load(Ordering::Relaxed) {
            AS_THE_ENVIRONMENT_SAYS => environment::flag(RETAIN),
            set => Ok(set != 0),
        }
    }

    pub(crate) fn set_retains(&self, retains: bool) {
        self.retains.store(retains.into(), Ordering::Relaxed);
    }

    /// The folder of a disk that is opened now. Others cannot be set from now on.
    pub(super) fn use_disk_folder(&self) -> PathBuf {
        let mut disk = lock(&self.disk);
        let folder = disk.used.clone().or_else(|| disk.set.clone()).unwrap_or_else(environment::disk_folder);
        disk.used = Some(folder.clone());
        folder
    }

    pub(crate) fn set_disk_folder(&self, folder: &Path) -> Result<()> {
        let mut disk = lock(&self.disk);
        match &disk.used {
            Some(used) if used != folder => Err(Failure::Argument(format!(
                "backups go to {} already: set {} before the first allocation with a backup on disk",
                used.display(),
                folder.display()
            ))),
            _ => {
                disk.set = Some(folder.to_owned());
                Ok(())
            }
        }
    }
}
