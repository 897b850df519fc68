//! The two largest forward kernels of flash-linear-attention's chunked gated delta rule.

use crate::bytes::Bytes;
use crate::capability::{Capability, Generation, WARP_ROWS};

/// Tiles of `chunk_fwd_kernel_o`: the output of a chunk.
///
/// ```
/// use poorwill_triton::DeltaRuleOutputTiles;
///
/// let tiles = |num_stages| DeltaRuleOutputTiles {
///     block_t: 64,
///     block_k: 64,
///     block_v: 64,
///     key_dim: None,
///     element_bytes: 2,
///     state_v_first: true,
///     num_stages,
///     num_warps: 4,
/// };
/// assert!(tiles(4).estimate_bytes((9, 0)) > tiles(2).estimate_bytes((9, 0)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRuleOutputTiles {
    /// `BT`: tokens per chunk.
    pub block_t: u64,
    /// `BK`: key elements per iteration.
    pub block_k: u64,
    /// `BV`: value elements per block.
    pub block_v: u64,
    /// `K`: elements of a key. If one tile holds them all, nothing is loaded ahead. `None` counts as more than a
    /// tile.
    pub key_dim: Option<u64>,
    /// Element size.
    pub element_bytes: u64,
    /// `STATE_V_FIRST`: values first in the state.
    pub state_v_first: bool,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl DeltaRuleOutputTiles {
    /// Maximum shared memory per block.
    #[must_use]
    pub fn estimate_bytes(&self, capability: impl Into<Capability>) -> u64 {
        let generation = Generation::of(capability.into());
        let queries = Bytes::of_tile(self.block_t, self.block_k, self.element_bytes);
        let state = Bytes::of_tile(self.block_k, self.block_v, self.element_bytes);
        let weights = Bytes::of_tile(self.block_t, self.block_t, self.element_bytes);
        let values = Bytes::of_tile(self.block_t, self.block_v, self.element_bytes);
        if generation == Generation::Synchronous {
            let (first, second) = if self.element_bytes >= FLOAT_BYTES {
                (queries * 2 + state, weights + values)
            } else {
                ((queries + state) * 2, weights.max(values) * 2)
            };
            return first.max(second).0;
        }
        let has_loop = self.key_dim.is_none_or(|key_dim| key_dim > self.block_k);
        let ahead = if has_loop { self.num_stages.saturating_sub(1) } else { 0 };
        let loaded = queries * 2 + state;
        let warps = self.num_warps.max(1);
        if generation.multiplies_in_place(self.block_t, self.num_warps) {
            let rows = WARP_ROWS.saturating_mul(warps);
            let stored = Bytes::of_tile(self.block_t.min(rows), self.block_v, self.element_bytes);
            let second = if rows <= self.block_t { values } else { weights + values };
            return (loaded * ahead.saturating_add(1)).max(second).max(stored * 2).0;
        }
        let converted = Bytes(CONVERTED_ELEMENTS_PER_WARP) * self.element_bytes * warps;
        let converted_state = if self.state_v_first { state.min(converted * 2) } else { state };
        let first = (loaded * ahead).max(queries + converted_state.max(queries.min(converted)));
        first.max(weights + values + converted).0
    }
}

