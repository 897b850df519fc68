//! What callers ask for, and what they get: requests, blocks and their handles.

use std::fmt;

use super::bins::UNIT_BYTES;
use super::blocks::BlockKey;
use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, StreamId};
use crate::tag::Tag;

/// What to allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocRequest {
    /// Size in bytes; at least 1. Blocks are rounded up to 512.
    pub bytes: u64,
    /// Alignment in bytes: a power of two up to the granule. At least 512 is always kept.
    pub align: u64,
    /// What the block is.
    pub tag: Tag,
    /// The stream whose work uses the block; work on others is announced by `record_use`.
    pub stream: StreamId,
}

impl AllocRequest {
    /// `bytes` for `tag` on the default stream, aligned as every block is.
    #[must_use]
    pub fn new(bytes: u64, tag: Tag) -> Self {
        Self { bytes, align: UNIT_BYTES, tag, stream: StreamId::DEFAULT }
    }

    /// The same for work on `stream`.
    #[must_use]
    pub fn on(mut self, stream: StreamId) -> Self {
        self.stream = stream;
        self
    }
}

impl fmt::Display for AllocRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocate {} for `{}`", ByteSize(self.bytes), self.tag)
    }
}

/// Handle of a live block. Generational: after the block is freed the handle is an error for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pub(super) pool: u32,
    pub(super) key: BlockKey,
    /// Counts the pool's allocations; the key's own generation would come round after 2³¹ of them.
    pub(super) serial: u64,
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}.{}", self.pool, self.serial)
    }
}

/// A live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its handle.
    pub id: BlockId,
    /// Where it is; stays there until it is freed, asleep or awake. The size is rounded to 512 bytes.
    pub range: DeviceRange,
    /// Bytes asked for.
    pub requested_bytes: u64,
}
