//! What a load did.

use std::path::PathBuf;

use serde::Serialize;

/// What a load did. Sizes in bytes, times in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Of all tensors.
    pub bytes: u64,
    /// How many there are.
    pub tensors: usize,
    /// Of the buffers that they lie in.
    pub host_bytes: u64,
    /// How many there are.
    pub buffers: usize,
    /// What each tensor begins at a multiple of; `None` where that is the size of its elements.
    pub alignment_bytes: Option<u64>,
    /// From the call until all bytes were there.
    pub seconds: f64,
    /// From the call until all memory was there; reading goes on beside it.
    pub memory_s: f64,
    /// How many read at the same time.
    pub readers: usize,
    /// The most that one reads with a call.
    pub piece_bytes: u64,
    /// Read past the page cache straight into place.
    pub direct_bytes: u64,
    /// Read past the page cache into a reader's own memory, and copied from there: bytes that begin or end where the
    /// device reads nothing, or that lie in memory where it writes nothing.
    pub staged_bytes: u64,
    /// Read through the page cache, which was dropped behind.
    pub buffered_bytes: u64,
    /// The readers' own memory, which was given back.
    pub staging_bytes: u64,
    /// Whether all buffers are page-locked.
    pub pinned: bool,
    /// Why one is not, if one is not.
    pub pageable_because: Option<String>,
    /// How each file was read.
    pub files: Vec<FileReport>,
}

/// How a file was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// The path by which it was opened.
    pub path: PathBuf,
    /// Of its tensors.
    pub bytes: u64,
    /// How it was read.
    pub how: ReadMethod,
    /// Why it was not read directly, if it was not.
    pub because: Option<String>,
}

/// How a file was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReadMethod {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache, which was dropped behind (`POSIX_FADV_DONTNEED`).
    Buffered,
    /// Not at all: it has no bytes of the checkpoint.
    Unread,
}
