//! Poorwill's pool itself, on its host device. No byte of its memory is touched.
//!
//! All blocks are on the default stream: streams of the host device would be threads of their own. Private pools are
//! tags.

use std::collections::HashMap;

use ::poorwill::pool::{BlockKind, SegmentSnapshot};
use ::poorwill::{AllocRequest, Arena, BlockId, Config, DeviceSpec, OpenError, PoolError, Tag};

use super::{Allocator, Part, Segment, State};
use crate::card::Card;
use crate::trace::{Block, BlockNumber, Trace};

/// The host device's granules; a smaller card is none.
const GRANULE_BYTES: u64 = 2 << 20;

#[derive(Debug)]
pub(super) struct Pool {
    arena: Arena,
    /// Nothing, where not even a granule is.
    usable_bytes: u64,
    blocks: Vec<Option<BlockId>>,
    tags: HashMap<u32, Tag>,
    /// Numbers of live blocks, by address.
    live: HashMap<u64, BlockNumber>,
    addrs: Vec<u64>,
}

impl Pool {
    pub(super) fn open(card: Card, trace: &Trace) -> Result<Self, OpenError> {
        let granules = card.usable_bytes() / GRANULE_BYTES;
        let capacity_bytes = granules.max(1) * GRANULE_BYTES;
        let arena = Arena::open(Config::on(DeviceSpec::Host { capacity_bytes }))?;
        Ok(Self {
            arena,
            usable_bytes: granules * GRANULE_BYTES,
            blocks: vec![None; trace.blocks.len()],
            tags: HashMap::new(),
            live: HashMap::new(),
            addrs: vec![0; trace.blocks.len()],
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
        if block.bytes > self.usable_bytes {
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
        self.blocks[at(number)] = Some(made.id);
        self.addrs[at(number)] = made.range.addr;
        self.live.insert(made.range.addr, number);
        Ok(true)
    }

    fn free(&mut self, number: BlockNumber) -> Result<(), PoolError> {
        self.live.remove(&self.addrs[at(number)]);
        match self.blocks[at(number)].take() {
            Some(id) => self.arena.free(id),
            None => Ok(()),
        }
    }

    fn empty_cache(&mut self) -> Result<(), PoolError> {
        self.arena.trim().map(drop)
    }

    fn phase_ends(&mut self) -> Result<(), PoolError> {
        Ok(())
    }

    fn mapped_bytes(&self) -> Result<u64, PoolError> {
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
        let segment = |found: SegmentSnapshot| {
            let mut parts: Vec<Part> = Vec::with_capacity(found.blocks.len());
            for block in &found.blocks {
                let part = self.part(block.addr, block.bytes, block.kind);
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

impl Pool {
    fn part(&self, addr: u64, bytes: u64, kind: BlockKind) -> Part {
        let state = match (kind, self.live.get(&addr)) {
            (BlockKind::Live, Some(number)) => State::Live(*number),
            (BlockKind::Unmapped, _) => State::Unmapped,
            _ => State::Cached,
        };
        Part { bytes, state }
    }
}
