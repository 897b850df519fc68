//! How a pool behaves.

use super::error::{PoolError, Result};
use super::units::bytes_max;
use crate::bytes::ByteSize;
use crate::driver::DeviceInfo;

/// How a pool behaves. The default suits a whole device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Most bytes of backing the pool may hold, at least one granule. `None`: what the device has.
    pub limit_bytes: Option<u64>,
    /// Granules of a chunk, the mapping in which blocks of at least this size get their memory. Their ends, and
    /// smaller blocks, get single granules.
    pub chunk_granules: u64,
    /// Granules of a span, rounded down to whole chunks: the longest that a mapping may be, 1 GiB where a granule is 2 MiB
    /// and nothing else is said. A sleep and a wake take calls of the driver for each mapping, so what one block has to
    /// itself is one mapping of just its length, or as few as hold it, in three cases: the block's tag is dropped by a sleep
    /// at whichever level ([`TagPolicy::is_discardable`](crate::tag::TagPolicy::is_discardable)); the block is freed as a
    /// whole ([`AllocRequest::freed_whole`](super::AllocRequest::freed_whole)); or a wake brings it back, since what lives
    /// by then outlives its load. Such a mapping that is freed in parts leaves as a whole, as a chunk does, or with the next
    /// sleep: the wake after it brings back what lives. Where this is no more than a chunk, or a chunk is one granule,
    /// blocks are allocated in chunks and granules only, and a wake brings nothing back in longer mappings than chunks.
    pub span_granules: u64,
    /// Granules of address space that the pool grows by for smaller blocks.
    pub segment_granules: u64,
    /// Cached bytes above which memory that nothing uses is given back soon, in the background. `None`: it is
    /// kept until somebody needs it or trims. [`Pool::set_cached_max_bytes`](super::Pool::set_cached_max_bytes) changes it.
    pub cached_max_bytes: Option<u64>,
    /// Whether backups stay in host memory after a wake, to save the next copy of what has not changed, until
    /// [`Pool::drop_backups`](super::Pool::drop_backups) or somebody who lacks host memory lets them go.
    pub keep_backups: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            chunk_granules: 16,
            span_granules: 512,
            segment_granules: 32,
            cached_max_bytes: None,
            keep_backups: true,
        }
    }
}

impl PoolConfig {
    /// The same, holding at most `limit_bytes` of backing; `None`: what the device has.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// The same, with chunks of this many granules; at least 1.
    #[must_use]
    pub fn in_chunks_of(mut self, chunk_granules: u64) -> Self {
        self.chunk_granules = chunk_granules;
        self
    }

    /// The same, with spans of at most this many granules; no more than a chunk has: no spans.
    #[must_use]
    pub fn in_spans_of(mut self, span_granules: u64) -> Self {
        self.span_granules = span_granules;
        self
    }

    /// The same, growing by this many granules of address space; at least 1.
    #[must_use]
    pub fn in_segments_of(mut self, segment_granules: u64) -> Self {
        self.segment_granules = segment_granules;
        self
    }

    /// The same, keeping about `cached_max_bytes` of memory that nothing uses; `None`: all of it.
    #[must_use]
    pub fn caching_at_most(mut self, cached_max_bytes: impl Into<Option<u64>>) -> Self {
        self.cached_max_bytes = cached_max_bytes.into();
        self
    }

    /// The same, with backups that stay in host memory after a wake, or leave it.
    #[must_use]
    pub fn keeping_backups(mut self, keep_backups: bool) -> Self {
        self.keep_backups = keep_backups;
        self
    }

    pub(super) fn chunks_of_span(&self) -> u64 {
        let has_chunks = self.chunk_granules > 1;
        if has_chunks { (self.span_granules / self.chunk_granules).max(1) } else { 1 }
    }

    /// Refuses what no device could make right.
    pub(super) fn check(&self, info: &DeviceInfo) -> Result<()> {
        let invalid = |reason: String| Err(PoolError::InvalidConfig { reason });
        if self.chunk_granules == 0 || self.segment_granules == 0 {
            return invalid("a chunk and a segment have at least one granule".into());
        }
        let largest = self.chunk_granules.max(self.span_granules).max(self.segment_granules);
        let most = bytes_max(info.granule_bytes);
        if largest.checked_mul(info.granule_bytes).is_none_or(|bytes| bytes > most) {
            let size = ByteSize(most);
            return invalid(format!("a chunk, span or segment has at most {size} ({most} bytes)"));
        }
        if let Some(limit) = self.limit_bytes.filter(|limit| *limit < info.granule_bytes).map(ByteSize) {
            let granule = ByteSize(info.granule_bytes);
            return invalid(format!("a limit of {limit} is below one granule of {granule}; raise it"));
        }
        Ok(())
    }
}
