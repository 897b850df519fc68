//! The unit of block sizes, and the largest block.

/// Every block begins and ends on a multiple of this, as PyTorch's do.
pub(in crate::pool) const UNIT_BYTES: u64 = 512;

/// 2 TiB less a unit.
pub(super) const BYTES_MAX: u64 = u32::MAX as u64 * UNIT_BYTES;

/// A block may need a segment of its own, of whole granules.
pub(in crate::pool) fn bytes_max(granule_bytes: u64) -> u64 {
    BYTES_MAX / granule_bytes * granule_bytes
}
