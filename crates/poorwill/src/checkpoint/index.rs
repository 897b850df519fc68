//! The index of a sharded checkpoint: which shard holds which tensor.
//!
//! Hugging Face's form is `{"metadata": {"total_size": N}, "weight_map": {"tensor": "shard"}}`. Only the map
//! is used: `total_size` is often wrong in published checkpoints. A shard is a plain file name, so an index
//! cannot leave its folder. It may be a symbolic link, as in a download cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::error::{CheckpointError, IndexError};
use super::file::failed;
use super::json::StringMap;
use super::text;

pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

const INDEX_BYTES_MAX: u64 = 100_000_000;

#[derive(Debug)]
pub(super) struct Index {
    path: PathBuf,
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Contents {
    weight_map: StringMap,
}

impl Index {
    pub(super) fn read(path: PathBuf) -> Result<Self, CheckpointError> {
        let json = contents(&path)?;
        match parse(&json) {
            Ok(weight_map) => Ok(Self { path, weight_map }),
            Err(error) => Err(CheckpointError::Index { path, error }),
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.iter().map(|(tensor, shard)| (tensor.as_str(), shard.as_str()))
    }

    pub(super) fn shard_of(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }

    pub(super) fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    pub(super) fn shard_path(&self, shard: &str) -> PathBuf {
        self.path.with_file_name(shard)
    }

    pub(super) fn shard_missing(&self, shard: &str) -> CheckpointError {
        let tensor = self.tensors().find(|(_, its)| *its == shard).map_or("", |(tensor, _)| tensor);
        self.failed(IndexError::ShardMissing { shard: shard.to_owned(), tensor: tensor.to_owned() })
    }

    pub(super) fn tensor_missing(&self, tensor: &str, shard: &str) -> CheckpointError {
        self.failed(IndexError::TensorMissing { tensor: tensor.to_owned(), shard: shard.to_owned() })
    }

    fn failed(&self, error: IndexError) -> CheckpointError {
        CheckpointError::Index { path: self.path.clone(), error }
    }
}

fn contents(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let unreadable = |source| failed(path, "read", source);
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
    }
    let mut json = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    let index_bytes = file.metadata().map_err(unreadable)?.len();
    if index_bytes > INDEX_BYTES_MAX {
        let error = IndexError::TooLarge { index_bytes, limit_bytes: INDEX_BYTES_MAX };
        return Err(CheckpointError::Index { path: path.to_path_buf(), error });
    }
    file.take(INDEX_BYTES_MAX).read_to_end(&mut json).map_err(unreadable)?;
    Ok(json)
}

fn parse(json: &[u8]) -> Result<BTreeMap<String, String>, IndexError> {
    let contents: Contents = serde_json::from_slice(json)
        .map_err(|error| IndexError::Malformed { reason: text::reason(&error.to_string()) })?;
    let StringMap { entries, repeated } = contents.weight_map;
    if let Some(tensor) = repeated {
        let reason = format!("`weight_map` has {} twice", text::name(&tensor));
        return Err(IndexError::Malformed { reason });
    }
    if entries.is_empty() {
        return Err(IndexError::Empty);
    }
    match entries.iter().find(|(_, shard)| !is_plain_file_name(shard)) {
        Some((tensor, shard)) => {
            Err(IndexError::ShardOutsideFolder { tensor: tensor.clone(), shard: shard.clone() })
        }
        None => Ok(entries),
    }
}

/// Longest file name on Linux, in bytes.
const NAME_BYTES_MAX: usize = 255;

fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\', '\0'])
        && name.len() <= NAME_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_are_shards() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", "a b", "..safetensors", "größe"]
        {
            assert!(is_plain_file_name(name), "{name:?}");
        }
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for name in
            ["", ".", "..", "/etc/passwd", "../x", "a/b", "a/", "./a", "a/../b", "..\\x", "a\0b", &long]
        {
            assert!(!is_plain_file_name(name), "{name:?}");
        }
    }

    #[test]
    fn malformed_indexes_say_what_is_wrong() {
        let reason = |json: &str| parse(json.as_bytes()).unwrap_err().to_string();
        assert!(reason("").contains("EOF while parsing a value"));
        assert!(reason("{}").contains("missing field `weight_map`"));
        assert!(reason(r#"{"weight_map":[]}"#).contains("expected an object of strings"));
        assert!(reason(r#"{"weight_map":{"a":1}}"#).contains("expected a string"));
        assert!(reason(r#"{"weight_map":{"a":"x","a":"y"}}"#).contains("has \"a\" twice"));
        assert!(reason(r#"{"weight_map":{}}"#).contains("names no tensor"));
        assert!(reason(&format!("{{\"x\":{}", "[".repeat(1_000_000))).contains("malformed index"));
        assert!(parse(b"{\"weight_map\":{\"a\":\"\xff\"}}").is_err());
    }

    #[test]
    fn other_fields_do_not_matter() {
        let map = parse(br#"{"metadata":{"total_size":"wrong"},"weight_map":{"a":"x"},"more":[1]}"#).unwrap();
        assert_eq!(map["a"], "x");
    }
}
