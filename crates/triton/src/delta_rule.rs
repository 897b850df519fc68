//! The gated delta rule in chunks: the two forward kernels of flash-linear-attention that take most.

use crate::bytes::Bytes;
use crate::capability::{Capability, Generation, WARP_ROWS};

/// `chunk_fwd_kernel_o`: the output of a chunk, from the state before it and from the chunk itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRuleOutputTiles {
    /// `BT`: the tokens of a chunk.
    pub block_t: u64,
    /// `BK`: elements of keys at a time.
    pub block_k: u64,
    /// `BV`: elements of values of a block.
    pub block_v: u64,
    /// `K`: elements of a key. Where one tile holds them all, there is no loop and nothing is loaded ahead; `None`
    /// if it is not known, which counts as more than a tile.
    pub key_dim: Option<u64>,
    /// Size of an element.
    pub element_bytes: u64,
    /// `STATE_V_FIRST`: whether the state lies with its values first.
    pub state_v_first: bool,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl DeltaRuleOutputTiles {
    /// The shared memory that a block takes, at most.
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
        let piece = Bytes(PIECE_ELEMENTS_PER_WARP) * self.element_bytes * warps;
        let turned_state = if self.state_v_first { state.min(piece * 2) } else { state };
        let first = (loaded * ahead).max(queries + turned_state.max(queries.min(piece)));
        first.max(weights + values + piece).0
    }
}

/// `chunk_gated_delta_rule_fwd_kernel_h_blockdim64`: the states between chunks, 64 elements of keys a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRuleStateTiles {
    /// `BT`: the tokens of a chunk.
    pub block_t: u64,
    /// `BV`: elements of values of a block.
    pub block_v: u64,
    /// Pieces of 64 that the elements of a key make: 1 to 4 for `K` from 64 to 256.
    pub k_blocks: u64,
    /// Size of an element.
    pub element_bytes: u64,
    /// `STATE_V_FIRST`: whether the state lies with its values first.
    pub state_v_first: bool,
    /// Triton's `num_stages`.
    pub num_stages: u64,
    /// Triton's `num_warps`.
    pub num_warps: u64,
}

impl DeltaRuleStateTiles {
    /// The shared memory that a block takes, at most.
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
        let turned = self.turned();
        let at_once = keys.max(state) + turned + if self.is_narrow() { self.states() } else { Bytes::ZERO };
        let ahead = self.num_stages.saturating_sub(1);
        if ahead == 0 {
            return at_once.0;
        }
        let in_place = generation.multiplies_in_place(HEAD_PIECE, self.num_warps);
        let all_keys = keys * self.k_blocks;
        let gates = (Bytes::of_tile(self.block_t, 1, FLOAT_BYTES) + Bytes(FLOAT_BYTES)) * ahead;
        // Two tiles of the keys' shape for each piece: the keys, and the weights that the state is read with.
        let mut loaded = (all_keys * 2 + values) * ahead;
        let mut besides = gates;
        let kept = if in_place {
            loaded = loaded + all_keys;
            if generation.multiplies_in_place(self.block_t, self.num_warps) {
                loaded = loaded + all_keys;
                besides = gates.max(self.kept_without_gates());
                self.states() + self.kept_in_place()
            } else {
                self.states() + turned
            }
        } else if self.num_warps <= 1 {
            self.kept_by_one_warp()
        } else if self.is_narrow() && self.block_v < WIDE_VALUES {
            self.states() + turned
        } else {
            turned
        };
        (loaded + besides + kept).max(at_once).0
    }

    /// A tile of keys, one piece wide.
    fn keys(&self) -> Bytes {
        Bytes::of_tile(self.block_t, HEAD_PIECE, self.element_bytes)
    }

    /// A piece of the state.
    fn state(&self) -> Bytes {
        Bytes::of_tile(HEAD_PIECE, self.block_v, self.element_bytes)
    }

    fn values(&self) -> Bytes {
        Bytes::of_tile(self.block_t, self.block_v, self.element_bytes)
    }

    /// All pieces of the state, where they go through shared memory to be multiplied with.
    fn states(&self) -> Bytes {
        if self.state_v_first { Bytes::ZERO } else { self.state() * self.k_blocks }
    }

    /// Values, or a piece of the state, on their way to another layout.
    fn turned(&self) -> Bytes {
        let values = self.values();
        self.state().max(if self.block_v >= WIDE_VALUES { values } else { values * 2 })
    }

    /// The values that are multiplied with, and what is turned beside them.
    fn kept_in_place(&self) -> Bytes {
        let beside = self.state().max(self.values());
        self.values() + if self.state_v_first || self.has_idle_warps() { beside } else { Bytes::ZERO }
    }

    /// A second copy of the state. Found by measurement: a kernel of one piece that loads no gates and stores the
    /// new values has it, for chunks longer than a piece. Whether there are gates is not known here.
    fn kept_without_gates(&self) -> Bytes {
        let is_one_piece = self.k_blocks <= 1 && self.block_t > HEAD_PIECE;
        if is_one_piece && !self.state_v_first && !self.has_idle_warps() { self.state() } else { Bytes::ZERO }
    }

    fn has_idle_warps(&self) -> bool {
        WARP_ROWS.saturating_mul(self.num_warps) > self.block_t
    }

    /// A single warp has all of a product in its registers, and turns it a few rows at a time. How much that takes
    /// was found by measurement with elements of two and four bytes: 2 KiB and 8 KiB, so the size of an element
    /// stands in it twice.
    fn kept_by_one_warp(&self) -> Bytes {
        if !self.is_narrow() && self.state_v_first {
            return self.turned();
        }
        Bytes(PIECE_ELEMENTS_PER_WARP) * self.element_bytes * self.element_bytes
    }

    /// Whether elements are of less than four bytes.
    fn is_narrow(&self) -> bool {
        self.element_bytes < FLOAT_BYTES
    }
}

const FLOAT_BYTES: u64 = size_of::<f32>() as u64;
/// How many elements of a key a piece of the state has.
const HEAD_PIECE: u64 = 64;
/// From so many elements of values on, a state is turned in registers. Found by measurement among tiles of 16, 32, 64
/// and 128.
const WIDE_VALUES: u64 = 128;
/// How many elements a warp turns at a time.
const PIECE_ELEMENTS_PER_WARP: u64 = 512;
