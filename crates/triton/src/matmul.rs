//! Kernels that multiply matrices.

use crate::bytes::Bytes;
use crate::capability::{Capability, Generation, WARP_ROWS};

/// A kernel with one loop over K that loads a tile of A and one of B and adds their product to an accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulTiles {
    /// Rows of the tiles of A and of the output.
    pub block_m: u64,
    /// Columns of the tiles of B and of the output.
    pub block_n: u64,
    /// Columns of A's tile and rows of B's.
    pub block_k: u64,
    /// Size of an element of A.
    pub a_bytes: u64,
    /// Size of an element of B. If it differs from A's, the narrower tile is converted once it is loaded.
    pub b_bytes: u64,
    /// Size of an element of the output, as it is stored.
    pub output_bytes: u64,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl MatmulTiles {
    /// The shared memory that a block takes, at most.
    #[must_use]
    pub fn estimate_bytes(&self, capability: impl Into<Capability>) -> u64 {
        let generation = Generation::of(capability.into());
        self.operands(generation).max(self.output(generation)).0
    }

    /// The tiles of A and B.
    fn operands(&self, generation: Generation) -> Bytes {
        let wide_bytes = self.a_bytes.max(self.b_bytes);
        let a = Bytes::of_tile(self.block_m, self.block_k, self.a_bytes);
        let b = Bytes::of_tile(self.block_k, self.block_n, self.b_bytes);
        let wide_a = Bytes::of_tile(self.block_m, self.block_k, wide_bytes);
        let wide_b = Bytes::of_tile(self.block_k, self.block_n, wide_bytes);
        let converted = if self.a_bytes > self.b_bytes { a + wide_b } else { wide_a + b };
        if generation == Generation::Synchronous {
            return if wide_bytes >= FLOAT_BYTES { wide_a + wide_b } else { wide_a.max(wide_b) * 2 };
        }
        let ahead = self.num_stages.saturating_sub(1);
        if generation.multiplies_in_place(self.block_m, self.num_warps) {
            // One more buffer than tiles under way: the one that is being multiplied from. What is converted
            // is multiplied from its conversion.
            return (a + b) * ahead + converted;
        }
        ((a + b) * ahead).max(converted)
    }

    /// The accumulator on its way to the layout in which it is stored.
    fn output(&self, generation: Generation) -> Bytes {
        let whole = Bytes::of_tile(self.block_m, self.block_n, self.output_bytes);
        let warps = self.num_warps.max(1);
        let at_a_time = match generation {
            Generation::Synchronous => Bytes(TURING_PIECE_BYTES_MAX),
            _ if generation.multiplies_in_place(self.block_m, self.num_warps) => {
                let rows = self.block_m.min(WARP_ROWS.saturating_mul(warps));
                let in_rows = Bytes::of_tile(rows, self.block_n, self.output_bytes);
                if self.block_n <= NARROW_COLUMNS { in_rows * 2 } else { in_rows }
            }
            _ => {
                let by_warps = Bytes(PIECE_BYTES_PER_WARP) * warps;
                by_warps.min(Bytes(PIECE_BYTES_MAX).max(Bytes(PIECE_BYTES_PER_WARP / 2) * warps))
            }
        };
        whole.min(at_a_time)
    }
}

/// From this size on, elements are multiplied without tensor cores before Ampere.
const FLOAT_BYTES: u64 = 4;
/// How much of an accumulator Triton turns into another layout at a time: by generation, and at most.
const TURING_PIECE_BYTES_MAX: u64 = 32 << 10;
const PIECE_BYTES_PER_WARP: u64 = 8 << 10;
const PIECE_BYTES_MAX: u64 = 64 << 10;
/// Outputs of at most so many columns are turned by two rows of warps at once.
const NARROW_COLUMNS: u64 = 64;
