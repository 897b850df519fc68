//! Handles, which stand for what a caller has made.
//!
//! A handle is a number that is never an address, so the tables recognise a stale or invented one.

use std::sync::atomic::{AtomicU64, Ordering};

/// In place of a pointer; 0 is none.
pub(crate) type Handle = u64;

/// In a handle's upper byte, so that it is never an address.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HandleKind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Backing,
    Graph,
}

static CREATED: AtomicU64 = AtomicU64::new(0);

/// A handle that nothing had before.
pub(crate) fn new_handle(kind: HandleKind) -> Handle {
    let number = CREATED.fetch_add(1, Ordering::Relaxed) + 1;
    (kind as u64) << 56 | number << 4
}
