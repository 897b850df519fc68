//! How much memory of a device this process may use: from sources that may err to one figure, and from that
//! figure to claims.
//!
//! ```text
//! facts ──[rule]──▶ Budget { total, winner, budget, headroom } ──▶ Envelope ──▶ claims: weights, kv_cache, …
//!                     ▲ Cap: 20GiB or 0.92
//! ```
//!
//! On a device that is shared or cut into slices, those who can be asked disagree: one tells the whole card,
//! another the slice, a third nothing or nonsense. [`Budget::decide`] takes what each of them said ([`Fact`]):
//!
//! - The **total** is the smallest that is plausible. So a source that errs upwards changes nothing as long as
//!   one other tells the truth, and 0 or what no device has does not count.
//! - The **budget** is the total, or less where the user says so: a [`Cap`] in bytes, or as a share *of the total*,
//!   not of the card.
//! - The **headroom** is the smaller of what is free and what of the budget this process has not used.
//!
//! Every source stays in the result with its figure, and with what is odd about it; the one that the budget comes
//! from is named. Nothing here asks a machine: that is the driver's business, and `poorwill::budget` brings both
//! together.
//!
//! An [`Envelope`] hands the budget out: whoever needs memory claims it by name before taking it, and what does
//! not fit is refused while nothing is lost yet.

mod cap;
mod envelope;
mod rule;
mod source;

pub use cap::{Cap, InvalidCap, Share};
pub use envelope::{BudgetBasis, Claim, ClaimError, Claimed, Envelope, InUse};
pub use rule::{Budget, PLAUSIBLE_BYTES_MAX};
pub use source::{Answer, Fact, Source, SourceName};
