//! What callers ask for, and what they get: requests, blocks and their handles.

use std::fmt;
use std::time::Duration;

use super::keys::BlockKey;
use super::units::UNIT_BYTES;
use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, StreamId};
use crate::tag::Tag;

/// What waiting costs no more than creating memory would.
const STREAM_WAIT_DEFAULT: Duration = Duration::from_micros(200);

/// A waits request waits for memory that is at least this part of what it would have to create.
const WORTH_WAITING: u64 = 16;

/// What to allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocRequest {
    /// Size in bytes; at least 1. Blocks are rounded up to 512.
    pub bytes: u64,
    /// Alignment in bytes: a power of two up to the granule. At least 512 is always kept.
    pub align: u64,
    /// What the block is.
    pub tag: Tag,
    /// The stream whose work uses the block; work on others is announced by `record_use`.
    pub stream: StreamId,
    /// How long memory that was freed, and that queued work may still touch, is waited for before more is created: with
    /// the stream_wait_max of [`AllocRequest::new`], a fraction of a millisecond, only where that may save all of the creating,
    /// with more also where it saves a sixteenth, but not for what somebody has waited for in vain.
    /// At the limit it is waited for in any case.
    pub stream_wait_max: Duration,
    /// The longest that the call waits at all: for work that holds what it needs at the limit, and for a sleep or a wake
    /// of its tag. `None`: until that has ended, which it never does where it needs the thread that waits.
    pub wait_max: Option<Duration>,
    /// Whether the block is freed as a whole, whenever that is. Then its memory comes in as few mappings as hold it, none
    /// longer than a span ([`PoolConfig::span_granules`](super::PoolConfig::span_granules)), whatever its tag.
    pub is_freed_whole: bool,
}

impl AllocRequest {
    /// `bytes` for `tag` on the default stream, aligned as every block is.
    #[must_use]
    pub fn new(bytes: u64, tag: Tag) -> Self {
        let (align, stream, stream_wait_max) = (UNIT_BYTES, StreamId::DEFAULT, STREAM_WAIT_DEFAULT);
        Self { bytes, align, tag, stream, stream_wait_max, wait_max: None, is_freed_whole: false }
    }

    /// The same with another stream_wait_max: with more, what is mapped follows what is live also while work is queued.
    #[must_use]
    pub fn waiting_for_streams(mut self, stream_wait_max: Duration) -> Self {
        self.stream_wait_max = stream_wait_max;
        self
    }

    /// The same, waiting for `wait_max` at most, whatever for; then it is refused with an error that names what it waited
    /// for ([`PoolError::TimedOut`](super::PoolError::TimedOut)).
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }

    /// The same, aligned to `align` bytes: a power of two up to the granule.
    #[must_use]
    pub fn aligned_to(mut self, align: u64) -> Self {
        self.align = align;
        self
    }

    /// The same for a block of which no part is freed before the rest: a sleep gives back few large mappings faster than many
    /// small ones. One that is freed in parts all the same keeps what shares a mapping with what is left.
    #[must_use]
    pub fn freed_whole(mut self) -> Self {
        self.is_freed_whole = true;
        self
    }

    /// The same for work on `stream`.
    #[must_use]
    pub fn on(mut self, stream: StreamId) -> Self {
        self.stream = stream;
        self
    }
}

impl AllocRequest {
    /// Whether it waits for memory that is about to be complete, where so much would have to be created.
    pub(super) fn would_wait(&self, pending_bytes: u64, create_bytes: u64) -> bool {
        let least_bytes = if self.has_stream_wait() { create_bytes / WORTH_WAITING } else { create_bytes };
        pending_bytes >= least_bytes.max(1)
    }

    /// Whether it has more stream_wait_max than what costs nothing.
    pub(super) fn has_stream_wait(&self) -> bool {
        self.stream_wait_max > STREAM_WAIT_DEFAULT
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
#[non_exhaustive]
pub struct Block {
    /// Its handle.
    pub id: BlockId,
    /// Where it is; stays there until it is freed, asleep or awake. The size is rounded to 512 bytes.
    pub range: DeviceRange,
    /// Bytes asked for.
    pub requested_bytes: u64,
}
