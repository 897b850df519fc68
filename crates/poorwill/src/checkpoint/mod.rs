//! Reads checkpoints: safetensors files, alone or in shards.
//!
//! [`Checkpoint::open`] reads and checks all headers, and no payload. [`Checkpoint::read_exact_at`] then
//! reads any bytes, from any thread. Errors name the file, the tensor and the numbers. No file is mapped, so
//! truncation is an error, not a signal.
//!
//! Accepts what the reference implementation (the `safetensors` crate) accepts, except likely mistakes and
//! tricks. Refused are repeated keys, unknown fields in a tensor's entry, `null` for `__metadata__`, and
//! lists in place of objects.
#![forbid(unsafe_code)]

use std::collections::hash_map::{Entry as MapEntry, HashMap};
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

pub use self::dtype::Dtype;
pub use self::error::{CheckpointError, HeaderError, IndexError};
pub use self::file::ShardFile;

use self::folder::Source;
use self::index::Index;

mod dtype;
mod error;
mod file;
mod folder;
mod header;
mod index;
mod json;
mod layout;
pub(crate) mod text;

/// An open checkpoint, with one file descriptor per shard.
///
/// ```
/// use poorwill::checkpoint::Checkpoint;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # std::fs::write(folder.path().join("m.safetensors"), [&length, header.as_bytes(), &[1, 2, 3, 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let tensor = &checkpoint.tensors()[0];
/// assert_eq!((tensor.name.as_str(), tensor.dtype.to_string().as_str()), ("w", "U8"));
/// let mut last = [0; 2];
/// checkpoint.read_exact_at(tensor, 2, &mut last)?;
/// assert_eq!(last, [3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<ShardFile>,
    /// By file, offset and size.
    tensors: Vec<Tensor>,
}

/// A tensor of a [`Checkpoint`].
///
/// ```
/// use poorwill::checkpoint::Checkpoint;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let tensor = &checkpoint.tensors()[0];
/// assert_eq!((tensor.shape.as_slice(), tensor.bytes), (&[4][..], 4));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tensor {
    /// Its name; escape it before you show it.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Size.
    pub bytes: u64,
    /// An index into [`Checkpoint::files`].
    pub file: usize,
    /// First byte, in the file.
    pub offset: u64,
}

impl Checkpoint {
    /// Opens the checkpoint at `paths`.
    ///
    /// A path is one of:
    /// - a safetensors file;
    /// - a folder: the shards of its `*.safetensors.index.json` (`model.safetensors.index.json` of several).
    ///   Without one, all its `*.safetensors` files by name, except hidden ones, with unique tensor names;
    /// - such an index.
    ///
    /// With an index, each tensor comes from its named shard. Tensors that only shards name belong to the
    /// checkpoint too, as for engines.
    ///
    /// A file named twice counts once, at its first position. Files of different paths may repeat tensor
    /// names.
    pub fn open(paths: &[PathBuf]) -> Result<Self, CheckpointError> {
        if paths.is_empty() {
            return Err(CheckpointError::NothingNamed);
        }
        let mut opener = Opener::default();
        for path in paths {
            opener.add(folder::locate(path)?)?;
        }
        Ok(opener.finish())
    }

    /// The files, in the order of naming.
    #[must_use]
    pub fn files(&self) -> &[ShardFile] {
        &self.files
    }

    /// The tensors, by file and offset.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Size of all tensors (`u64::MAX` on overflow).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }

    /// Fills `buf` from `offset_in_tensor`. Threads may read concurrently. After an error, `buf` is
    /// unspecified.
    pub fn read_exact_at(
        &self,
        tensor: &Tensor,
        offset_in_tensor: u64,
        buf: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let wanted_bytes = buf.len() as u64;
        if offset_in_tensor.checked_add(wanted_bytes).is_none_or(|end| end > tensor.bytes) {
            return Err(CheckpointError::OutOfRange {
                tensor: tensor.name.clone(),
                offset: offset_in_tensor,
                wanted_bytes,
                tensor_bytes: tensor.bytes,
            });
        }
        if buf.is_empty() {
            return Ok(());
        }
        let file = self.file_of(tensor)?;
        let offset = tensor.offset + offset_in_tensor;
        let (path, tensor) = (|| file.path.clone(), || tensor.name.clone());
        match file.read_at(buf, offset) {
            Ok(got) if got == buf.len() => Ok(()),
            Ok(got) => Err(CheckpointError::ShortRead {
                path: path(),
                tensor: tensor(),
                offset,
                wanted_bytes,
                got_bytes: got as u64,
            }),
            Err(source) => {
                Err(CheckpointError::Read { path: path(), tensor: tensor(), offset, wanted_bytes, source })
            }
        }
    }

