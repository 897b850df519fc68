//! What can be wrong with a checkpoint.
//!
//! Every message names the file, the tensor where there is one, and the numbers that disagree. Names in
//! the fields are raw, as the file has them; in messages they are shortened and escaped, so a hostile
//! header cannot write to the terminal of whoever reads the error.

use std::io;
use std::path::PathBuf;

use super::dtype::Dtype;
use super::text;

/// Why a checkpoint could not be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// [`Checkpoint::open`](super::Checkpoint::open) was given an empty list.
    #[error("no checkpoint was named: give a .safetensors file or a folder that holds some")]
    NothingNamed,

    /// A path that the caller gave does not exist.
    #[error("{}: no such file or folder", text::path(path))]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },

    /// A path leads to a pipe, a socket, a device, or a folder where a file is needed.
    #[error("{}: not a regular file", text::path(path))]
    NotAFile {
        /// The path as given, or as found in a folder.
        path: PathBuf,
    },

    /// A folder holds neither an index nor a `.safetensors` file.
    #[error("{}: no .safetensors files in this folder", text::path(path))]
    NoShards {
        /// The folder.
        path: PathBuf,
    },

    /// A folder holds several indexes, none of them called `model.safetensors.index.json`.
    #[error(
        "{}: several indexes in this folder ({}); name the one that is meant instead of the folder",
        text::path(path),
        list(indexes)
    )]
    SeveralIndexes {
        /// The folder.
        path: PathBuf,
        /// File names of the indexes, sorted.
        indexes: Vec<String>,
    },

    /// The index of a sharded checkpoint cannot be followed.
    #[error("{}: {error}", text::path(path))]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        error: IndexError,
    },

    /// The file is not a complete and consistent safetensors file.
    #[error("{}: {error}", text::path(path))]
    Header {
        /// The safetensors file.
        path: PathBuf,
        /// What is wrong with it.
        error: HeaderError,
    },

    /// Two files of one folder hold a tensor of the same name, and no index says which one counts.
    #[error(
        "tensor {} is in both {} and {}, and no index says which one counts; if the folder holds more than \
         one checkpoint, name the files of one of them one by one",
        text::name(tensor),
        text::path(first),
        text::path(second)
    )]
    DuplicateTensor {
        /// The tensor's name.
        tensor: String,
        /// The file that holds it and sorts first.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },

    /// The process may not open another file. A checkpoint holds one descriptor per shard.
    #[error(
        "{}: cannot open; {open_files} files of this checkpoint are open already and each shard \
         needs one descriptor: raise the limit (`ulimit -n`)",
        text::path(path)
    )]
    TooManyOpenFiles {
        /// The file that could not be opened.
        path: PathBuf,
        /// How many files of this checkpoint were open.
        open_files: usize,
        /// What the system said.
        source: io::Error,
    },

    /// The system refused an operation on a file or folder.
    #[error("{}: cannot {operation}", text::path(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        operation: &'static str,
        /// What the system said.
        source: io::Error,
    },

    /// A read went past the tensor's own bytes. The caller's mistake; nothing was read.
    #[error(
        "tensor {} has {tensor_bytes} bytes; {wanted_bytes} bytes from {offset} on are outside it",
        text::name(tensor)
    )]
    OutOfRange {
        /// The tensor's name.
        tensor: String,
        /// Where in the tensor the read was to begin.
        offset: u64,
        /// How much was to be read.
        wanted_bytes: u64,
        /// How much the tensor has.
        tensor_bytes: u64,
    },

    /// A tensor of another checkpoint was passed in. The caller's mistake; nothing was read.
    #[error("tensor {} is not one of this checkpoint's tensors", text::name(tensor))]
    ForeignTensor {
        /// The tensor's name.
        tensor: String,
    },

    /// The file ended inside a tensor: it was truncated after the checkpoint was opened.
    #[error(
        "{}: the file ended inside tensor {}: wanted {wanted_bytes} bytes at byte {offset} of the file, got \
         {got_bytes}; it was truncated while it was being read, so fetch it again",
        text::path(path),
        text::name(tensor)
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Where in the file the read began.
        offset: u64,
        /// How much was asked for.
        wanted_bytes: u64,
        /// How much there was.
        got_bytes: u64,
    },

    /// The system failed to read a tensor's bytes.
    #[error(
        "{}: cannot read {wanted_bytes} bytes of tensor {} at byte {offset} of the file",
        text::path(path),
        text::name(tensor)
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Where in the file the read began.
        offset: u64,
        /// How much was asked for.
        wanted_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
}

/// What can be wrong with a `*.safetensors.index.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The file is larger than any index is.
    #[error("the index has {index_bytes} bytes, more than the {limit_bytes} that are read")]
    TooLarge {
        /// Size of the file.
        index_bytes: u64,
        /// The most that is read.
        limit_bytes: u64,
    },

    /// The file is not JSON, or not shaped like an index.
    #[error("malformed index: {reason}")]
    Malformed {
        /// What the parser found, and where.
        reason: String,
    },

    /// `weight_map` is empty.
    #[error("the index names no tensor at all")]
    Empty,

    /// A shard name is not the name of a file in the index's own folder.
    #[error(
        "the index puts tensor {} into {}, which is not a plain file name; shards must lie beside their index",
        text::name(tensor),
        text::name(shard)
    )]
    ShardOutsideFolder {
        /// The tensor.
        tensor: String,
        /// The shard as the index names it.
        shard: String,
    },

    /// A shard that the index names is not there.
    #[error(
        "shard {} is missing; the index says it holds tensor {}. Fetch the checkpoint again, or the shard",
        text::name(shard),
        text::name(tensor)
    )]
    ShardMissing {
        /// The shard as the index names it.
        shard: String,
        /// One tensor that should be in it.
        tensor: String,
    },

    /// A shard does not hold what the index says.
    #[error(
        "the index says that tensor {} is in {}, but that file does not hold it; index and shards are of \
         different downloads",
        text::name(tensor),
        text::name(shard)
    )]
    TensorMissing {
        /// The tensor.
        tensor: String,
        /// The shard that should hold it.
        shard: String,
    },
}

