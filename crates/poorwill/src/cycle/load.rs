//! A load like a model's, and the bytes in it.
//!
//! Bytes depend on their tensor and on where in it they are, so that any that end up elsewhere are noticed.

use std::sync::Arc;

use poorwill_core::{AllocRequest, Block, HostBuffer, PoolError, StreamId, Tag};

use crate::arena::Arena;

/// A layer: the four large tensors of an attention block and a dense one, and two norms. `bench/peers` has the same.
const LAYER: [u64; 6] = [96 << 20, 64 << 20, 224 << 20, 112 << 20, 16 << 10, 16 << 10];

/// Most that is copied at once.
const PIECE_BYTES: u64 = 64 << 20;

/// Between the words of a tensor. Odd, so that all of them differ.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// How many bytes are compared before it is asked whether they were the same.
const WINDOW_BYTES: usize = 4096;

/// How many tensors [`sizes`] has.
pub(super) fn count(bytes: u64) -> u64 {
    let layer_bytes: u64 = LAYER.iter().sum();
    bytes.div_ceil(layer_bytes).max(1).saturating_mul(LAYER.len() as u64)
}

/// Sizes of as many layers as it takes to reach `bytes`; below one, of one that is smaller throughout.
pub(super) fn sizes(bytes: u64) -> Vec<u64> {
    let layer_bytes: u64 = LAYER.iter().sum();
    if bytes < layer_bytes {
        let part = |size: u64| u128::from(size) * u128::from(bytes) / u128::from(layer_bytes);
        return LAYER.map(|size| u64::try_from(part(size)).unwrap_or(size).max(1)).to_vec();
    }
    (0..bytes.div_ceil(layer_bytes)).flat_map(|_| LAYER).collect()
}

/// Tensors in an arena, a block each.
#[derive(Debug)]
pub(super) struct Load<'a> {
    arena: &'a Arena,
    /// As they were allocated.
    blocks: Vec<Block>,
    /// What bytes travel through, between two copies.
    buffer: Option<HostBuffer>,
}

impl<'a> Load<'a> {
    pub(super) fn new(arena: &'a Arena) -> Self {
        Self { arena, blocks: Vec::new(), buffer: None }
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
        let wait = |source| PoolError::Driver { op: "write", source };
        for (tensor, block) in self.blocks.clone().into_iter().enumerate() {
            for (offset, bytes) in pieces(block.requested_bytes) {
                let mut buffer = self.buffer()?;
                write(tensor, offset, part_mut(&mut buffer, bytes));
                let shared = Arc::new(buffer);
                let pool = self.arena.pool();
                let copy = pool.write(StreamId::DEFAULT, block.id, offset, Arc::clone(&shared), 0, bytes)?;
                copy.wait().map_err(wait)?;
                self.buffer = Arc::into_inner(shared);
            }
        }
        Ok(())
    }

