//! Bytes that were lost with their backup: what of which blocks they are, and how their owner brings them back.
//!
//! Their tag is [`TagState::Undefined`] as long as any of them is ([`super::undefined`]): reading them is refused, and so is
//! a sleep that would back them up as if they were the owner's. Freeing the block, dropping the tag's bytes, or writing
//! them again and saying so ends that.

use std::fmt;

use serde::{Serialize, Serializer};

use super::blocks::Kind;
use super::error::PoolError;
use super::handle::BlockId;
use super::state::{State, TagKey};
use super::{Pool, Result};
use crate::bytes::ByteSize;
use crate::driver::DeviceRange;
use crate::tag::{Tag, TagState};

const RESTORE: &str = "mark as restored";

/// How many ranges a message names.
const NAMED: usize = 3;

/// Bytes of a live block that were lost: their backup is not what was stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LostRange {
    /// The block's tag.
    pub tag: Tag,
    /// The block.
    #[serde(serialize_with = "as_text")]
    pub block: BlockId,
    /// Where in the block they begin, in bytes.
    pub offset_bytes: u64,
    /// Where on the device they are, and how many.
    #[serde(flatten)]
    pub range: DeviceRange,
}

fn as_text<S: Serializer>(block: &BlockId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(block)
}

impl fmt::Display for LostRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tag, block, offset_bytes, range } = self;
        write!(f, "bytes {offset_bytes}..{} of {block} (`{tag}`)", offset_bytes + range.bytes)
    }
}

/// The first few of `lost`, and how many there are.
pub(super) fn listed(lost: &[LostRange]) -> String {
    let named: Vec<String> = lost.iter().take(NAMED).map(LostRange::to_string).collect();
    let named = named.join(", ");
    let bytes = ByteSize(lost.iter().map(|lost| lost.range.bytes).sum());
    match lost.len() {
        0 | 1 => named,
        count if count <= NAMED => format!("{named} ({bytes})"),
        count => format!("{named} and {} more ranges ({bytes} in {count} ranges)", count - NAMED),
    }
}

impl Pool {
    /// Every range of a block that was lost with its backup, and neither written again nor freed since, by address. What
    /// a sleep has dropped is not among them: there, the whole tag is undefined.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>> {
        let state = self.shared.open_state()?;
        Ok(state.lost_in(&state.undefined.of_tags(|_| true)))
    }

    /// Says that the owner has written again what was lost of a block. Returns that. Its tag is awake as before when
    /// nothing else of it is lost.
    ///
    /// # Errors
    /// `StaleBlock`; `Asleep`; `Undefined` when a sleep has dropped the whole tag: [`Pool::mark_restored`] is for that.
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>> {
        let mut state = self.shared.open_state()?;
        let entry = state.live_block(RESTORE, block)?;
        let tag = state.lane(entry.lane).tag;
        state.check_awake(RESTORE, tag)?;
        // Of what a sleep has dropped nothing is known by blocks.
        state.check_defined(RESTORE, tag, DeviceRange::new(entry.addr, 0))?;
        let range = DeviceRange::new(entry.addr, entry.bytes());
        let lost = state.lost_in(&state.undefined.within(range));
        state.define(tag, range);
        Ok(lost)
    }
}

impl State {
    /// The parts of live blocks that lie in `ranges`, by address; what touches in a block is one.
    pub(super) fn lost_in(&self, ranges: &[DeviceRange]) -> Vec<LostRange> {
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable();
        let mut lost: Vec<LostRange> = Vec::new();
        for part in ranges.into_iter().flat_map(|range| self.parts_of_blocks(range)) {
            match lost.last_mut() {
                Some(last) if last.block == part.block && last.range.end() == part.range.addr => {
                    last.range.bytes += part.range.bytes;
                }
                _ => lost.push(part),
            }
        }
        lost
    }

    fn parts_of_blocks(&self, range: DeviceRange) -> Vec<LostRange> {
        let segment = self.segments.get(self.segment_of(range.addr));
        let Some(segment) = segment.filter(|segment| segment.range.contains(&range)) else {
            return Vec::new();
        };
        let tag = &self.tag(segment.tag).tag;
        let mut parts = Vec::new();
        let mut next = Some(self.block_at(segment.first, range.addr));
        while let Some(key) = next.filter(|key| self.blocks[*key].addr < range.end()) {
            let block = self.blocks[key];
            next = block.next.some();
            let start = block.addr.max(range.addr);
            let end = (block.addr + block.requested_bytes()).min(range.end());
            if self.blocks.kind(key) == Kind::Live && start < end {
                let id = BlockId { pool: self.pool, key, serial: block.stamp };
                parts.push(LostRange {
                    tag: tag.clone(),
                    block: id,
                    offset_bytes: start - block.addr,
                    range: DeviceRange::new(start, end - start),
                });
            }
        }
        parts
    }

    /// Refuses what needs the bytes of `range`, which is of an awake tag, where they are not the owner's.
    pub(super) fn check_defined(&self, op: &'static str, tag: TagKey, range: DeviceRange) -> Result<()> {
        if self.tag(tag).state != TagState::Undefined {
            return Ok(());
        }
        if !self.undefined.has_any(tag) {
            return Err(PoolError::Undefined { op, tag: self.tag(tag).tag.clone() });
        }
        let lost = self.lost_in(&self.undefined.within(range));
        if lost.is_empty() { Ok(()) } else { Err(PoolError::Lost { op, lost }) }
    }

    /// What is lost of a tag.
    pub(super) fn lost_of(&self, tag: TagKey) -> Vec<LostRange> {
        self.lost_in(&self.undefined.of_tags(|other| other == tag))
    }

    /// The bytes of `granules` are lost, and what is stored of them is nobody's. Returns what that is of live blocks.
    pub(super) fn lose(&mut self, granules: &[DeviceRange]) -> Vec<LostRange> {
        for granule in granules {
            self.forget_stored(granule.addr);
        }
        let lost = self.lost_in(granules);
        for LostRange { range, .. } in &lost {
            let Some(segment) = self.segments.get(self.segment_of(range.addr)) else { continue };
            let tag = segment.tag;
            self.undefined.add(tag, *range);
            let entry = self.tag_mut(tag);
            match entry.state {
                TagState::Awake => entry.state = TagState::Undefined,
                TagState::Stranded => entry.undefined = true,
                _ => {}
            }
        }
        lost
    }

    /// What was lost of `range`, which is of `tag`, is written again, or nobody's any more.
    pub(super) fn define(&mut self, tag: TagKey, range: DeviceRange) {
        if self.undefined.clear(range) && !self.undefined.has_any(tag) {
            self.define_all(tag);
        }
    }

    /// Nothing of an awake tag is undefined any more.
    pub(super) fn define_all(&mut self, tag: TagKey) {
        self.undefined.clear_tag(tag);
        let entry = self.tag_mut(tag);
        match entry.state {
            TagState::Undefined => entry.state = TagState::Awake,
            TagState::Stranded => entry.undefined = false,
            _ => {}
        }
    }
}
