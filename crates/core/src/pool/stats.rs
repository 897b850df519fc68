//! Figures and snapshots of a pool.

use serde::Serialize;

use super::state::PoolState;
use crate::backup::DiskInfo;
use crate::pool::parts::heap::{HeapBlockKind, Segment};
use crate::pool::parts::physical::Counters;
use crate::pool::tools::keys::TagKey;
use crate::tag::{Tag, TagState};

/// Figures of a pool.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// let stats = arena.stats()?;
/// assert_eq!((stats.live_bytes, stats.mapped_bytes), (3 << 20, 4 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PoolStats {
    /// In live blocks, rounded up to 512.
    pub live_bytes: u64,
    /// Physical memory held.
    pub mapped_bytes: u64,
    /// Peak of live bytes.
    pub peak_live_bytes: u64,
    /// Peak of physical memory.
    pub peak_mapped_bytes: u64,
    /// Created since the pool was opened, released or not.
    pub created_bytes: u64,
    /// Held, but not live.
    pub cached_bytes: u64,
    /// Of these, refused for release by the driver so far.
    pub deferred_release_bytes: u64,
    /// Lent by sleeps: not held, and in use until others need it.
    pub lent_bytes: u64,
    /// Copied to other devices' memory, as far as is known: in use there until others need it.
    pub peer_bytes: u64,
    /// Of the mapped bytes, what sleeps and stays with its only copy until others need it.
    pub resident_bytes: u64,
    /// Address space.
    pub reserved_bytes: u64,
    /// Host memory.
    pub backup_bytes: u64,
    /// Disk space of backups.
    pub backup_disk_bytes: u64,
    /// Device memory of which both hold the bytes; more where these are codes.
    pub backup_raw_bytes: u64,
    /// The disk for backups, if any: how it works, and what it holds of all its pools.
    pub disk: Option<DiskInfo>,
    /// Limit of physical memory.
    pub limit_bytes: u64,
    /// Live blocks.
    pub live_blocks: usize,
    /// Segments.
    pub segments: usize,
    /// By tag, for tags that have blocks, hold memory or sleep.
    pub tags: Vec<TagStats>,
}

/// Figures of one tag.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// for tag in arena.stats()?.tags {
///     println!("{}: {} bytes live, {}", tag.tag, tag.live_bytes, tag.state);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TagStats {
    /// The tag.
    pub tag: Tag,
    /// Where its bytes are.
    pub state: TagState,
    /// In live blocks.
    pub live_bytes: u64,
    /// Physical memory held.
    pub mapped_bytes: u64,
    /// Host memory.
    pub backup_bytes: u64,
    /// Disk space of backups.
    pub backup_disk_bytes: u64,
    /// Device memory of which both hold the bytes; more where these are codes.
    pub backup_raw_bytes: u64,
    /// Live blocks.
    pub live_blocks: usize,
}

/// All segments and blocks.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// let snapshot = arena.snapshot()?;
/// assert_eq!(snapshot.segments[0].tag, Tag::weights());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// In address order.
    pub segments: Vec<SegmentSnapshot>,
}

/// One segment.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// for segment in arena.snapshot()?.segments {
///     println!("{:#x}: {} of {} bytes mapped", segment.addr, segment.mapped_bytes, segment.bytes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Owner.
    pub tag: Tag,
    /// First address.
    pub addr: u64,
    /// Address space.
    pub bytes: u64,
    /// Physical memory held.
    pub mapped_bytes: u64,
    /// Live and free, without gaps.
    pub blocks: Vec<BlockSnapshot>,
}

/// One block.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// let found = arena.snapshot()?.segments.into_iter().flat_map(|segment| segment.blocks);
/// let found = found.into_iter().find(|found| found.addr == block.range.addr).ok_or("it is live")?;
/// assert_eq!(found.requested_bytes, Some(3 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// First address.
    pub addr: u64,
    /// Size.
    pub bytes: u64,
    /// State.
    pub kind: BlockKind,
    /// `None` for a free block.
    pub requested_bytes: Option<u64>,
}

/// State of a block.
///
/// ```
/// use poorwill::pool::BlockKind;
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(3 << 20, Tag::weights()))?;
/// let blocks = arena.snapshot()?.segments.into_iter().flat_map(|segment| segment.blocks);
/// assert_eq!(blocks.filter(|block| block.kind == BlockKind::Live).count(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockKind {
    /// In use.
    Live,
    /// Freed; other streams may still use it.
    Waiting,
    /// Free, mapped in single granules.
    Small,
    /// Free, mapped in chunks.
    Large,
    /// Free, in a chunk of which another part is live.
    Pinned,
    /// Free addresses without memory.
    Unmapped,
    /// The driver has refused to unmap it so far.
    UnmapFailed,
}