    /// Reads every byte, and says which is the first that is wrong, if any is.
    pub(super) fn compare(&mut self) -> Result<Option<String>, PoolError> {
        let wait = |source| PoolError::Driver { op: "read", source };
        for (tensor, block) in self.blocks.clone().into_iter().enumerate() {
            for (offset, bytes) in pieces(block.requested_bytes) {
                let buffer = self.buffer()?;
                let copy = self.arena.pool().read(StreamId::DEFAULT, block.id, offset, buffer, 0, bytes)?;
                let mut buffer = copy.wait().map_err(wait)?;
                if let Some(at) = first_wrong(tensor, offset, part_mut(&mut buffer, bytes)) {
                    let at = offset + at as u64;
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

    /// Frees everything, asleep or awake, and gives its memory back.
    pub(super) fn clear(&mut self) -> Result<(), PoolError> {
        let freed = self.blocks.drain(..).map(|block| self.arena.free(block.id));
        // Every block is tried, whatever became of the one before.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }

    /// The buffer, as long as the largest piece.
    fn buffer(&mut self) -> Result<HostBuffer, PoolError> {
        if let Some(buffer) = self.buffer.take() {
            return Ok(buffer);
        }
        let largest = self.blocks.iter().map(|block| block.requested_bytes).max().unwrap_or(1);
        let buffer = self.arena.driver().host_alloc(largest.min(PIECE_BYTES));
        buffer.map_err(|source| PoolError::Driver { op: "copy", source })
    }
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

/// The word at `offset`, which begins one.
fn word(tensor: usize, offset: u64) -> u64 {
    let seed = (tensor as u64 + 1).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (seed ^ (seed >> 29)).wrapping_add((offset / 8).wrapping_mul(STEP))
}

/// What tensor `tensor` holds from `offset` on, which begins a word.
fn write(tensor: usize, offset: u64, bytes: &mut [u8]) {
    let mut word = word(tensor, offset);
    let mut words = bytes.chunks_exact_mut(8);
    for place in &mut words {
        place.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    let rest = words.into_remainder();
    let held = rest.len();
    rest.copy_from_slice(&word.to_le_bytes()[..held]);
}

/// Where the first byte is that [`write`] would not have written.
fn first_wrong(tensor: usize, offset: u64, bytes: &[u8]) -> Option<usize> {
    let windows = bytes.chunks(WINDOW_BYTES).enumerate();
    windows.map(|(nth, window)| (nth * WINDOW_BYTES, window)).find_map(|(at, window)| {
        let mut word = word(tensor, offset + at as u64);
        let mut words = window.chunks_exact(8);
        let mut difference = 0;
        for held in &mut words {
            let held: [u8; 8] = held.try_into().unwrap_or_default();
            difference |= u64::from_le_bytes(held) ^ word;
            word = word.wrapping_add(STEP);
        }
        let rest = words.remainder();
        if difference == 0 && *rest == word.to_le_bytes()[..rest.len()] {
            return None;
        }
        let mut expected = [0; WINDOW_BYTES];
        write(tensor, offset + at as u64, &mut expected);
        window.iter().zip(expected).position(|(held, expected)| *held != expected).map(|wrong| at + wrong)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_whole_or_one_that_is_small() {
        let layer_bytes: u64 = LAYER.iter().sum();
        assert_eq!(sizes(layer_bytes), LAYER);
        assert_eq!(sizes(layer_bytes + 1).len(), 12);
        let sizes_of_24_gib = sizes(24 << 30);
        assert_eq!(sizes_of_24_gib.len(), 50 * LAYER.len());
        for bytes in [1, layer_bytes - 1, layer_bytes, layer_bytes + 1, 24 << 30] {
            assert_eq!(count(bytes), sizes(bytes).len() as u64, "{bytes}");
        }
        assert!(sizes_of_24_gib.iter().sum::<u64>() >= 24 << 30);
        for bytes in [1, 1000, 1 << 20, layer_bytes - 1] {
            let sizes = sizes(bytes);
            assert!(sizes.len() == 6 && sizes.iter().all(|size| *size > 0), "{bytes}: {sizes:?}");
            assert!(sizes.iter().sum::<u64>() <= bytes + 6, "{bytes}: {sizes:?}");
        }
    }

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
    fn every_wrong_byte_is_found() {
        for length in [0, 1, 7, 8, 9, WINDOW_BYTES - 1, WINDOW_BYTES, 2 * WINDOW_BYTES + 13] {
            let mut bytes = vec![0; length];
            write(3, 64, &mut bytes);
            assert_eq!(first_wrong(3, 64, &bytes), None);
            for at in (0..length).step_by(5).chain(length.checked_sub(1)) {
                bytes[at] ^= 0x10;
                assert_eq!(first_wrong(3, 64, &bytes), Some(at), "{length}");
                bytes[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn other_tensors_and_places_hold_other_bytes() {
        let mut bytes = [0; 64];
        write(3, 64, &mut bytes);
        for (tensor, offset) in [(2, 64), (4, 64), (3, 0), (3, 72), (3, 64 + (1 << 40))] {
            assert!(first_wrong(tensor, offset, &bytes).is_some_and(|at| at < 8), "{tensor} {offset}");
        }
        // The second half of a piece is what would be written there by itself.
        let mut half = [0; 32];
        write(3, 96, &mut half);
        assert_eq!(bytes[32..], half);
    }
}
