//! What a pool holds, in figures and in full.

use serde::Serialize;

use super::segment::Backing;
use super::state::State;
use crate::tag::{Tag, TagState};

/// Figures of a pool, in bytes unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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
    pub owed_bytes: u64,
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
pub struct Snapshot {
    /// The segments.
    pub segments: Vec<SegmentSnapshot>,
}

/// One segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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
pub struct BlockSnapshot {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes asked for; absent when the block is free.
    pub requested_bytes: Option<u64>,
}

impl State {
    pub(super) fn stats(&self) -> PoolStats {
        let mapped_bytes = self.ledger.held_bytes();
        let worth_naming = |stats: &TagStats| {
            stats.live_blocks > 0 || stats.mapped_bytes > 0 || stats.state != TagState::Awake
        };
        let tags: Vec<TagStats> =
            self.tags.keys().map(|tag| self.tag_stats(tag)).filter(worth_naming).collect();
        let live_mapped: u64 =
            tags.iter().filter(|stats| stats.state.is_held()).map(|stats| stats.live_bytes).sum();
        PoolStats {
            live_bytes: self.live_bytes,
            mapped_bytes,
            peak_live_bytes: self.peak_live_bytes,
            peak_mapped_bytes: self.ledger.peak_bytes(),
            created_bytes: self.ledger.created_bytes(),
            cached_bytes: mapped_bytes.saturating_sub(live_mapped),
            owed_bytes: self.ledger.owed_bytes(),
            reserved_bytes: self.segments.values().map(|segment| segment.range.bytes).sum(),
            backup_bytes: tags.iter().map(|stats| stats.backup_bytes).sum(),
            limit_bytes: self.limit_bytes(),
            live_blocks: tags.iter().map(|stats| stats.live_blocks).sum(),
            segments: self.segments.len(),
            tags,
        }
    }

    fn tag_stats(&self, tag: &Tag) -> TagStats {
        let slots = || self.segments.values().filter(|segment| segment.tag == *tag).flat_map(|s| &s.slots);
        let entry = self.tags.get(tag);
        TagStats {
            tag: tag.clone(),
            state: entry.map_or(TagState::Awake, |entry| entry.state),
            live_bytes: entry.map_or(0, |entry| entry.live_bytes),
            mapped_bytes: slots().filter(|slot| slot.backing != Backing::Absent).map(|slot| slot.bytes).sum(),
            backup_bytes: slots()
                .filter_map(|slot| slot.backup.as_ref())
                .map(|b| b.buffer.len() as u64)
                .sum(),
            live_blocks: entry.map_or(0, |entry| entry.live_blocks),
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let mut segments: Vec<SegmentSnapshot> = self
            .segments
            .values()
            .map(|segment| SegmentSnapshot {
                tag: segment.tag.clone(),
                addr: segment.range.addr,
                bytes: segment.range.bytes,
                mapped_bytes: segment.range.bytes - segment.absent_bytes(0..segment.slots.len()),
                blocks: self
                    .blocks
                    .walk(segment.first)
                    .map(|block| BlockSnapshot {
                        addr: segment.range.addr + block.offset,
                        bytes: block.bytes,
                        requested_bytes: block.requested_bytes,
                    })
                    .collect(),
            })
            .collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }
}