/// What can be wrong with a safetensors file. Positions are bytes from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is a Git LFS pointer: the repository was cloned without its large files.
    #[error("this is a Git LFS pointer, not the file itself; run `git lfs pull`")]
    GitLfsPointer,

    /// The file is too short to hold even the length of a header.
    #[error("the file has {file_bytes} bytes; a safetensors file begins with 8 bytes of header length")]
    FileTooShort {
        /// Size of the file.
        file_bytes: u64,
    },

    /// The header is longer than any reader accepts; most likely this is not a safetensors file.
    #[error(
        "the header claims {header_bytes} bytes, more than the {limit_bytes} allowed; is this a safetensors \
         file?"
    )]
    HeaderTooLarge {
        /// Length that the file claims for its header.
        header_bytes: u64,
        /// The longest header that is read.
        limit_bytes: u64,
    },

    /// The file ends inside its header.
    #[error(
        "the header claims {header_bytes} bytes, but the file has only {file_bytes}; the file is torn or not a \
         safetensors file"
    )]
    HeaderBeyondFile {
        /// Length that the file claims for its header.
        header_bytes: u64,
        /// Size of the file.
        file_bytes: u64,
    },

    /// The header is not text.
    #[error("the header is not UTF-8: byte {position} of the file is in no character")]
    NotUtf8 {
        /// The first byte that is not UTF-8.
        position: u64,
    },

    /// The header is not JSON, or not an object of the right shape.
    #[error("malformed header: {reason}")]
    Malformed {
        /// What the parser found, and where in the header.
        reason: String,
    },

    /// A tensor, or a key of `__metadata__`, is there twice.
    #[error("the header has {} twice", text::name(key))]
    DuplicateKey {
        /// The tensor's name or the key.
        key: String,
    },

    /// A tensor's entry lacks a field, repeats one, or has one that the format does not know.
    #[error("tensor {}: {reason}", text::name(tensor))]
    EntryMalformed {
        /// The tensor.
        tensor: String,
        /// What is wrong with its entry.
        reason: String,
    },

    /// The data type is not one that safetensors knows.
    #[error("tensor {} has the unknown dtype {}", text::name(tensor), text::name(dtype))]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The dtype as the header has it.
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
        /// Which dimension, counted from 0.
        dimension: usize,
        /// What stands there.
        value: String,
    },

    /// An offset is not a whole number from 0 to 2^64 - 1.
    #[error("tensor {}: a data offset is {value}, not a whole number below 2^64", text::name(tensor))]
    BadOffset {
        /// The tensor.
        tensor: String,
        /// What stands there.
        value: String,
    },

    /// The size that shape and dtype give cannot be counted in 64 bits.
    #[error("tensor {}: the size of {dtype} {} overflows 64 bits", text::name(tensor), text::shape(shape))]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },

    /// A tensor of a sub-byte dtype does not fill its last byte.
    #[error("tensor {}: {bits} bits of {dtype} are not whole bytes", text::name(tensor))]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// How many bits shape and dtype give.
        bits: u64,
    },

    /// A tensor ends before it begins.
    #[error("tensor {}: its data offsets [{begin}, {end}] are the wrong way round", text::name(tensor))]
    OffsetsReversed {
        /// The tensor.
        tensor: String,
        /// The first data offset, as the header has it.
        begin: u64,
        /// The second.
        end: u64,
    },

    /// A tensor reaches past the end of the file.
    #[error(
        "tensor {} ends at byte {end} but the file has only {file_bytes}; the file is torn, fetch it again",
        text::name(tensor)
    )]
    BeyondFile {
        /// The tensor.
        tensor: String,
        /// Where it ends (`u64::MAX` if that cannot be counted).
        end: u64,
        /// Size of the file.
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
        /// Size by the offsets.
        offset_bytes: u64,
    },

    /// Two tensors share bytes.
    #[error(
        "tensors {} and {} overlap: the first ends at byte {first_end}, the second begins at byte {second_begin}",
        text::name(first),
        text::name(second)
    )]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// Where the first ends.
        first_end: u64,
        /// Where the second begins.
        second_begin: u64,
    },

    /// Bytes before a tensor belong to nobody.
    #[error(
        "bytes {begin} to {end}, right before tensor {}, belong to no tensor; the file is torn or hides something",
        text::name(tensor)
    )]
    Hole {
        /// The tensor behind the hole.
        tensor: String,
        /// First byte of the hole.
        begin: u64,
        /// First byte after it.
        end: u64,
    },

    /// Bytes after the last tensor belong to nobody.
    #[error(
        "the last tensor ends at byte {begin} but the file has {file_bytes}; it is torn or hides something"
    )]
    TrailingBytes {
        /// Where the last tensor ends, or the header where there is none.
        begin: u64,
        /// Size of the file.
        file_bytes: u64,
    },
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| text::name(name)).collect::<Vec<_>>().join(", ")
}
