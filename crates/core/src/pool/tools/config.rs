//! Settings of a pool.

use super::error::{PoolError, Result};
use super::units::bytes_max;
use crate::backup::Compress;
use crate::bytes::ByteSize;
use crate::driver::DeviceInfo;

/// Settings of a pool. The default suits a whole device.
///
/// ```
/// use poorwill::{Arena, Config, PoolConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = PoolConfig::default().limited_to(32 << 20).caching_at_most(4 << 20);
/// let arena = Arena::open(Config::on("host:64MiB".parse()?).pooling(pool))?;
/// assert_eq!(arena.limit_bytes(), 32 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Most physical memory, at least one granule. `None`: all of the device.
    pub limit_bytes: Option<u64>,
    /// Granules of a chunk, by which backups are cut, and which blocks get where a device refuses larger
    /// mappings. Blocks of at least a quarter of it, and of two granules, get mappings of exactly their length.
    /// The end of their last granule serves smaller blocks, which get single granules.
    pub chunk_granules: u64,
    /// Granules of the largest mapping, rounded down to whole chunks; by default 1 GiB for granules of 2 MiB.
    ///
    /// Mappings cost driver calls at every sleep and wake. Blocks that every sleep drops
    /// ([`TagPolicy::is_discardable`](crate::tag::TagPolicy::is_discardable)) or that a wake brings back get the
    /// fewest. Others get mappings of at most a quarter of it, or of a chunk where `cached_max_bytes` says so. A mapping
    /// goes back whole, once all of its block is freed, or at the next wake. Where freed parts keep too much so, new
    /// blocks get smaller ones. At least a chunk; with chunks of one granule, all mappings are granules.
    pub span_granules: u64,
    /// Granules of address space by which the pool grows for smaller blocks.
    pub segment_granules: u64,
    /// Cached bytes above which free memory is released in the background. `None`: it stays until needed or trimmed.
    /// A bound above zero, when the pool is opened, makes the mappings of loading smaller (`span_granules`): what freed
    /// parts keep of one comes on top. See [`Pool::set_cached_max_bytes`](crate::Pool::set_cached_max_bytes).
    pub cached_max_bytes: Option<u64>,
    /// Whether backups stay in host memory after a wake, so that the next sleep copies only changes.
    /// [`Pool::drop_backups`](crate::Pool::drop_backups) and a lack of host memory drop them. `None`: unless the device
    /// [shares host memory](crate::DeviceInfo::shares_host_memory), where they would double what is awake.
    pub keep_backups: Option<bool>,
    /// The least bytes that a sleep has backed up, for which [links](crate::DeviceInfo::links) of other devices are opened
    /// behind it, for wakes; by default 2 GiB. They stay open, at the expense of some memory of those devices.
    pub links_from_bytes: u64,
    /// Whether backups are stored as codes. A pool with a storage of its own ignores it.
    pub compress: Compress,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            chunk_granules: 16,
            span_granules: 512,
            segment_granules: 32,
            cached_max_bytes: None,
            keep_backups: None,
            links_from_bytes: 2 << 30,
            compress: Compress::Auto,
        }
    }
}

impl PoolConfig {
    /// Sets the limit.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// Sets the chunk size; at least 1.
    #[must_use]
    pub fn in_chunks_of(mut self, chunk_granules: u64) -> Self {
        self.chunk_granules = chunk_granules;
        self
    }

    /// Sets the largest span.
    #[must_use]
    pub fn in_spans_of(mut self, span_granules: u64) -> Self {
        self.span_granules = span_granules;
        self
    }

    /// Sets the segment size; at least 1.
    #[must_use]
    pub fn in_segments_of(mut self, segment_granules: u64) -> Self {
        self.segment_granules = segment_granules;
        self
    }

    /// Sets the cache's limit.
    #[must_use]
    pub fn caching_at_most(mut self, cached_max_bytes: impl Into<Option<u64>>) -> Self {
        self.cached_max_bytes = cached_max_bytes.into();
        self
    }

    /// Sets whether backups stay after a wake.
    #[must_use]
    pub fn keeping_backups(mut self, keep_backups: impl Into<Option<bool>>) -> Self {
        self.keep_backups = keep_backups.into();
        self
    }

    /// Sets from how many bytes on links of other devices are opened.
    #[must_use]
    pub fn linking_from(mut self, links_from_bytes: u64) -> Self {
        self.links_from_bytes = links_from_bytes;
        self
    }

    /// Whether backups stay after a wake on this device.
    #[must_use]
    pub fn keeps_backups_on(&self, info: &DeviceInfo) -> bool {
        self.keep_backups.unwrap_or(!info.shares_host_memory)
    }

    /// Sets whether backups are stored as codes.
    #[must_use]
    pub fn compressing(mut self, compress: Compress) -> Self {
        self.compress = compress;
        self
    }

    pub(super) fn chunks_of_span(&self) -> u64 {
        let has_chunks = self.chunk_granules > 1;
        if has_chunks { (self.span_granules / self.chunk_granules).max(1) } else { 1 }
    }

    pub(in crate::pool) fn check(&self, info: &DeviceInfo) -> Result<()> {
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
