//! Matrix multiplication.

use crate::bytes::Bytes;
use crate::capability::{Capability, Generation, WARP_ROWS};

/// Tiles of a kernel that loops over K.
///
/// ```
/// use poorwill_triton::{MatmulTiles, per_block_bytes};
///
/// let tiles = MatmulTiles {
///     block_m: 128,
///     block_n: 256,
///     block_k: 64,
///     a_bytes: 2,
///     b_bytes: 2,
///     output_bytes: 2,
///     num_stages: 4,
///     num_warps: 8,
/// };
/// assert!(Some(tiles.estimate_bytes((9, 0))) <= per_block_bytes((9, 0)));
/// assert!(Some(tiles.estimate_bytes((12, 0))) > per_block_bytes((12, 0)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulTiles {
    /// Rows of A's tile and of the output's.
    pub block_m: u64,
    /// Columns of B's tile and of the output's.
    pub block_n: u64,
    /// Columns of A's tile and rows of B's.
    pub block_k: u64,
    /// Element size of A.
    pub a_bytes: u64,
    /// Element size of B. The narrower of two tiles is converted after loading.
    pub b_bytes: u64,
    /// Stored size of an output element.
    pub output_bytes: u64,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl MatmulTiles {
    /// Maximum shared memory per block.
    #[must_use]
    pub fn estimate_bytes(&self, capability: impl Into<Capability>) -> u64 {
        let generation = Generation::of(capability.into());
        self.operands(generation).max(self.output(generation)).0
    }

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
            // One buffer more than tiles in flight: the one being multiplied, or its conversion.
            return (a + b) * ahead + converted;
        }
        ((a + b) * ahead).max(converted)
    }

    /// The accumulator while it is converted to the output's layout.
    fn output(&self, generation: Generation) -> Bytes {
        let whole = Bytes::of_tile(self.block_m, self.block_n, self.output_bytes);
        let warps = self.num_warps.max(1);
        let at_a_time = match generation {
            Generation::Synchronous => Bytes(TURING_CONVERTED_BYTES_MAX),
            _ if generation.multiplies_in_place(self.block_m, self.num_warps) => {
                let rows = self.block_m.min(WARP_ROWS.saturating_mul(warps));
                let in_rows = Bytes::of_tile(rows, self.block_n, self.output_bytes);
                if self.block_n <= NARROW_COLUMNS { in_rows * 2 } else { in_rows }
            }
            _ => {
                let by_warps = Bytes(CONVERTED_BYTES_PER_WARP) * warps;
                by_warps.min(Bytes(CONVERTED_BYTES_MAX).max(Bytes(CONVERTED_BYTES_PER_WARP / 2) * warps))
            }
        };
        whole.min(at_a_time)
    }
}

/// Before Ampere, elements of this size or more are multiplied without tensor cores.
const FLOAT_BYTES: u64 = 4;
/// Of an accumulator, what Triton converts at a time.
const TURING_CONVERTED_BYTES_MAX: u64 = 32 << 10;
const CONVERTED_BYTES_PER_WARP: u64 = 8 << 10;
const CONVERTED_BYTES_MAX: u64 = 64 << 10;
/// Outputs of at most this many columns are converted by two rows of warps at once.
const NARROW_COLUMNS: u64 = 64;
