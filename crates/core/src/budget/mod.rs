//! How much device memory this process may use: from unreliable sources to one budget, and to claims on it.
//!
//! ```text
//! readings ──[rule]──▶ Budget { total, winner, budget, headroom } ──▶ Envelope ──▶ claims: weights, kv_cache, …
//!                         ▲ Cap: 20GiB or 0.92
//! ```
//!
//! On a shared or partitioned device the sources disagree: one reports the whole GPU, one the slice, one
//! nonsense. [`Budget::decide`] takes every [`Reading`]:
//!
//! - The **total** is the smallest plausible one, so one right source outweighs all that are too high.
//! - The **budget** is the total, or a smaller [`Cap`]: bytes, or a share *of the total*, not of the GPU.
//! - The **headroom** is the smaller of free memory and unused budget.
//!
//! Where a device shares the computer's memory, [`system_reserve_bytes`] of it stay with the system.
//!
//! Nothing here queries a machine: `poorwill::budget` does.

mod cap;
mod envelope;
mod rule;
mod source;

pub use cap::{Cap, InvalidCap, Share};
pub use envelope::{BudgetBasis, Claim, ClaimError, Claimed, Envelope, InUse};
pub use rule::{Budget, PLAUSIBLE_BYTES_MAX, system_reserve_bytes};
pub use source::{Figure, Reading, Source, SourceName};
