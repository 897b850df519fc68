//! Errors of checkpoints.
//!
//! Every message names the file, the tensor and the conflicting numbers. Messages shorten and escape names,
//! so that a hostile header cannot write to a terminal.

use std::io;
use std::path::PathBuf;

use super::dtype::Dtype;
use super::text;

/// Why a checkpoint was not opened or read. The message says what to do.
///
/// ```
/// use poorwill::checkpoint::{Checkpoint, CheckpointError};
///
/// let error = Checkpoint::open(&["absent.safetensors".into()]).unwrap_err();
/// assert!(matches!(error, CheckpointError::NotFound { .. }));
/// assert_eq!(error.to_string(), "absent.safetensors: no such file or folder");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The list of paths is empty.
    #[error("no checkpoint was named: give a .safetensors file or a folder that holds some")]
    NothingNamed,

    /// A path does not exist.
    #[error("{}: no such file or folder", text::path(path))]
    NotFound {
        /// The path.
        path: PathBuf,
    },

    /// A pipe, a socket, a device, or an unexpected folder.
    #[error("{}: not a regular file", text::path(path))]
    NotAFile {
        /// The path.
        path: PathBuf,
    },

    /// A folder without an index or `.safetensors` file.
    #[error("{}: no .safetensors files in this folder", text::path(path))]
    NoShards {
        /// The folder.
        path: PathBuf,
    },

    /// A folder with several indexes.
    #[error(
        "{}: several indexes in this folder ({}); name the one that is meant instead of the folder",
        text::path(path),
        list(indexes)
    )]
    SeveralIndexes {
        /// The folder.
        path: PathBuf,
        /// Their file names, sorted.
        indexes: Vec<String>,
    },

    /// An index is invalid.
    #[error("{}: {error}", text::path(path))]
    Index {
        /// The index.
        path: PathBuf,
        /// The reason.
        error: IndexError,
    },

    /// Not a complete, consistent safetensors file.
    #[error("{}: {error}", text::path(path))]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: HeaderError,
    },

    /// Two files hold a tensor of one name, and no index chooses.
    #[error(
        "tensor {} is in both {} and {}, and no index says which one counts; if the folder holds more than \
         one checkpoint, name the files of one of them one by one",
        text::name(tensor),
        text::path(first),
        text::path(second)
    )]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// The first.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },

    /// Too many open files: a checkpoint holds one descriptor per shard.
    #[error(
        "{}: cannot open; {open_files} files of this checkpoint are open already and each shard \
         needs one descriptor: raise the limit (`ulimit -n`)",
        text::path(path)
    )]
    TooManyOpenFiles {
        /// The file.
        path: PathBuf,
        /// Open files of this checkpoint.
        open_files: usize,
        /// The system's error.
        source: io::Error,
    },

    /// The system refused an operation.
    #[error("{}: cannot {operation}", text::path(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation, as a verb.
        operation: &'static str,
        /// The system's error.
        source: io::Error,
    },

    /// The range exceeds the tensor.
    #[error(
        "tensor {} has {tensor_bytes} bytes; {wanted_bytes} bytes from {offset} on are outside it",
        text::name(tensor)
    )]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// Its begin.
        offset: u64,
        /// Its length.
        wanted_bytes: u64,
        /// The tensor's size.
        tensor_bytes: u64,
    },

    /// The tensor is of another checkpoint.
    #[error("tensor {} is not one of this checkpoint's tensors", text::name(tensor))]
    ForeignTensor {
        /// The tensor.
        tensor: String,
    },

    /// The file was truncated after it was opened.
    #[error(
        "{}: the file ended inside tensor {}: wanted {wanted_bytes} bytes at byte {offset} of the file, got \
         {got_bytes}; it was truncated while it was being read, so fetch it again",
        text::path(path),
        text::name(tensor)
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Offset in the file.
        offset: u64,
        /// Requested bytes.
        wanted_bytes: u64,
        /// Available bytes.
        got_bytes: u64,
    },

    /// The system failed a read.
    #[error(
        "{}: cannot read {wanted_bytes} bytes of tensor {} at byte {offset} of the file",
        text::path(path),
        text::name(tensor)
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Offset in the file.
        offset: u64,
        /// Requested bytes.
        wanted_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
}

/// What is wrong with an index.
///
/// ```
/// use poorwill::checkpoint::{Checkpoint, CheckpointError, IndexError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let index = folder.path().join("model.safetensors.index.json");
/// std::fs::write(&index, r#"{"weight_map": {}}"#)?;
/// let error = Checkpoint::open(&[index]).unwrap_err();
/// assert!(matches!(error, CheckpointError::Index { error: IndexError::Empty, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// Too large for an index.
    #[error("the index has {index_bytes} bytes, more than the {limit_bytes} that are read")]
    TooLarge {
        /// Its size.
        index_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },

    /// Not JSON, or not an index.
    #[error("malformed index: {reason}")]
    Malformed {
        /// The parser's message.
        reason: String,
    },

    /// `weight_map` is empty.
    #[error("the index names no tensor at all")]
    Empty,

    /// A shard name leads out of the index's folder.
    #[error(
        "the index puts tensor {} into {}, which is not a plain file name; shards must lie beside their index",
        text::name(tensor),
        text::name(shard)
    )]
    ShardOutsideFolder {
        /// The tensor.
        tensor: String,
        /// The name in the index.
        shard: String,
    },

    /// A shard does not exist.
    #[error(
        "shard {} is missing; the index says it holds tensor {}. Fetch the checkpoint again, or the shard",
        text::name(shard),
        text::name(tensor)
    )]
    ShardMissing {
        /// The name in the index.
        shard: String,
        /// One of its tensors.
        tensor: String,
    },

    /// A shard lacks a tensor of the index.
    #[error(
        "the index says that tensor {} is in {}, but that file does not hold it; index and shards are of \
         different downloads",
        text::name(tensor),
        text::name(shard)
    )]
    TensorMissing {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
}

