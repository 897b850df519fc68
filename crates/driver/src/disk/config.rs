//! Options of a disk.

use std::path::PathBuf;

/// Where a disk's file is, and how it is used.
///
/// ```
/// use poorwill_driver::disk::DiskConfig; // In the library: poorwill::disk.
///
/// let config = DiskConfig::in_folder("/mnt/nvme").limited_to(64 << 30);
/// assert_eq!(config.limit_bytes, Some(64 << 30));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskConfig {
    /// The folder, on a local disk.
    pub folder: PathBuf,
    /// Most bytes that it may hold; `None`: what the file system has.
    pub limit_bytes: Option<u64>,
    /// How bytes are transferred.
    pub io: DiskIo,
    /// Whether transfers bypass the page cache, where the file system allows it.
    pub is_direct: bool,
}

/// How bytes are transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DiskIo {
    /// By `io_uring` where the kernel has it.
    #[default]
    Auto,
    /// By threads.
    Threads,
}

impl DiskConfig {
    /// All of the file system's space.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), limit_bytes: None, io: DiskIo::Auto, is_direct: true }
    }

    /// Sets the limit.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// Sets how bytes are transferred.
    #[must_use]
    pub fn by(mut self, io: DiskIo) -> Self {
        self.io = io;
        self
    }

    /// Sets whether transfers bypass the page cache.
    #[must_use]
    pub fn directly(mut self, is_direct: bool) -> Self {
        self.is_direct = is_direct;
        self
    }
}
