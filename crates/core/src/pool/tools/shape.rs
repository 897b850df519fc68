//! The sizes of a pool, which never change, and how a range is cut into chunks.

use super::config::PoolConfig;
use crate::driver::{DeviceInfo, DeviceRange};

/// Of a chunk: smaller blocks get granules. PyTorch gives tensors of 10 MiB segments of their own.
const LARGE_PART: u64 = 4;

/// Of a span: the largest chunk before a wake.
const LOADING_PART: u64 = 4;

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Shape {
    pub(in crate::pool) granule_bytes: u64,
    pub(in crate::pool) chunk_bytes: u64,
    /// The largest chunk; `chunk_bytes` where larger ones are off.
    pub(in crate::pool) span_bytes: u64,
    /// The largest chunk of a block that was never asleep.
    loading_bytes: u64,
    pub(in crate::pool) segment_bytes: u64,
    pub(in crate::pool) total_bytes: u64,
    pub(in crate::pool) limit_bytes: Option<u64>,
    pub(in crate::pool) keep_backups: bool,
    pub(in crate::pool) links_from_bytes: u64,
}

impl Shape {
    pub(in crate::pool) fn new(config: &PoolConfig, info: &DeviceInfo) -> Self {
        let chunk_bytes = info.granule_bytes * config.chunk_granules;
        let span_bytes = chunk_bytes * config.chunks_of_span();
        // What freed parts keep of a chunk is beside the bound.
        let is_bounded = config.cached_max_bytes.is_some_and(|bytes| bytes > 0);
        Self {
            granule_bytes: info.granule_bytes,
            chunk_bytes,
            span_bytes,
            loading_bytes: if is_bounded {
                chunk_bytes
            } else {
                (span_bytes / LOADING_PART).max(chunk_bytes)
            },
            segment_bytes: info.granule_bytes * config.segment_granules,
            total_bytes: match info.total_bytes {
                // Unknown: the device refuses then.
                0 => config.limit_bytes.unwrap_or(u64::MAX),
                bytes => bytes,
            },
            limit_bytes: config.limit_bytes,
            keep_backups: config.keeps_backups_on(info),
            links_from_bytes: config.links_from_bytes,
        }
    }

    pub(in crate::pool) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or(self.total_bytes)
    }

    /// Whether a block has chunks of its own, but for the end of its last granule.
    pub(in crate::pool) fn is_large(&self, bytes: u64) -> bool {
        bytes >= self.large_bytes() && self.chunk_bytes > self.granule_bytes
    }

    /// The smallest block that has chunks of its own.
    pub(in crate::pool) fn large_bytes(&self) -> u64 {
        (self.chunk_bytes / LARGE_PART).max(2 * self.granule_bytes)
    }

    /// The bytes that a block of this size needs in granules.
    pub(in crate::pool) fn small_demand(&self, bytes: u64) -> u64 {
        let granule = self.granule_bytes;
        match bytes % granule {
            _ if bytes < granule => bytes,
            0 if self.is_large(bytes) => 0,
            _ if self.is_large(bytes) => granule,
            _ => bytes.next_multiple_of(granule),
        }
    }

    /// A segment's granules are counted in memory, so their number fits.
    pub(in crate::pool) fn granules(&self, bytes: u64) -> usize {
        usize::try_from(bytes / self.granule_bytes).unwrap_or(usize::MAX)
    }

    pub(in crate::pool) fn granule_range(&self, addr: u64, first: usize, count: usize) -> DeviceRange {
        DeviceRange::new(addr + first as u64 * self.granule_bytes, count as u64 * self.granule_bytes)
    }

    /// `range`, to the end of its last granule, in as few chunks of at most `largest_bytes` as possible. The last is no
    /// granule if it need not be: granules serve small blocks, and the next block of this size would miss it.
    pub(in crate::pool) fn exact_chunks(
        &self,
        range: DeviceRange,
        largest_bytes: u64,
    ) -> impl Iterator<Item = DeviceRange> + use<> {
        let most = (largest_bytes / self.granule_bytes).max(1) * self.granule_bytes;
        let bytes = range.bytes.next_multiple_of(self.granule_bytes);
        let count = bytes.div_ceil(most);
        let is_lone = bytes % most == self.granule_bytes && most > 2 * self.granule_bytes;
        let short_bytes = if is_lone { self.granule_bytes } else { 0 };
        (0..count).map(move |nth| {
            let from = if nth + 1 == count { (nth * most).saturating_sub(short_bytes) } else { nth * most };
            let to =
                if nth + 2 == count { (nth + 1) * most - short_bytes } else { bytes.min((nth + 1) * most) };
            DeviceRange::new(range.addr + from, to - from)
        })
    }

    /// The largest chunk of a new block. A block that may leave before it was asleep has smaller ones: more of them
    /// serve the next block where they are.
    pub(in crate::pool) fn largest_chunk(&self, is_discardable: bool) -> u64 {
        if is_discardable { self.span_bytes } else { self.loading_bytes }
    }
}
