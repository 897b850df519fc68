//! Bytes that tell where they belong: those of a pattern depend on its seed and on their position, so a lost, swapped or
//! shifted page never reads as the right one.

use std::sync::Arc;

use poorwill_core::{BlockId, HostBuffer, Pool, StreamId};

/// `len` bytes of the pattern of `seed`.
#[must_use]
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(mix(seed)).fill(&mut bytes);
    bytes
}

/// `len` bytes of the same, from `offset` on.
#[must_use]
pub fn part(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
    bytes(seed, skipped.saturating_add(len)).split_off(skipped)
}

/// A number that looks like any other, the same for the same `x`.
#[must_use]
pub fn mix(x: u64) -> u64 {
    fastrand::Rng::with_seed(x).u64(..)
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
