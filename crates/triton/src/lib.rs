//! How much shared memory a Triton kernel takes, and how much a GPU has.
//!
//! Triton's autotuner runs every configuration, and one that needs too much shared memory fails the launch,
//! and often the worker. [`per_block_bytes`] is the limit; the structs estimate a kernel's need from its tile
//! sizes, without compiling it.
//!
//! An estimate is a tight upper bound for Triton 3.6: measured, not proven, as `docs/benchmarks/budgets.md` shows. It
//! saturates at `u64::MAX`.
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
