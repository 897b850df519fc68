//! Tensors in an arena: written, changed, and compared.

use std::collections::BTreeSet;
use std::sync::Arc;

use poorwill_core::{AllocRequest, Block, HostBuffer, PoolError, StreamId, Tag};

use super::choice::{Granule, choose};
use super::fraction::Fraction;
use super::pattern::{self, Text};
use crate::arena::Arena;

/// Most that is copied at once.
const PIECE_BYTES: u64 = 64 << 20;

/// Tensors in an arena, a block each.
#[derive(Debug)]
pub(super) struct Load<'a> {
    arena: &'a Arena,
    /// As they were allocated.
    blocks: Vec<Block>,
    /// Granules that were written a second time.
    changed: BTreeSet<Granule>,
    /// What bytes travel through, between two copies.
    buffer: Option<HostBuffer>,
}

impl<'a> Load<'a> {
    pub(super) fn new(arena: &'a Arena) -> Self {
        Self { arena, blocks: Vec::new(), changed: BTreeSet::new(), buffer: None }
    }

    /// Takes a block for each tensor.
    pub(super) fn take(&mut self, sizes: &[u64], tag: &Tag) -> Result<(), PoolError> {
        for bytes in sizes {
            self.blocks.push(self.arena.alloc(&AllocRequest::new(*bytes, tag.clone()))?);
        }
        Ok(())
    }

