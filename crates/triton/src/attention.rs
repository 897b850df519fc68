//! Forward attention in one pass over the keys.

use crate::bytes::Bytes;
use crate::capability::{Capability, Generation};

/// Tiles of flash attention.
///
/// ```
/// use poorwill_triton::{AttentionTiles, per_block_bytes};
///
/// let tiles = AttentionTiles {
///     block_m: 128,
///     block_n: 64,
///     head_dim: 128,
///     element_bytes: 2,
///     num_stages: 2,
///     num_warps: 4,
/// };
/// assert!(Some(tiles.estimate_bytes((9, 0))) <= per_block_bytes((9, 0)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTiles {
    /// Queries per block.
    pub block_m: u64,
    /// Keys and values per iteration.
    pub block_n: u64,
    /// Head dimension.
    pub head_dim: u64,
    /// Element size.
    pub element_bytes: u64,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl AttentionTiles {
    /// Maximum shared memory per block.
    #[must_use]
    pub fn estimate_bytes(&self, capability: impl Into<Capability>) -> u64 {
        let generation = Generation::of(capability.into());
        let queries = Bytes::of_tile(self.block_m, self.head_dim, self.element_bytes);
        let keys = Bytes::of_tile(self.block_n, self.head_dim, self.element_bytes);
        let weights = Bytes::of_tile(self.block_m, self.block_n, self.element_bytes);
        if generation == Generation::Synchronous {
            let total = if self.element_bytes >= FLOAT_BYTES {
                queries + keys + weights
            } else {
                (queries + keys.max(weights)) * 2
            };
            return total.0;
        }
        let ahead = self.num_stages.saturating_sub(1);
        if generation.multiplies_in_place(self.block_m, self.num_warps) {
            let buffers = if ahead == 0 { keys } else { keys * 2 * self.num_stages };
            return (queries + buffers).0;
        }
        let buffers = if ahead == 0 { keys } else { keys * 2 * ahead };
        (queries + buffers + self.exchange(weights)).0
    }

    /// With fewer queries than elements, Triton places the warps along the keys. Each needs the others' weights, and
    /// their maximum and sum of every row.
    fn exchange(&self, weights: Bytes) -> Bytes {
        if self.num_warps <= 1 || self.block_m >= self.head_dim {
            return Bytes::ZERO;
        }
        weights + Bytes::of_tile(self.block_m, self.num_warps, FLOAT_BYTES)
    }
}

const FLOAT_BYTES: u64 = size_of::<f32>() as u64;
