//! Blocks in an arena: written, changed, and compared.

use std::collections::BTreeSet;
use std::sync::Arc;

use poorwill::{AllocRequest, Arena, Block, HostBuffer, PoolError, StreamId, Tag};

use crate::contents::{Contents, ContentsPart};
use crate::{cores, pattern};

/// Host memory for copies, one part of a block at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyBuffer {
    /// Host memory of the driver, which a GPU copies at the speed of its link.
    Driver,
    /// Ordinary memory, which no budget counts.
    Heap,
}

/// Largest copy.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// A granule inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Index in the order of allocation.
    pub(crate) block: usize,
    /// Bytes from the start of the block.
    pub(crate) offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrongByte {
    pub(crate) block: usize,
    pub(crate) offset: u64,
}

#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    arena: &'a Arena,
    source: CopyBuffer,
    contents: Contents,
    blocks: Vec<Block>,
    /// Granules that were written a second time.
    changed: BTreeSet<Granule>,
    /// Kept between two copies.
    buffer: Option<HostBuffer>,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(arena: &'a Arena, source: CopyBuffer) -> Self {
        let (contents, blocks, changed) = Default::default();
        Self { arena, source, contents, blocks, changed, buffer: None }
    }

    /// Sets what is written.
    pub(crate) fn holding(mut self, contents: Contents) -> Self {
        self.contents = contents;
        self
    }

    pub(crate) fn alloc(&mut self, sizes: &[u64], tag: &Tag) -> Result<(), PoolError> {
        for bytes in sizes {
            self.blocks.push(self.arena.alloc(&AllocRequest::new(*bytes, tag.clone()))?);
        }
        Ok(())
    }

    pub(crate) fn as_allocated(&self) -> &[Block] {
        &self.blocks
    }

    /// `moved` receives the size of each write.
    pub(crate) fn fill(&mut self, moved: &dyn Fn(u64)) -> Result<(), PoolError> {
        for block in 0..self.blocks.len() {
            for (offset, bytes) in parts(self.blocks[block].requested_bytes) {
                self.write(block, 0, offset, bytes)?;
                moved(bytes);
            }
        }
        Ok(())
    }

    pub(crate) fn change(&mut self, granules: &[Granule]) -> Result<(), PoolError> {
        for granule in granules {
            for (offset, bytes) in parts(self.granule_bytes()) {
                self.write(granule.block, 1, granule.offset + offset, bytes)?;
            }
            self.changed.insert(*granule);
        }
        Ok(())
    }

    /// Compares with what was written.
    pub(crate) fn first_wrong(&mut self) -> Result<Option<WrongByte>, PoolError> {
        self.find(&|_| {}, Self::first_wrong_in_part)
    }

    pub(crate) fn first_nonzero(&mut self, moved: &dyn Fn(u64)) -> Result<Option<WrongByte>, PoolError> {
        self.find(moved, |_, _, offset, bytes| {
            pattern::first_nonzero(bytes).map(|wrong| offset + wrong as u64)
        })
    }

    pub(crate) fn is_moved(&self) -> Result<bool, PoolError> {
        for block in &self.blocks {
            if self.arena.pool().block(block.id)?.range != block.range {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn release_buffer(&mut self) {
        self.buffer = None;
    }

    /// Frees everything, and trims the arena.
    pub(crate) fn clear(&mut self) -> Result<(), PoolError> {
        self.release_buffer();
        self.changed.clear();
        let freed = self.blocks.drain(..).map(|block| self.arena.free(block.id));
        // Every block is tried, also after a failure.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }

    /// `wrong` gets block, offset and bytes of each part.
    fn find(
        &mut self,
        moved: &dyn Fn(u64),
        wrong: impl Fn(&Self, usize, u64, &[u8]) -> Option<u64> + Sync,
    ) -> Result<Option<WrongByte>, PoolError> {
        for (block, Block { id, requested_bytes, .. }) in self.blocks.clone().into_iter().enumerate() {
            for (offset, bytes) in parts(requested_bytes) {
                let buffer = self.buffer()?;
                let copy = self.arena.pool().read(StreamId::DEFAULT, id, offset, buffer, 0, bytes)?;
                let mut buffer = copy.wait().map_err(|source| PoolError::Driver { op: "read", source })?;
                let compare = |at, part: &mut [u8]| wrong(self, block, offset + at, part);
                if let Some(at) = cores::first(part_mut(&mut buffer, bytes), compare) {
                    return Ok(Some(WrongByte { block, offset: at }));
                }
                self.buffer = Some(buffer);
                moved(bytes);
            }
        }
        Ok(None)
    }

    /// The first wrong byte, as an offset in the block.
    fn first_wrong_in_part(&self, block: usize, offset: u64, mut bytes: &[u8]) -> Option<u64> {
        let granule_bytes = self.granule_bytes();
        let mut at = offset;
        while !bytes.is_empty() {
            // Up to the end of the changed granule around `at`, or to the next one.
            let before = Granule { block, offset: at.saturating_sub(granule_bytes - 1) };
            let next = self.changed.range(before..).next().filter(|granule| granule.block == block);
            let (version, end) = match next {
                Some(changed) if changed.offset <= at => (1, changed.offset + granule_bytes),
                Some(changed) => (0, changed.offset),
                None => (0, u64::MAX),
            };
            let len = usize::try_from(end - at).map_or(bytes.len(), |len| len.min(bytes.len()));
            let (run, rest) = bytes.split_at(len);
            if let Some(wrong) = self.contents.first_mismatch(part(block, version), at, run) {
                return Some(at + wrong as u64);
            }
            at += len as u64;
            bytes = rest;
        }
        None
    }

    fn write(&mut self, block: usize, version: u64, offset: u64, bytes: u64) -> Result<(), PoolError> {
        let mut buffer = self.buffer()?;
        cores::first(part_mut(&mut buffer, bytes), |at, bytes| {
            self.contents.write_part(part(block, version), offset + at, bytes);
            None
        });
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

    /// The buffer, as long as the largest part.
    fn buffer(&mut self) -> Result<HostBuffer, PoolError> {
        if let Some(buffer) = self.buffer.take() {
            return Ok(buffer);
        }
        let bytes = buffer_bytes(self.blocks.iter().map(|block| block.requested_bytes));
        if self.source == CopyBuffer::Heap {
            return Ok(vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)].into());
        }
        self.arena.driver().host_alloc(bytes).map_err(|source| PoolError::Driver { op: "copy", source })
    }
}

fn part(block: usize, version: u64) -> ContentsPart {
    ContentsPart { block: block as u64, version }
}

pub(crate) fn buffer_bytes(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().max().unwrap_or(1).min(COPY_BYTES_MAX)
}

/// Offset and size of each part.
fn parts(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let offsets = (0..bytes.div_ceil(COPY_BYTES_MAX)).map(|nth| nth * COPY_BYTES_MAX);
    offsets.map(move |offset| (offset, COPY_BYTES_MAX.min(bytes - offset)))
}

fn part_mut(buffer: &mut [u8], bytes: u64) -> &mut [u8] {
    let bytes = usize::try_from(bytes).map_or(buffer.len(), |bytes| bytes.min(buffer.len()));
    &mut buffer[..bytes]
}

#[cfg(test)]
mod tests {
    use poorwill::Config;

    use super::*;

    #[test]
    fn parts_make_up_a_block() {
        for bytes in [1, COPY_BYTES_MAX - 1, COPY_BYTES_MAX, COPY_BYTES_MAX + 1, 224 << 20] {
            let mut end = 0;
            for (offset, part) in parts(bytes) {
                assert!(offset == end && part > 0 && part <= COPY_BYTES_MAX);
                end += part;
            }
            assert_eq!(end, bytes);
        }
    }

    #[test]
    fn changed_and_unchanged_granules_are_compared() {
        for (source, contents) in [CopyBuffer::Driver, CopyBuffer::Heap].into_iter().zip(Contents::ALL) {
            let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
            let granule_bytes = arena.driver().info().granule_bytes;
            let mut blocks = Blocks::new(&arena, source).holding(contents);
            blocks.alloc(&[5000, 7 * granule_bytes + 9, 3 * granule_bytes], &Tag::weights()).unwrap();
            blocks.fill(&|_| {}).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            assert!(blocks.first_nonzero(&|_| {}).unwrap().is_some_and(|wrong| wrong.block == 0));
            let changed = [(1, 512), (1, 5 * granule_bytes), (2, 0)];
            let changed = changed.map(|(block, offset)| Granule { block, offset });
            blocks.change(&changed).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            // A lost change, and one never made.
            let Granule { block, offset } = changed[1];
            blocks.changed.remove(&changed[1]);
            assert_eq!(blocks.first_wrong().unwrap(), Some(WrongByte { block, offset }));
            blocks.changed.insert(changed[1]);
            assert_eq!(blocks.first_wrong().unwrap(), None);
            blocks.write(block, 0, offset, granule_bytes).unwrap();
            assert!(blocks.first_wrong().unwrap().is_some());
            // New blocks do not inherit changes.
            blocks.clear().unwrap();
            blocks.alloc(&[4 * granule_bytes], &Tag::weights()).unwrap();
            assert!(blocks.first_wrong().unwrap().is_some());
            blocks.fill(&|_| {}).unwrap();
            assert_eq!(blocks.first_wrong().unwrap(), None);
            blocks.clear().unwrap();
        }
    }

    #[test]
    fn a_byte_that_is_not_zero_is_found_where_it_is() {
        let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
        let mut blocks = Blocks::new(&arena, CopyBuffer::Heap);
        blocks.alloc(&[4096, 9_000_001], &Tag::kv_cache()).unwrap();
        for block in blocks.blocks.clone() {
            let zeros = vec![0; usize::try_from(block.requested_bytes).unwrap()];
            arena.write_all(block.id, 0, &zeros).unwrap();
        }
        assert_eq!(blocks.first_nonzero(&|_| {}).unwrap(), None);
        arena.write_all(blocks.blocks[1].id, 9_000_000, &[1]).unwrap();
        assert_eq!(blocks.first_nonzero(&|_| {}).unwrap(), Some(WrongByte { block: 1, offset: 9_000_000 }));
        blocks.clear().unwrap();
    }
}
