//! How much shared memory a Triton kernel takes, and how much a GPU has for it.
//!
//! Triton's autotuner compiles and runs every configuration it is given; one that asks for more shared memory than
//! a block may have ends the launch, and often the worker. [`per_block_bytes`] knows what a block may have by
//! compute capability. The structs know what a kernel asks for, from its tile sizes alone and without compiling
//! it: [`MatmulTiles`], [`AttentionTiles`], and for the gated delta rule [`DeltaRuleOutputTiles`] and
//! [`DeltaRuleStateTiles`].
//!
//! An estimate is meant to be an upper bound, and a tight one: what Triton 3.6 takes is that much or a little less.
//! That is measured, not proven; `docs/kernels.md` says with what, and how tight, kernel by kernel.
//!
//! Everything here is a pure function of integers, whatever they are: sums and products end at `u64::MAX`. No other
//! crate of this workspace is needed for it.
//!
//! ```
//! use poorwill_triton::{DeltaRuleStateTiles, per_block_bytes};
//!
//! let tiles = DeltaRuleStateTiles {
//!     block_t: 64,
//!     block_v: 64,
//!     k_blocks: 2,
//!     element_bytes: 2,
//!     state_v_first: true,
//!     num_stages: 4,
//!     num_warps: 4,
//! };
//! let fits = |capability| Some(tiles.estimate_bytes(capability)) <= per_block_bytes(capability);
//! assert!(fits((9, 0)));
//! assert!(!fits((12, 0)));
//! ```
#![forbid(unsafe_code)]

mod attention;
mod bytes;
mod capability;
mod delta_rule;
mod matmul;

pub use attention::AttentionTiles;
pub use capability::{Capability, WITHOUT_OPT_IN_BYTES, known_capabilities, per_block_bytes};
pub use delta_rule::{DeltaRuleOutputTiles, DeltaRuleStateTiles};
pub use matmul::MatmulTiles;
