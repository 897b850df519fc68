//! Poorwill's pool itself, on a device without memory. It maps what it would map on the host device.
//!
//! All blocks are on the default stream. Private pools are tags.

use std::collections::HashMap;
use std::sync::Arc;

use ::poorwill::pool::{BlockKind, BlockSnapshot, SegmentSnapshot};
use ::poorwill::{AllocRequest, Arena, BlockId, Driver, OpenError, PoolConfig, PoolError, Tag};

use super::allocator::Allocator;
use super::memoryless::{GRANULE_BYTES, MemorylessDevice};
use super::segment::{PartState, Segment, SegmentPart};
use crate::card::Card;
use crate::trace::{Block, BlockNumber, Trace};

#[derive(Debug)]
pub(super) struct Pool {
    arena: Arena,
    /// That of the arena; `None` where the arena's has memory.
    device: Option<Arc<MemorylessDevice>>,
    /// Nothing, where not even a granule is.
    usable_bytes: u64,
    /// What others take of that.
    claimed_bytes: u64,
    /// Those that are live, by number, with their addresses.
    blocks: Vec<Option<(BlockId, u64)>>,
    tags: HashMap<u32, Tag>,
}

impl Pool {
    pub(super) fn open(card: Card, trace: &Trace) -> Result<Self, OpenError> {
        // No device has less than a granule.
        let capacity_bytes = card.usable_bytes().max(GRANULE_BYTES);
        let device = Arc::new(MemorylessDevice::of(capacity_bytes));
        let pool = Self::over(device.clone(), card, trace)?;
        Ok(Self { device: Some(device), ..pool })
    }

    /// On a device of what the card leaves.
    pub(super) fn over(driver: Arc<dyn Driver>, card: Card, trace: &Trace) -> Result<Self, OpenError> {
        Ok(Self {
            arena: Arena::over(driver, PoolConfig::default())?,
            device: None,
            usable_bytes: card.usable_bytes() / GRANULE_BYTES * GRANULE_BYTES,
            claimed_bytes: 0,
            blocks: vec![None; trace.blocks.len()],
            tags: HashMap::new(),
        })
    }

    /// The tag of a private pool. A tag's name of digits and letters is always one.
    fn tag(&mut self, pool: u32) -> Tag {
        let new = || {
            if pool == 0 {
                Tag::weights()
            } else {
                Tag::new(&format!("pool{pool}")).unwrap_or_else(|_| Tag::weights())
            }
        };
        self.tags.entry(pool).or_insert_with(new).clone()
    }
}

fn at(number: BlockNumber) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Allocator for Pool {
    fn alloc(&mut self, number: BlockNumber, block: &Block) -> Result<bool, PoolError> {
        if block.bytes > self.usable_bytes - self.claimed_bytes {
            return Ok(false);
        }
        let request = AllocRequest::new(block.bytes, self.tag(block.pool));
        let made = match self.arena.alloc(&request) {
            // A block that is too large for any pool is not had either.
            Err(
                PoolError::OverLimit { .. } | PoolError::DeviceFull { .. } | PoolError::InvalidRequest { .. },
            ) => return Ok(false),
            made => made?,
        };
        self.blocks[at(number)] = Some((made.id, made.range.addr));
        Ok(true)
    }

    fn free(&mut self, number: BlockNumber) -> Result<(), PoolError> {
        match self.blocks[at(number)].take() {
            Some((id, _)) => self.arena.free(id),
            None => Ok(()),
        }
    }

    fn empty_cache(&mut self) -> Result<(), PoolError> {
        self.arena.trim().map(drop)
    }

    fn load_ends(&mut self) -> Result<(), PoolError> {
        Ok(())
    }

    fn limit(&mut self, usable_bytes: u64) -> Result<bool, PoolError> {
        self.claimed_bytes = self.usable_bytes.saturating_sub(usable_bytes);
        if let Some(device) = &self.device {
            device.claim(self.claimed_bytes);
        }
        Ok(self.mapped_bytes()? <= self.usable_bytes - self.claimed_bytes)
    }

    fn retries(&self) -> Option<u64> {
        None
    }

    fn mapped_bytes(&self) -> Result<u64, PoolError> {
        if let Some(device) = &self.device {
            return Ok(device.held_bytes());
        }
        // Cheaper than the pool's own figure, and the device is the pool's alone.
        match self.arena.driver().memory_info() {
            Ok(memory) => Ok(memory.total_bytes - memory.free_bytes),
            Err(_) => self.arena.stats().map(|stats| stats.mapped_bytes),
        }
    }

    fn layout(&self) -> Result<Vec<Segment>, PoolError> {
        let snapshot = self.arena.snapshot()?;
        let pool_of =
            |tag: &Tag| self.tags.iter().find(|(_, known)| *known == tag).map_or(0, |(pool, _)| *pool);
        let live: HashMap<u64, BlockNumber> =
            (0..).zip(&self.blocks).filter_map(|(number, block)| Some(((*block)?.1, number))).collect();
        let segment = |found: SegmentSnapshot| {
            let mut parts: Vec<SegmentPart> = Vec::with_capacity(found.blocks.len());
            for block in &found.blocks {
                let part = part(&live, block);
                match parts.last_mut() {
                    // Free blocks of different kinds are neighbours, and which they are is a matter of moments.
                    Some(last) if last.state == part.state => last.bytes += part.bytes,
                    _ => parts.push(part),
                }
            }
            Segment { addr: found.addr, pool: pool_of(&found.tag), parts }
        };
        Ok(snapshot.segments.into_iter().map(segment).filter_map(Segment::trimmed).collect())
    }
}

fn part(live: &HashMap<u64, BlockNumber>, block: &BlockSnapshot) -> SegmentPart {
    let state = match (block.kind, live.get(&block.addr)) {
        (BlockKind::Live, Some(number)) => PartState::Live(*number),
        (BlockKind::Unmapped, _) => PartState::Unmapped,
        _ => PartState::Cached,
    };
    SegmentPart { bytes: block.bytes, state }
}