/// What is wrong with a safetensors file. Positions count from the start of the file.
///
/// ```
/// use poorwill::checkpoint::{Checkpoint, CheckpointError, HeaderError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let file = folder.path().join("m.safetensors");
/// std::fs::write(&file, b"short")?;
/// let error = Checkpoint::open(&[file]).unwrap_err();
/// assert!(matches!(error, CheckpointError::Header { error: HeaderError::FileTooShort { .. }, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// A Git LFS pointer.
    #[error("this is a Git LFS pointer, not the file itself; run `git lfs pull`")]
    GitLfsPointer,

    /// Too short for a header's length.
    #[error("the file has {file_bytes} bytes; a safetensors file begins with 8 bytes of header length")]
    FileTooShort {
        /// File size.
        file_bytes: u64,
    },

    /// Beyond the format's limit; probably another kind of file.
    #[error(
        "the header claims {header_bytes} bytes, more than the {limit_bytes} allowed; is this a safetensors \
         file?"
    )]
    HeaderTooLarge {
        /// Header length.
        header_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },

    /// The file ends inside its header.
    #[error(
        "the header claims {header_bytes} bytes, but the file has only {file_bytes}; the file is torn or not a \
         safetensors file"
    )]
    HeaderBeyondFile {
        /// Header length.
        header_bytes: u64,
        /// File size.
        file_bytes: u64,
    },

    /// The header is not UTF-8.
    #[error("the header is not UTF-8: byte {position} of the file is in no character")]
    NotUtf8 {
        /// The first.
        position: u64,
    },

    /// The header is not JSON, or of another structure.
    #[error("malformed header: {reason}")]
    Malformed {
        /// The parser's message.
        reason: String,
    },

    /// A repeated tensor or metadata key.
    #[error("the header has {} twice", text::name(key))]
    DuplicateKey {
        /// The tensor or key.
        key: String,
    },

    /// Missing, repeated or unknown fields.
    #[error("tensor {}: {reason}", text::name(tensor))]
    EntryMalformed {
        /// The tensor.
        tensor: String,
        /// The reason.
        reason: String,
    },

    /// An unknown dtype.
    #[error("tensor {} has the unknown dtype {}", text::name(tensor), text::name(dtype))]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The dtype in the header.
        dtype: String,
    },

    /// A dimension is not a whole number from 0 to 2^64 - 1.
    #[error(
        "tensor {}: dimension {dimension} of its shape is {value}, not a whole number below 2^64",
        text::name(tensor)
    )]
    BadDimension {
        /// The tensor.
        tensor: String,
        /// Its index, from 0.
        dimension: usize,
        /// The value found.
        value: String,
    },

    /// An offset is not a whole number from 0 to 2^64 - 1.
    #[error("tensor {}: a data offset is {value}, not a whole number below 2^64", text::name(tensor))]
    BadOffset {
        /// The tensor.
        tensor: String,
        /// The value found.
        value: String,
    },

    /// The size exceeds 64 bits.
    #[error("tensor {}: the size of {dtype} {} overflows 64 bits", text::name(tensor), text::shape(shape))]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },

    /// A sub-byte dtype leaves its last byte partly unused.
    #[error("tensor {}: {bits} bits of {dtype} are not whole bytes", text::name(tensor))]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Bits by shape and dtype.
        bits: u64,
    },

    /// A tensor ends before it begins.
    #[error("tensor {}: its data offsets [{begin}, {end}] are the wrong way round", text::name(tensor))]
    OffsetsReversed {
        /// The tensor.
        tensor: String,
        /// The first data offset.
        begin: u64,
        /// The second.
        end: u64,
    },

    /// A tensor exceeds the file.
    #[error(
        "tensor {} ends at byte {end} but the file has only {file_bytes}; the file is torn, fetch it again",
        text::name(tensor)
    )]
    BeyondFile {
        /// The tensor.
        tensor: String,
        /// Its end (`u64::MAX` on overflow).
        end: u64,
        /// File size.
        file_bytes: u64,
    },

    /// Offsets and shape give different sizes.
    #[error(
        "tensor {}: its data offsets span {offset_bytes} bytes, but {dtype} {} needs {shape_bytes}",
        text::name(tensor),
        text::shape(shape)
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Size by dtype and shape.
        shape_bytes: u64,
        /// Size by offsets.
        offset_bytes: u64,
    },

    /// Two tensors overlap.
    #[error(
        "tensors {} and {} overlap: the first ends at byte {first_end}, the second begins at byte {second_begin}",
        text::name(first),
        text::name(second)
    )]
    Overlap {
        /// The first.
        first: String,
        /// The second.
        second: String,
        /// Its end.
        first_end: u64,
        /// Its begin.
        second_begin: u64,
    },

    /// Unused bytes before a tensor.
    #[error(
        "bytes {begin} to {end}, right before tensor {}, belong to no tensor; the file is torn or hides something",
        text::name(tensor)
    )]
    Hole {
        /// The tensor.
        tensor: String,
        /// First unused byte.
        begin: u64,
        /// First byte after it.
        end: u64,
    },

    /// Unused bytes after the last tensor.
    #[error(
        "the last tensor ends at byte {begin} but the file has {file_bytes}; it is torn or hides something"
    )]
    TrailingBytes {
        /// First unused byte.
        begin: u64,
        /// File size.
        file_bytes: u64,
    },
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| text::name(name)).collect::<Vec<_>>().join(", ")
}
