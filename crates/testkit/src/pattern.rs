//! Bytes that tell where they belong: a word of a pattern depends on its seed and its position, so a lost,
//! swapped or shifted page never reads as the right one.

use std::sync::Arc;

use poorwill_core::{BlockId, HostBuffer, Pool, StreamId};

/// `len` bytes of the pattern of `seed`.
#[must_use]
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let word = |i: u64| mix(seed ^ mix(i)).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8) as u64).flat_map(word).collect();
    bytes.truncate(len);
    bytes
}

/// `len` bytes of the same, from `offset` on.
#[must_use]
pub fn part(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
    bytes(seed, skipped.saturating_add(len)).split_off(skipped)
}

/// One step of splitmix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Fills a block of `len` bytes with the pattern of `seed`, and waits.
///
/// # Errors
/// What the pool or the copy says, as text.
pub fn fill(pool: &Pool, block: BlockId, seed: u64, len: usize) -> Result<(), String> {
    let buffer = Arc::new(HostBuffer::from(bytes(seed, len)));
    let copy = pool.write(StreamId::DEFAULT, block, 0, buffer, 0, len as u64).map_err(|e| e.to_string())?;
    copy.wait().map_err(|e| e.to_string())
}

/// The first `len` bytes of a block.
///
/// # Errors
/// What the pool or the copy says, as text.
pub fn read(pool: &Pool, block: BlockId, len: usize) -> Result<Vec<u8>, String> {
    let buffer = HostBuffer::from(vec![0xEE; len]);
    let copy = pool.read(StreamId::DEFAULT, block, 0, buffer, 0, len as u64).map_err(|e| e.to_string())?;
    Ok(copy.wait().map_err(|e| e.to_string())?.to_vec())
}
