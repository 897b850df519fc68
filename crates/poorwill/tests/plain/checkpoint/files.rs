//! Files and folders to open, and short ways to look into them.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use poorwill::checkpoint::{Checkpoint, CheckpointError, HeaderError, IndexError, Tensor};

/// A safetensors file of this header and payload, without padding.
pub(crate) fn file(header: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A safetensors file with one U8 tensor per name, each holding its own name.
pub(crate) fn named(names: &[&str]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut payload = Vec::new();
    for name in names {
        let begin = payload.len();
        payload.extend_from_slice(name.as_bytes());
        entries.push(entry(name, "U8", &[name.len() as u64], begin, payload.len()));
    }
    file(&format!("{{{}}}", entries.join(",")), &payload)
}

pub(crate) fn entry(name: &str, dtype: &str, shape: &[u64], begin: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
}

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    /// In memory where possible: repeated writes would wait for a disk.
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.join(name), contents).unwrap();
        self.join(name)
    }

    pub(crate) fn index(&self, weight_map: &[(&str, &str)]) -> PathBuf {
        let weight_map: BTreeMap<_, _> = weight_map.iter().copied().collect();
        let index = serde_json::json!({"metadata": {"total_size": 12345}, "weight_map": weight_map});
        self.write("model.safetensors.index.json", index.to_string())
    }
}

pub(crate) fn open(path: impl Into<PathBuf>) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&[path.into()])
}

pub(crate) fn read(checkpoint: &Checkpoint, tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
    checkpoint.read_exact_at(tensor, 0, &mut bytes).unwrap();
    bytes
}

/// `name@file name` of each tensor, in order.
pub(crate) fn listing(checkpoint: &Checkpoint) -> Vec<String> {
    let file_name = |tensor: &Tensor| {
        checkpoint.files()[tensor.file].path.file_name().unwrap().to_string_lossy().into_owned()
    };
    checkpoint.tensors().iter().map(|tensor| format!("{}@{}", tensor.name, file_name(tensor))).collect()
}

/// The error of a file; its message must begin with the path.
pub(crate) fn header_error_of(bytes: &[u8]) -> HeaderError {
    let folder = Folder::new();
    let written = folder.write("x.safetensors", bytes);
    let error = open(&written).unwrap_err();
    assert!(error.to_string().starts_with(written.to_str().unwrap()), "{error}");
    match error {
        CheckpointError::Header { path, error } if path == written => error,
        other => panic!("{other:?}"),
    }
}

/// The error of the index in a folder.
pub(crate) fn index_error_of(folder: &Folder) -> (String, IndexError) {
    let error = open(folder.path()).unwrap_err();
    match error {
        CheckpointError::Index { ref path, error: ref index_error }
            if *path == folder.join("model.safetensors.index.json") =>
        {
            (error.to_string(), index_error.clone())
        }
        other => panic!("{other:?}"),
    }
}
