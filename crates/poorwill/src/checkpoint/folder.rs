//! Resolves a path to files.
//!
//! A folder means the shards of its index, or without one all its `.safetensors` files by name, except hidden
//! ones.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::file::failed;
use super::index::{INDEX_SUFFIX, Index};

const SHARD_SUFFIX: &str = ".safetensors";

/// Preferred among several, as by the engines' loaders.
const USUAL_INDEX: &str = "model.safetensors.index.json";

#[derive(Debug)]
pub(super) enum Source {
    Indexed(Index),
    Files(Vec<PathBuf>),
}

pub(super) fn locate(path: &Path) -> Result<Source, CheckpointError> {
    let metadata = fs::metadata(path).map_err(|source| failed(path, "open", source))?;
    if metadata.is_dir() {
        return search(path);
    }
    if path.file_name().is_some_and(|name| ends_with(name, INDEX_SUFFIX)) {
        return Index::read(path.to_path_buf()).map(Source::Indexed);
    }
    Ok(Source::Files(vec![path.to_path_buf()]))
}

fn search(folder: &Path) -> Result<Source, CheckpointError> {
    let names = file_names(folder)?;
    let indexes: Vec<_> = names.iter().filter(|name| ends_with(name, INDEX_SUFFIX)).collect();
    match indexes[..] {
        [] => shards(folder, &names),
        [index] => Index::read(folder.join(index)).map(Source::Indexed),
        [..] if indexes.iter().any(|name| *name == USUAL_INDEX) => {
            Index::read(folder.join(USUAL_INDEX)).map(Source::Indexed)
        }
        [..] => Err(CheckpointError::SeveralIndexes {
            path: folder.to_path_buf(),
            indexes: indexes.iter().map(|name| name.to_string_lossy().into_owned()).collect(),
        }),
    }
}

fn shards(folder: &Path, names: &[OsString]) -> Result<Source, CheckpointError> {
    let shards: Vec<_> =
        names.iter().filter(|name| ends_with(name, SHARD_SUFFIX)).map(|name| folder.join(name)).collect();
    if shards.is_empty() {
        return Err(CheckpointError::NoShards { path: folder.to_path_buf() });
    }
    Ok(Source::Files(shards))
}

/// Sorted, without hidden files and folders. A dangling link counts: a missing shard.
fn file_names(folder: &Path) -> Result<Vec<OsString>, CheckpointError> {
    let unreadable = |source| failed(folder, "list", source);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        if !name.as_encoded_bytes().starts_with(b".") && !folder.join(&name).is_dir() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn ends_with(name: &OsStr, suffix: &str) -> bool {
    name.as_encoded_bytes().ends_with(suffix.as_bytes())
}
