//! Every interleaving of the pool's own primitives, model-checked.
//!
//! The pool's tag locks and its reaper's commands are compiled here again, from the same files, over the locks of
//! [loom](https://docs.rs/loom). It runs each test with every order in which threads can take them. A lost
//! notification is a deadlock that loom reports.
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::unwrap_used)] // Test code throughout.

mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// No thread panics here.
    pub(crate) fn is_poisoned<T>(_mutex: &Mutex<T>) -> bool {
        false
    }

    /// As if another thread held it: loom's own waits instead of failing.
    pub(crate) fn try_lock_anyway<T>(_mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        None
    }
}

// Not everything that the pool uses is used here.
#[allow(dead_code)]
mod pool {
    #[path = "../../../../crates/core/src/pool/tools/commands.rs"]
    pub(super) mod commands;
    #[path = "../../../../crates/core/src/pool/tools/handover.rs"]
    pub(super) mod handover;
    #[path = "../../../../crates/core/src/pool/tools/tag_lock.rs"]
    pub(super) mod tag_lock;

    mod tests;
}