/// Tiles of `chunk_gated_delta_rule_fwd_kernel_h_blockdim64`: the states between chunks, in slices of 64 key
/// elements.
///
/// ```
/// use poorwill_triton::{DeltaRuleStateTiles, per_block_bytes};
///
/// let tiles = DeltaRuleStateTiles {
///     block_t: 64,
///     block_v: 64,
///     k_blocks: 2,
///     element_bytes: 2,
///     state_v_first: true,
///     num_stages: 4,
///     num_warps: 4,
/// };
/// assert!(Some(tiles.estimate_bytes((12, 0))) > per_block_bytes((12, 0)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRuleStateTiles {
    /// `BT`: tokens per chunk.
    pub block_t: u64,
    /// `BV`: value elements per block.
    pub block_v: u64,
    /// Slices of 64 in a key: 1 to 4 for `K` from 64 to 256.
    pub k_blocks: u64,
    /// Element size.
    pub element_bytes: u64,
    /// `STATE_V_FIRST`: values first in the state.
    pub state_v_first: bool,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl DeltaRuleStateTiles {
    /// Maximum shared memory per block.
    #[must_use]
    pub fn estimate_bytes(&self, capability: impl Into<Capability>) -> u64 {
        let generation = Generation::of(capability.into());
        let keys = self.keys();
        let state = self.state();
        let values = self.values();
        if generation == Generation::Synchronous {
            let largest = keys.max(state).max(values);
            let floats = keys + state.max(values);
            return if self.element_bytes >= FLOAT_BYTES { floats.0 } else { (largest * 2).0 };
        }
        let converted = self.converted();
        let at_once =
            keys.max(state) + converted + if self.is_narrow() { self.states() } else { Bytes::ZERO };
        let ahead = self.num_stages.saturating_sub(1);
        if ahead == 0 {
            return at_once.0;
        }
        let in_place = generation.multiplies_in_place(HEAD_SLICE, self.num_warps);
        let all_keys = keys * self.k_blocks;
        let g_bytes = (Bytes::of_tile(self.block_t, 1, FLOAT_BYTES) + Bytes(FLOAT_BYTES)) * ahead;
        // For each slice, the keys, and the weights that the state is read with.
        let mut loaded = (all_keys * 2 + values) * ahead;
        let mut other = g_bytes;
        let kept = if in_place {
            loaded = loaded + all_keys;
            if generation.multiplies_in_place(self.block_t, self.num_warps) {
                loaded = loaded + all_keys;
                other = g_bytes.max(self.kept_without_g());
                self.states() + self.kept_in_place()
            } else {
                self.states() + converted
            }
        } else if self.num_warps <= 1 {
            self.kept_by_one_warp()
        } else if self.is_narrow() && self.block_v < WIDE_VALUES {
            self.states() + converted
        } else {
            converted
        };
        (loaded + other + kept).max(at_once).0
    }

    fn keys(&self) -> Bytes {
        Bytes::of_tile(self.block_t, HEAD_SLICE, self.element_bytes)
    }

    fn state(&self) -> Bytes {
        Bytes::of_tile(HEAD_SLICE, self.block_v, self.element_bytes)
    }

    fn values(&self) -> Bytes {
        Bytes::of_tile(self.block_t, self.block_v, self.element_bytes)
    }

    /// If they are multiplied through shared memory.
    fn states(&self) -> Bytes {
        if self.state_v_first { Bytes::ZERO } else { self.state() * self.k_blocks }
    }

    fn converted(&self) -> Bytes {
        let values = self.values();
        self.state().max(if self.block_v >= WIDE_VALUES { values } else { values * 2 })
    }

    fn kept_in_place(&self) -> Bytes {
        let beside = self.state().max(self.values());
        self.values() + if self.state_v_first || self.has_idle_warps() { beside } else { Bytes::ZERO }
    }

    /// A second copy of the state, measured in kernels of one slice without `USE_G` that store the new
    /// values, for chunks longer than a slice. Whether `USE_G` is set is unknown here.
    fn kept_without_g(&self) -> Bytes {
        let is_one_slice = self.k_blocks <= 1 && self.block_t > HEAD_SLICE;
        if is_one_slice && !self.state_v_first && !self.has_idle_warps() { self.state() } else { Bytes::ZERO }
    }

    fn has_idle_warps(&self) -> bool {
        WARP_ROWS.saturating_mul(self.num_warps) > self.block_t
    }

    /// One warp has a whole product in registers, and converts a few rows at a time. Measured: 2 KiB for elements of
    /// two bytes and 8 KiB for four, hence the square.
    fn kept_by_one_warp(&self) -> Bytes {
        if !self.is_narrow() && self.state_v_first {
            return self.converted();
        }
        Bytes(CONVERTED_ELEMENTS_PER_WARP) * self.element_bytes * self.element_bytes
    }

    fn is_narrow(&self) -> bool {
        self.element_bytes < FLOAT_BYTES
    }
}

const FLOAT_BYTES: u64 = size_of::<f32>() as u64;
const HEAD_SLICE: u64 = 64;
/// From this many value elements on, a state is converted in registers. Measured among tiles of 16, 32, 64 and 128.
const WIDE_VALUES: u64 = 128;
const CONVERTED_ELEMENTS_PER_WARP: u64 = 512;