/// What a pool remembers; for tests of forgetting.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remembered {
    /// Known tags.
    pub tags: usize,
    /// Free lists by tag and stream.
    pub stream_lists: usize,
    /// Streams whose work is awaited.
    pub clocks: usize,
    /// Recorded uses of live blocks.
    pub uses: usize,
}

impl BlockKind {
    fn of(kind: HeapBlockKind) -> Option<Self> {
        Some(match kind {
            HeapBlockKind::Live => Self::Live,
            HeapBlockKind::Waiting => Self::Waiting,
            HeapBlockKind::Small => Self::Small,
            HeapBlockKind::Large => Self::Large,
            HeapBlockKind::Pinned => Self::Pinned,
            HeapBlockKind::Unmapped => Self::Unmapped,
            HeapBlockKind::UnmapFailed => Self::UnmapFailed,
            HeapBlockKind::Vacant => return None,
        })
    }
}

impl PoolState {
    pub(super) fn stats(&self, counters: &Counters) -> PoolStats {
        let worth_naming = |stats: &TagStats| {
            stats.live_blocks > 0 || stats.mapped_bytes > 0 || stats.state != TagState::Awake
        };
        let keys = self.tags().selected("list", None).unwrap_or_default();
        let tags: Vec<TagStats> =
            keys.into_iter().map(|tag| self.tag_stats(tag)).filter(worth_naming).collect();
        PoolStats {
            live_bytes: self.heap().live_bytes(),
            mapped_bytes: counters.held_bytes(),
            peak_live_bytes: self.heap().peak_live_bytes(),
            peak_mapped_bytes: counters.peak_bytes(),
            created_bytes: counters.created_bytes(),
            cached_bytes: self.cached_bytes(counters),
            deferred_release_bytes: counters.deferred_release_bytes(),
            lent_bytes: self.lent().lent_bytes(),
            peer_bytes: self.peer_copies().bytes(),
            resident_bytes: self.lent().resident_bytes(),
            reserved_bytes: self.heap().segments().iter().map(|(_, segment)| segment.range().bytes).sum(),
            backup_bytes: tags.iter().map(|stats| stats.backup_bytes).sum(),
            backup_disk_bytes: tags.iter().map(|stats| stats.backup_disk_bytes).sum(),
            backup_raw_bytes: tags.iter().map(|stats| stats.backup_raw_bytes).sum(),
            disk: None,
            limit_bytes: self.heap().shape().limit_bytes(),
            live_blocks: tags.iter().map(|stats| stats.live_blocks).sum(),
            segments: self.heap().segments().len(),
            tags,
        }
    }

    fn tag_stats(&self, key: TagKey) -> TagStats {
        let (entry, live) = (self.tags().get(key), self.heap().live_of(key));
        TagStats {
            tag: entry.name().clone(),
            state: entry.state(),
            live_bytes: live.live_bytes,
            mapped_bytes: self.heap().segments().of_tag(key).map(|(_, segment)| segment.held_bytes()).sum(),
            backup_bytes: self.backups().bytes(key),
            backup_disk_bytes: self.backups().disk_bytes(key),
            backup_raw_bytes: self.backups().raw_bytes(key),
            live_blocks: live.live_blocks,
        }
    }

    pub(super) fn remembered(&self) -> Remembered {
        Remembered {
            tags: self.tags().count(),
            stream_lists: self.heap().list_count(),
            clocks: self.heap().clocks().count(),
            uses: self.heap().uses(),
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let mut segments: Vec<SegmentSnapshot> =
            self.heap().segments().iter().map(|(_, segment)| self.segment_snapshot(segment)).collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }

    fn segment_snapshot(&self, segment: &Segment) -> SegmentSnapshot {
        let blocks = self.heap().walk(segment).filter_map(|(kind, block)| {
            let requested_bytes = (kind == HeapBlockKind::Live).then(|| block.requested_bytes());
            let kind = BlockKind::of(kind)?;
            Some(BlockSnapshot { addr: block.addr, bytes: block.bytes(), kind, requested_bytes })
        });
        SegmentSnapshot {
            tag: self.tags().get(segment.tag()).name().clone(),
            addr: segment.range().addr,
            bytes: segment.range().bytes,
            mapped_bytes: segment.held_bytes(),
            blocks: blocks.collect(),
        }
    }
}
