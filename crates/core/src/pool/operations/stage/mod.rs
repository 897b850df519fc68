//! A sleep or a wake in two phases, so that a group of pools does it together or not at all.
//!
//! A thread carries it out up to its point of no return. There everything is done that can fail, and all of it can be
//! undone. A sleep has its backups and keeps every handle; a wake is mapped, filled and verified. The thread waits
//! for the group's [verdict](crate::decision) with no lock but that of the tags.
//!
//! Promise: it ends by itself. After its time it proposes to undo, and the verdict that then holds is what it does.
//! Closing the pool proposes the same.

mod staged;
mod verdict;

pub use self::staged::Staged;
pub(in crate::pool) use self::verdict::ReadyStep;
