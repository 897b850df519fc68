//! Files of a folder, and their texts.

use std::fs;
use std::path::{Path, PathBuf};

use crate::steps::Failure;

pub(super) fn inside(folder: &Path, path: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

pub(super) fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|cause| Failure::File { path: path.to_owned(), cause })
}

pub(super) fn files_below(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |cause| Failure::File { path: folder.to_owned(), cause };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
