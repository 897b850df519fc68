//! What blocks are counted in, and how much a block can count.

/// Sizes are counted in units of this: every block begins and ends on a multiple of it, as PyTorch's do.
pub(super) const UNIT_BYTES: u64 = 512;

/// What a block can count: 2 TiB less a unit.
pub(super) const BYTES_MAX: u64 = u32::MAX as u64 * UNIT_BYTES;

/// The largest that a block can be: it may have to be a segment of its own, of whole granules.
pub(super) fn bytes_max(granule_bytes: u64) -> u64 {
    BYTES_MAX / granule_bytes * granule_bytes
}
