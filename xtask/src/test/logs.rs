//! The output of tests, in a folder per process: two runs at a time share nothing.

use std::fs;
use std::path::{Path, PathBuf};

use crate::steps::Failure;

/// The folder, removed when the run ends.
#[derive(Debug)]
pub(super) struct Logs {
    folder: PathBuf,
}

impl Logs {
    /// Makes a new folder below `all`, and removes those of ended processes.
    pub(super) fn begin(all: &Path) -> Result<Logs, Failure> {
        for entry in fs::read_dir(all).into_iter().flatten().flatten() {
            let is_in_use = entry.file_name().to_str().is_some_and(is_alive);
            if !is_in_use {
                // A concurrent run may have removed it.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let folder = all.join(std::process::id().to_string());
        match fs::create_dir_all(&folder) {
            Ok(()) => Ok(Logs { folder }),
            Err(cause) => Err(Failure::File { path: folder, cause }),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        // Failures have been printed; the next run removes what stays.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn is_alive(process: &str) -> bool {
    process.parse::<u32>().is_ok_and(|id| Path::new("/proc").join(id.to_string()).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_dead_processes_are_removed_and_others_stay() {
        let target = crate::toolchain::target_folder().unwrap();
        let all = target.join(format!("xtask-logs-{}", std::process::id()));
        for name in ["1", "4294967295", "logs"] {
            fs::create_dir_all(all.join(name)).unwrap();
        }
        let logs = Logs::begin(&all).unwrap();
        assert!(logs.folder().is_dir());
        assert!(all.join("1").exists() && !all.join("4294967295").exists() && !all.join("logs").exists());
        drop(logs);
        assert_eq!(fs::read_dir(&all).unwrap().count(), 1);
        fs::remove_dir_all(all).unwrap();
    }
}
