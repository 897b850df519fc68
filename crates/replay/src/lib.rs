//! What a load would have needed: recorded allocations, replayed through allocators on any card, without a GPU.
//!
//! A [`Trace`] is what a program allocated and freed. [`read`] has those that PyTorch and Poorwill record. A [`Setup`]
//! is an allocator with its settings. [`replay`](fn@replay) says what it maps for a trace on a [`Card`]; [`answer`] says
//! it in words, with what would make it fit. [`page`] draws it. [`cases`] are loads that users
//! reported.
#![forbid(unsafe_code)]

pub mod allocators;
pub mod answer;
mod card;
pub mod cases;
mod claim;
mod frames;
pub mod page;
pub mod read;
mod replay;
mod siblings;
mod side_by_side;
pub mod trace;

pub use self::allocators::{ParseSetupError, Setup};
pub use self::card::Card;
pub use self::claim::Claim;
pub use self::replay::{Failure, Instant, Moment, ReplayError, Run, moments, replay};
pub use self::siblings::share_cards;
pub use self::side_by_side::replay_each;
pub use self::trace::{Trace, TraceError};
