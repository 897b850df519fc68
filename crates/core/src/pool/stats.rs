//! What a pool holds, in figures and in full.

use serde::Serialize;

use super::heap::{Kind, Segment};
use super::keys::TagKey;
use super::physical::Counters;
use super::state::State;
use crate::tag::{Tag, TagState};

/// Figures of a pool, in bytes unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PoolStats {
    /// In use by live blocks, rounded to 512.
    pub live_bytes: u64,
    /// Backing held: created and not released.
    pub mapped_bytes: u64,
    /// Most bytes of live blocks at any time.
    pub peak_live_bytes: u64,
    /// Most backing held at any time.
    pub peak_mapped_bytes: u64,
    /// Backing created since the pool was opened, whether released since or not.
    pub created_bytes: u64,
    /// Held, but not live.
    pub cached_bytes: u64,
    /// Of which the driver has refused a release so far.
    pub deferred_release_bytes: u64,
    /// Address space.
    pub reserved_bytes: u64,
    /// Host memory of backups.
    pub backup_bytes: u64,
    /// Most that may be mapped.
    pub limit_bytes: u64,
    /// Live blocks.
    pub live_blocks: usize,
    /// Segments.
    pub segments: usize,
    /// The same by tag, for tags that have blocks, hold memory or sleep.
    pub tags: Vec<TagStats>,
}

/// Figures of one tag, in bytes unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TagStats {
    /// The tag.
    pub tag: Tag,
    /// Where its bytes are.
    pub state: TagState,
    /// In use by live blocks.
    pub live_bytes: u64,
    /// Backing held.
    pub mapped_bytes: u64,
    /// Host memory of backups.
    pub backup_bytes: u64,
    /// Live blocks.
    pub live_blocks: usize,
}

/// Everything a pool holds, in address order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// The segments.
    pub segments: Vec<SegmentSnapshot>,
}

/// One segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Whose it is.
    pub tag: Tag,
    /// First address.
    pub addr: u64,
    /// Address space, in bytes.
    pub bytes: u64,
    /// Backing held, in bytes.
    pub mapped_bytes: u64,
    /// Its blocks, live and free, without gaps.
    pub blocks: Vec<BlockSnapshot>,
}

/// One block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// What it is.
    pub kind: BlockKind,
    /// Bytes asked for; absent when the block is free.
    pub requested_bytes: Option<u64>,
}

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockKind {
    /// In use.
    Live,
    /// Freed, while other streams may still use it.
    Waiting,
    /// Free, with memory in single granules.
    Small,
    /// Free, with memory in whole chunks.
    Large,
    /// Free, a part of a chunk of which other parts are in use.
    Pinned,
    /// Free addresses without memory.
    Unmapped,
    /// Memory that the driver refuses to unmap so far.
    UnmapFailed,
}

/// How much a pool has to remember of what comes and goes.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remembered {
    /// Tags that it knows.
    pub tags: usize,
    /// Streams, by tag, that free memory is kept apart for.
    pub stream_lists: usize,
    /// Streams whose work is waited for.
    pub clocks: usize,
    /// Streams, by live block, whose work is to be waited for when it is freed.
    pub uses: usize,
}

impl BlockKind {
    fn of(kind: Kind) -> Option<Self> {
        Some(match kind {
            Kind::Live => Self::Live,
            Kind::Waiting => Self::Waiting,
            Kind::Small => Self::Small,
            Kind::Large => Self::Large,
            Kind::Pinned => Self::Pinned,
            Kind::Unmapped => Self::Unmapped,
            Kind::UnmapFailed => Self::UnmapFailed,
            Kind::Vacant => return None,
        })
    }
}

impl State {
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
            reserved_bytes: self.heap().segments().iter().map(|(_, segment)| segment.range().bytes).sum(),
            backup_bytes: tags.iter().map(|stats| stats.backup_bytes).sum(),
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
            let requested_bytes = (kind == Kind::Live).then(|| block.requested_bytes());
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
