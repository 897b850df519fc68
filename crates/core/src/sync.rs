//! The locks this crate uses: the standard library's, or their doubles when interleavings are model-checked.
//!
//! Plain ones are never model-checked.

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use std::sync::{Mutex as PlainMutex, MutexGuard as PlainGuard, PoisonError};
