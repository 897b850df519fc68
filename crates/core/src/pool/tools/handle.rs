//! Allocation requests, blocks and their handles.

use std::fmt;
use std::time::Duration;

use super::keys::BlockKey;
use super::units::UNIT_BYTES;
use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, StreamId};
use crate::tag::Tag;

/// Waiting this long costs no more than creating memory.
const STREAM_WAIT_DEFAULT: Duration = Duration::from_micros(200);

/// With a longer wait, this part of the memory to create is worth waiting for.
const WORTH_WAITING: u64 = 16;

/// What to allocate.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let stream = arena.driver().stream_create()?;
/// let request = AllocRequest::new(1000, Tag::weights()).aligned_to(4096).on(stream);
/// let block = arena.alloc(&request)?;
/// assert_eq!((block.range.addr % 4096, block.range.bytes), (0, 1024));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocRequest {
    /// At least 1; blocks are rounded up to 512.
    pub bytes: u64,
    /// In bytes: a power of two up to the granule; at least 512.
    pub align: u64,
    /// What the block is.
    pub tag: Tag,
    /// The stream that uses the block; others by [`Pool::record_use`](crate::Pool::record_use).
    pub stream: StreamId,
    /// Longest wait for freed memory that queued work may still use, before more is created. The default, 0.2
    /// ms, waits only if that may save all creation; more also waits for a sixteenth. Memory once awaited in
    /// vain is not awaited again. The limit forces a wait.
    pub stream_wait_max: Duration,
    /// Longest wait of the call in all: for work, and for a sleep or wake of its tag. `None`: no limit, even
    /// if that needs the waiting thread.
    pub wait_max: Option<Duration>,
    /// Whether parts of the block will be freed alone ([`Pool::free_part`](crate::Pool::free_part)). Its memory is
    /// single granules then, each of which goes back alone.
    pub is_freed_in_parts: bool,
}

impl AllocRequest {
    /// On the default stream, with the default alignment.
    #[must_use]
    pub fn new(bytes: u64, tag: Tag) -> Self {
        let (align, stream, stream_wait_max) = (UNIT_BYTES, StreamId::DEFAULT, STREAM_WAIT_DEFAULT);
        Self { bytes, align, tag, stream, stream_wait_max, wait_max: None, is_freed_in_parts: false }
    }

    /// Sets `stream_wait_max`: a longer one saves memory while work is queued.
    #[must_use]
    pub fn waiting_for_streams(mut self, stream_wait_max: Duration) -> Self {
        self.stream_wait_max = stream_wait_max;
        self
    }

    /// Sets `wait_max`; after it the call fails with [`PoolError::TimedOut`](crate::PoolError::TimedOut).
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }

    /// Sets the alignment.
    #[must_use]
    pub fn aligned_to(mut self, align: u64) -> Self {
        self.align = align;
        self
    }

    /// For a block whose parts are freed alone: single granules cost more driver calls, and each goes back
    /// alone.
    #[must_use]
    pub fn freed_in_parts(mut self) -> Self {
        self.is_freed_in_parts = true;
        self
    }

    /// For work on `stream`.
    #[must_use]
    pub fn on(mut self, stream: StreamId) -> Self {
        self.stream = stream;
        self
    }
}

impl AllocRequest {
    /// Whether to wait for `pending_bytes` instead of creating `create_bytes`.
    pub(in crate::pool) fn would_wait(&self, pending_bytes: u64, create_bytes: u64) -> bool {
        let least_bytes = if self.has_stream_wait() { create_bytes / WORTH_WAITING } else { create_bytes };
        pending_bytes >= least_bytes.max(1)
    }

    pub(in crate::pool) fn has_stream_wait(&self) -> bool {
        self.stream_wait_max > STREAM_WAIT_DEFAULT
    }
}

impl fmt::Display for AllocRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocate {} for `{}`", ByteSize(self.bytes), self.tag)
    }
}

/// Handle of a live block. After the free it stays an error: generations do not repeat.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, PoolError, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1000, Tag::weights()))?;
/// arena.free(block.id)?;
/// assert!(matches!(arena.free(block.id), Err(PoolError::StaleBlock { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pub(in crate::pool) pool: u32,
    pub(in crate::pool) key: BlockKey,
    /// Counts the pool's allocations; the key's own generation would come round after 2³¹ of them.
    pub(in crate::pool) serial: u64,
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}.{}", self.pool, self.serial)
    }
}

/// A live block.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1000, Tag::weights()))?;
/// assert_eq!((block.requested_bytes, block.range.bytes), (1000, 1024));
/// println!("kernels find it at {:#x}", block.range.addr);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Block {
    /// Its handle.
    pub id: BlockId,
    /// Fixed until the free, asleep or awake; rounded up to 512 bytes.
    pub range: DeviceRange,
    /// As requested.
    pub requested_bytes: u64,
}