    /// No two tensors with bytes share an offset.
    fn file_of(&self, tensor: &Tensor) -> Result<&ShardFile, CheckpointError> {
        let position = |tensor: &Tensor| (tensor.file, tensor.offset, tensor.bytes);
        self.tensors
            .binary_search_by_key(&position(tensor), position)
            .ok()
            .filter(|position| self.tensors[*position] == *tensor)
            .and_then(|_| self.files.get(tensor.file))
            .ok_or_else(|| CheckpointError::ForeignTensor { tensor: tensor.name.clone() })
    }
}

#[derive(Default)]
struct Opener {
    files: Vec<ShardFile>,
    by_canonical_path: HashMap<PathBuf, usize>,
    tensors: Vec<Tensor>,
    /// Tensors that an index takes from another shard.
    left_out: HashSet<usize>,
}

impl Opener {
    fn add(&mut self, source: Source) -> Result<(), CheckpointError> {
        let first_new = self.files.len();
        match source {
            Source::Indexed(index) => self.add_indexed(&index)?,
            Source::Files(paths) => {
                for path in paths {
                    self.add_file(path)?;
                }
            }
        }
        self.check_names_from(first_new)
    }

    fn finish(self) -> Checkpoint {
        let Self { files, tensors, left_out, .. } = self;
        let kept = tensors.into_iter().enumerate().filter(|(position, _)| !left_out.contains(position));
        Checkpoint { files, tensors: kept.map(|(_, tensor)| tensor).collect() }
    }

    /// Returns the file's index.
    fn add_file(&mut self, path: PathBuf) -> Result<usize, CheckpointError> {
        let canonical = canonical(&path)?;
        if let Some(position) = self.by_canonical_path.get(&canonical) {
            return Ok(*position);
        }
        let position = self.files.len();
        let file = ShardFile::open(path, position)?;
        self.tensors.extend(file.entries()?.into_iter().map(|entry| Tensor {
            name: entry.name,
            dtype: entry.dtype,
            shape: entry.shape,
            bytes: entry.end - entry.begin,
            file: position,
            offset: entry.begin,
        }));
        self.files.push(file);
        self.by_canonical_path.insert(canonical, position);
        Ok(position)
    }

    fn add_indexed(&mut self, index: &Index) -> Result<(), CheckpointError> {
        let first_new = self.files.len();
        let mut files = BTreeMap::new();
        for shard in index.shards() {
            let position = self.add_file(index.shard_path(shard)).map_err(|error| match error {
                CheckpointError::NotFound { .. } => index.shard_missing(shard),
                error => error,
            })?;
            files.insert(shard, position);
        }
        self.check_against(index, &files)?;
        for (position, tensor) in
            self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.file >= first_new)
        {
            if index.shard_of(&tensor.name).is_some_and(|shard| files[shard] != tensor.file) {
                self.left_out.insert(position);
            }
        }
        Ok(())
    }

    fn check_against(&self, index: &Index, files: &BTreeMap<&str, usize>) -> Result<(), CheckpointError> {
        let held: HashSet<_> =
            self.tensors.iter().map(|tensor| (tensor.file, tensor.name.as_str())).collect();
        match index.tensors().find(|(tensor, shard)| !held.contains(&(files[shard], *tensor))) {
            Some((tensor, shard)) => Err(index.tensor_missing(tensor, shard)),
            None => Ok(()),
        }
    }

    /// The files of one path repeat no name.
    fn check_names_from(&self, first_new: usize) -> Result<(), CheckpointError> {
        let mut seen = HashMap::new();
        for (position, tensor) in self.tensors.iter().enumerate() {
            if tensor.file < first_new || self.left_out.contains(&position) {
                continue;
            }
            match seen.entry(tensor.name.as_str()) {
                MapEntry::Vacant(entry) => {
                    entry.insert(tensor.file);
                }
                MapEntry::Occupied(entry) => {
                    return Err(CheckpointError::DuplicateTensor {
                        tensor: tensor.name.clone(),
                        first: self.files[*entry.get()].path.clone(),
                        second: self.files[tensor.file].path.clone(),
                    });
                }
            }
        }
        Ok(())
    }
}

fn canonical(path: &Path) -> Result<PathBuf, CheckpointError> {
    fs::canonicalize(path).map_err(|source| file::failed(path, "open", source))
}