    /// Writes every byte.
    pub(super) fn fill(&mut self) -> Result<(), PoolError> {
        for tensor in 0..self.blocks.len() {
            for (offset, bytes) in pieces(self.blocks[tensor].requested_bytes) {
                self.write(Text { tensor, edition: 0 }, offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes other bytes into a part of the granules that lie wholly inside tensors, one granule at a time. Returns
    /// how many they are.
    pub(super) fn change(&mut self, part: Fraction) -> Result<u64, PoolError> {
        let granule_bytes = self.granule_bytes();
        let chosen = choose(&self.blocks, granule_bytes, part);
        for granule in &chosen {
            for (offset, bytes) in pieces(granule_bytes) {
                let text = Text { tensor: granule.tensor, edition: 1 };
                self.write(text, granule.offset + offset, bytes)?;
            }
            self.changed.insert(*granule);
        }
        Ok(chosen.len() as u64)
    }

    /// Reads every byte, and says which is the first that is wrong, if any is.
    pub(super) fn compare(&mut self) -> Result<Option<String>, PoolError> {
        let wait = |source| PoolError::Driver { op: "read", source };
        for (tensor, block) in self.blocks.clone().into_iter().enumerate() {
            for (offset, bytes) in pieces(block.requested_bytes) {
                let buffer = self.buffer()?;
                let copy = self.arena.pool().read(StreamId::DEFAULT, block.id, offset, buffer, 0, bytes)?;
                let mut buffer = copy.wait().map_err(wait)?;
                if let Some(at) = self.first_wrong(tensor, offset, part_mut(&mut buffer, bytes)) {
                    return Ok(Some(format!("byte {at} of tensor {tensor} is not what was written")));
                }
                self.buffer = Some(buffer);
            }
        }
        Ok(None)
    }

    /// Whether any block is elsewhere than where it was allocated.
    pub(super) fn is_moved(&self) -> Result<bool, PoolError> {
        for block in &self.blocks {
            if self.arena.pool().block(block.id)?.range != block.range {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets go of the host memory that bytes travel through.
    pub(super) fn rest(&mut self) {
        self.buffer = None;
    }

    /// Frees everything, asleep or awake, and gives its memory back.
    pub(super) fn clear(&mut self) -> Result<(), PoolError> {
        self.rest();
        self.changed.clear();
        let freed = self.blocks.drain(..).map(|block| self.arena.free(block.id));
        // Every block is tried, whatever became of the one before.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }

    fn write(&mut self, text: Text, offset: u64, bytes: u64) -> Result<(), PoolError> {
        let mut buffer = self.buffer()?;
        pattern::write(text, offset, part_mut(&mut buffer, bytes));
        let shared = Arc::new(buffer);
        let block = self.blocks[text.tensor].id;
        let pool = self.arena.pool();
        let copy = pool.write(StreamId::DEFAULT, block, offset, Arc::clone(&shared), 0, bytes)?;
        copy.wait().map_err(|source| PoolError::Driver { op: "write", source })?;
        self.buffer = Arc::into_inner(shared);
        Ok(())
    }

    /// Where in the tensor the first wrong byte is of those from `offset` on.
    fn first_wrong(&self, tensor: usize, offset: u64, mut bytes: &[u8]) -> Option<u64> {
        let granule_bytes = self.granule_bytes();
        let mut at = offset;
        while !bytes.is_empty() {
            // Up to the end of the changed granule that this is in, or to the beginning of the next.
            let before = Granule { tensor, offset: at.saturating_sub(granule_bytes - 1) };
            let next = self.changed.range(before..).next().filter(|granule| granule.tensor == tensor);
            let (edition, end) = match next {
                Some(changed) if changed.offset <= at => (1, changed.offset + granule_bytes),
                Some(changed) => (0, changed.offset),
                None => (0, u64::MAX),
            };
            let len = usize::try_from(end - at).map_or(bytes.len(), |len| len.min(bytes.len()));
            let (stretch, rest) = bytes.split_at(len);
            if let Some(wrong) = pattern::first_wrong(Text { tensor, edition }, at, stretch) {
                return Some(at + wrong as u64);
            }
            at += len as u64;
            bytes = rest;
        }
        None
    }

    fn granule_bytes(&self) -> u64 {
        self.arena.driver().info().granule_bytes
    }

    /// The buffer, as long as the largest piece.
    fn buffer(&mut self) -> Result<HostBuffer, PoolError> {
        if let Some(buffer) = self.buffer.take() {
            return Ok(buffer);
        }
        let sizes: Vec<u64> = self.blocks.iter().map(|block| block.requested_bytes).collect();
        let buffer = self.arena.driver().host_alloc(buffer_bytes(&sizes));
        buffer.map_err(|source| PoolError::Driver { op: "copy", source })
    }
}

/// How much host memory bytes travel through, for tensors of these sizes.
pub(super) fn buffer_bytes(sizes: &[u64]) -> u64 {
    sizes.iter().copied().max().unwrap_or(1).min(PIECE_BYTES)
}

/// Pieces of a tensor: offset and size.
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
    use super::*;
    use crate::Config;

    #[test]
    fn pieces_make_up_a_tensor() {
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
        let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
        let granule_bytes = arena.driver().info().granule_bytes;
        let mut load = Load::new(&arena);
        load.take(&[5000, 7 * granule_bytes + 9, 3 * granule_bytes], &Tag::weights()).unwrap();
        load.fill().unwrap();
        assert_eq!(load.compare().unwrap(), None);
        let count = load.change("0.4".parse().unwrap()).unwrap();
        assert!((3..=4).contains(&count), "{count}");
        assert_eq!(load.compare().unwrap(), None);
        // A change that was lost, and one that nobody made.
        let changed = *load.changed.first().unwrap();
        load.changed.remove(&changed);
        let wrong = load.compare().unwrap().unwrap();
        assert!(wrong.contains(&format!("byte {} of tensor {}", changed.offset, changed.tensor)), "{wrong}");
        load.changed.insert(changed);
        assert_eq!(load.compare().unwrap(), None);
        load.write(Text { tensor: changed.tensor, edition: 0 }, changed.offset, granule_bytes).unwrap();
        assert!(load.compare().unwrap().is_some());
        // The next load knows nothing of it.
        load.clear().unwrap();
        load.take(&[4 * granule_bytes], &Tag::weights()).unwrap();
        load.fill().unwrap();
        assert_eq!(load.compare().unwrap(), None);
        load.clear().unwrap();
    }
}
