//! Blocks in an arena, written with a pattern, changed, and compared.

use std::collections::BTreeSet;
use std::sync::Arc;

use poorwill::{AllocRequest, Arena, Block, HostBuffer, PoolError, StreamId, Tag};

use crate::pattern::{self, Key};

/// Memory that bytes travel through between the host and the device, a piece at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Through {
    /// The driver's host memory, which a GPU copies at the speed of its link.
    Driver,
    /// Ordinary memory, which no budget counts.
    Heap,
}

/// Most that is copied at once.
const PIECE_BYTES: u64 = 64 << 20;

/// A granule inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Which block, in the order in which they were taken.
    pub(crate) block: usize,
    /// From the beginning of the block, in bytes.
    pub(crate) offset: u64,
}

/// A byte that is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrongByte {
    /// In which block.
    pub(crate) block: usize,
    /// Where in it.
    pub(crate) at: u64,
}

/// Blocks of an arena.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    arena: &'a Arena,
    through: Through,
    /// As they were allocated.
    blocks: Vec<Block>,
    /// Granules that were written a second time.
    changed: BTreeSet<Granule>,
    /// What bytes travel through, between two copies.
    buffer: Option<HostBuffer>,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(arena: &'a Arena, through: Through) -> Self {
        Self { arena, through, blocks: Vec::new(), changed: BTreeSet::new(), buffer: None }
    }

    /// Takes a block of each size.
    pub(crate) fn take(&mut self, sizes: &[u64], tag: &Tag) -> Result<(), PoolError> {
        for bytes in sizes {
            self.blocks.push(self.arena.alloc(&AllocRequest::new(*bytes, tag.clone()))?);
        }
        Ok(())
    }

    /// As they were allocated, in their order.
    pub(crate) fn as_allocated(&self) -> &[Block] {
        &self.blocks
    }

    /// Writes every byte. `moved` is told how many bytes were written just now.
    pub(crate) fn fill(&mut self, moved: &dyn Fn(u64)) -> Result<(), PoolError> {
        for block in 0..self.blocks.len() {
            for (offset, bytes) in pieces(self.blocks[block].requested_bytes) {
                self.write(block, 0, offset, bytes)?;
                moved(bytes);
            }
        }
        Ok(())
    }

    /// Writes other bytes into some granules.
    pub(crate) fn change(&mut self, granules: &[Granule]) -> Result<(), PoolError> {
        for granule in granules {
            for (offset, bytes) in pieces(self.granule_bytes()) {
                self.write(granule.block, 1, granule.offset + offset, bytes)?;
            }
            self.changed.insert(*granule);
        }
        Ok(())
    }

    /// Reads every byte, and says which is the first that is not what was written, if any is.
    pub(crate) fn first_wrong(&mut self) -> Result<Option<WrongByte>, PoolError> {
        self.find(&|_| {}, Self::wrong_of_piece)
    }

    /// Reads every byte, and says which is the first that is not zero, if any is.
    pub(crate) fn first_nonzero(&mut self, moved: &dyn Fn(u64)) -> Result<Option<WrongByte>, PoolError> {
        self.find(moved, |_, _, offset, bytes| {
            pattern::first_nonzero(bytes).map(|wrong| offset + wrong as u64)
        })
    }

    /// Whether any block is elsewhere than where it was allocated.
    pub(crate) fn is_moved(&self) -> Result<bool, PoolError> {
        for block in &self.blocks {
            if self.arena.pool().block(block.id)?.range != block.range {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets go of the memory that bytes travel through.
    pub(crate) fn rest(&mut self) {
        self.buffer = None;
    }

    /// Frees everything, asleep or awake, and gives its memory back.
    pub(crate) fn clear(&mut self) -> Result<(), PoolError> {
        self.rest();
        self.changed.clear();
        let freed = self.blocks.drain(..).map(|block| self.arena.free(block.id));
        // Every block is tried, whatever became of the one before.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }

    /// Reads everything, piece by piece: which block, where in it, and the bytes.
    fn find(
        &mut self,
        moved: &dyn Fn(u64),
        wrong: impl Fn(&Self, usize, u64, &[u8]) -> Option<u64>,
    ) -> Result<Option<WrongByte>, PoolError> {
        for (block, Block { id, requested_bytes, .. }) in self.blocks.clone().into_iter().enumerate() {
            for (offset, bytes) in pieces(requested_bytes) {
                let buffer = self.buffer()?;
                let copy = self.arena.pool().read(StreamId::DEFAULT, id, offset, buffer, 0, bytes)?;
                let mut buffer = copy.wait().map_err(|source| PoolError::Driver { op: "read", source })?;
                if let Some(at) = wrong(self, block, offset, part_mut(&mut buffer, bytes)) {
                    return Ok(Some(WrongByte { block, at }));
                }
                self.buffer = Some(buffer);
                moved(bytes);
            }
        }
        Ok(None)
    }

    /// Where in the block the first wrong byte is of those from `offset` on.
    fn wrong_of_piece(&self, block: usize, offset: u64, mut bytes: &[u8]) -> Option<u64> {
        let granule_bytes = self.granule_bytes();
        let mut at = offset;
        while !bytes.is_empty() {
            // Up to the end of the changed granule that this is in, or to the beginning of the next.
            let before = Granule { block, offset: at.saturating_sub(granule_bytes - 1) };
            let next = self.changed.range(before..).next().filter(|granule| granule.block == block);
            let (edition, end) = match next {
                Some(changed) if changed.offset <= at => (1, changed.offset + granule_bytes),
                Some(changed) => (0, changed.offset),
                None => (0, u64::MAX),
            };
            let len = usize::try_from(end - at).map_or(bytes.len(), |len| len.min(bytes.len()));
            let (stretch, rest) = bytes.split_at(len);
            if let Some(wrong) = pattern::first_wrong(key(block, edition), at, stretch) {
                return Some(at + wrong as u64);
            }
            at += len as u64;
            bytes = rest;
        }
        None
    }

    fn write(&mut self, block: usize, edition: u64, offset: u64, bytes: u64) -> Result<(), PoolError> {
        let mut buffer = self.buffer()?;
        pattern::write(key(block, edition), offset, part_mut(&mut buffer, bytes));
        let shared = Arc::new(buffer);
        let (id, pool) = (self.blocks[block].id, self.arena.pool());
        let copy = pool.write(StreamId::DEFAULT, id, offset, Arc::clone(&shared), 0, bytes)?;
        copy.wait().map_err(|source| PoolError::Driver { op: "write", source })?;
        self.buffer = Arc::into_inner(shared);
        Ok(())
    }

    fn granule_bytes(&self) -> u64 {
        self.arena.driver().info().granule_bytes
    }

    /// The buffer, as long as the largest piece.
    fn buffer(&mut self) -> Result<HostBuffer, PoolError> {
        if let Some(buffer) = self.buffer.take() {
            return Ok(buffer);
        }
        let bytes = buffer_bytes(self.blocks.iter().map(|block| block.requested_bytes));
        if self.through == Through::Heap {
            return Ok(vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)].into());
        }
        self.arena.driver().host_alloc(bytes).map_err(|source| PoolError::Driver { op: "copy", source })
    }
}

/// What the bytes of a block depend on: which it is, and for which time it is written.
fn key(block: usize, edition: u64) -> Key {
    Key::of([block as u64, edition])
}

/// How much memory bytes travel through, for blocks of these sizes.
pub(crate) fn buffer_bytes(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().max().unwrap_or(1).min(PIECE_BYTES)
}

/// Pieces of a block: offset and size.
fn pieces(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let offsets = (0..bytes.div_ceil(PIECE_BYTES)).map(|nth| nth * PIECE_BYTES);
    offsets.map(move |offset| (offset, PIECE_BYTES.min(bytes - offset)))
}

/// The first `bytes` of a buffer that is no shorter.
fn part_mut(buffer: &mut [u8], bytes: u64) -> &mut [u8] {
    let bytes = usize::try_from(bytes).map_or(buffer.len(), |bytes| bytes.min(buffer.len()));
    &mut buffer[..bytes]
}

#[cfg(test)]
mod tests {
    use poorwill::Config;

    use super::*;

    #[test]
    fn pieces_make_up_a_block() {
        for bytes in [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 224 << 20] {
            let mut end = 0;
            for (offset, piece) in pieces(bytes) {
                assert!(offset == end && piece > 0 && piece <= PIECE_BYTES);
                end += piece;
            }
            assert_eq!(end, bytes);
        }
    }

    #[test]
    fn changed_granules_are_told_from_the_others() {
        for through in [Through::Driver, Through::Heap] {
            let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
            let granule_bytes = arena.driver().info().granule_bytes;
            let mut blocks = Blocks::new(&arena, through);
            blocks.take(&[5000, 7 * granule_bytes + 9, 3 * granule_bytes], &Tag::weights()).unwrap();
            blocks.fill(&|_| {}).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            assert!(blocks.first_nonzero(&|_| {}).unwrap().is_some_and(|wrong| wrong.block == 0));
            let changed = [(1, 512), (1, 5 * granule_bytes), (2, 0)];
            let changed = changed.map(|(block, offset)| Granule { block, offset });
            blocks.change(&changed).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            // A change that was lost, and one that nobody made.
            let Granule { block, offset } = changed[1];
            blocks.changed.remove(&changed[1]);
            assert_eq!(blocks.first_wrong().unwrap(), Some(WrongByte { block, at: offset }));
            blocks.changed.insert(changed[1]);
            assert_eq!(blocks.first_wrong().unwrap(), None);
            blocks.write(block, 0, offset, granule_bytes).unwrap();
            assert!(blocks.first_wrong().unwrap().is_some());
            // The next blocks know nothing of it.
            blocks.clear().unwrap();
            blocks.take(&[4 * granule_bytes], &Tag::weights()).unwrap();
            assert!(blocks.first_wrong().unwrap().is_some());
            blocks.fill(&|_| {}).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            blocks.clear().unwrap();
        }
    }

    #[test]
    fn a_byte_that_is_not_zero_is_found_where_it_is() {
        let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
        let mut blocks = Blocks::new(&arena, Through::Heap);
        blocks.take(&[4096, 9_000_001], &Tag::kv_cache()).unwrap();
        for block in blocks.blocks.clone() {
            let zeros = vec![0; usize::try_from(block.requested_bytes).unwrap()];
            arena.write_all(block.id, 0, &zeros).unwrap();
        }
        assert_eq!(blocks.first_nonzero(&|_| {}).unwrap(), None);
        arena.write_all(blocks.blocks[1].id, 9_000_000, &[1]).unwrap();
        assert_eq!(blocks.first_nonzero(&|_| {}).unwrap(), Some(WrongByte { block: 1, at: 9_000_000 }));
        blocks.clear().unwrap();
    }
}
