//! Bytes by seed and position: a lost, swapped or shifted page never reads as the right one.

use std::sync::Arc;

use poorwill_core::{BlockId, HostBuffer, Pool, StreamId, chain};

/// `len` bytes of the pattern of `seed`.
#[must_use]
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    // In whole words, so that a longer pattern starts with the shorter one.
    let mut bytes = vec![0; len.next_multiple_of(8)];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes.truncate(len);
    bytes
}

/// `len` bytes of the pattern, as bf16 with two exponents.
#[must_use]
pub fn weights(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = bytes(seed, len);
    // The lowest bit of the exponent stays, and so do signs and mantissas.
    bytes.iter_mut().skip(1).step_by(2).for_each(|high| *high = (*high & 0x81) | 0x3C);
    bytes
}

/// `len` bytes of the pattern from `offset` on.
#[must_use]
pub fn part(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
    bytes(seed, skipped.saturating_add(len)).split_off(skipped)
}

/// Fills a block with the pattern, and waits.
///
/// # Errors
/// The error of the pool or the copy, as text.
pub fn fill(pool: &Pool, block: BlockId, seed: u64, len: usize) -> Result<(), String> {
    write(pool, block, bytes(seed, len))
}

/// Writes the first bytes of a block, and waits.
///
/// # Errors
/// As [`fill`].
pub fn write(pool: &Pool, block: BlockId, bytes: Vec<u8>) -> Result<(), String> {
    let (len, buffer) = (bytes.len() as u64, Arc::new(HostBuffer::from(bytes)));
    let copy = pool.write(StreamId::DEFAULT, block, 0, buffer, 0, len).map_err(|e| chain(&e))?;
    copy.wait().map_err(|e| e.to_string())
}

/// The first `len` bytes of a block.
///
/// # Errors
/// As [`fill`].
pub fn read(pool: &Pool, block: BlockId, len: usize) -> Result<Vec<u8>, String> {
    let buffer = HostBuffer::from(vec![0xEE; len]);
    let copy = pool.read(StreamId::DEFAULT, block, 0, buffer, 0, len as u64).map_err(|e| chain(&e))?;
    Ok(copy.wait().map_err(|e| e.to_string())?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_depends_on_its_seed_and_every_position() {
        let whole = bytes(7, 4096);
        for len in [0, 1, 7, 8, 9, 4095] {
            assert_eq!(bytes(7, len), whole[..len]);
            assert_eq!(part(7, 3, len), bytes(7, 3 + len)[3..]);
        }
        let mut words: Vec<&[u8]> = whole.chunks(8).collect();
        let others = [bytes(6, 4096), bytes(8, 4096)];
        words.extend(others.iter().flat_map(|other| other.chunks(8)));
        words.sort_unstable();
        assert!(words.is_sorted_by(|a, b| a < b), "a word twice");
    }
}
