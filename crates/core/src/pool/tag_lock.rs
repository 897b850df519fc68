//! Who may do what with a tag while others are at it: a lock that is never held while waiting.
//!
//! A sleep or wake works on its tags for as long as copies take. Meanwhile the pool's lock is free; the tag's
//! [`TagLock`] is closed, and whoever needs the tag waits in front of it, without holding anything. Shorter work
//! that must not be overtaken by a sleep (mapping memory for a new block, queuing a copy) goes in as a access:
//! the tag_lock closes when the last access has left.
//!
//! [`Monitor`] is the lock and the bell that gates are used with. Every change that somebody may wait for
//! rings it. `checks/interleavings` compiles this file over other locks and tries their interleavings.

use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A value behind a lock, and a bell for those who wait for it to change.
#[derive(Debug)]
pub(super) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    /// A monitor over `value`.
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// The value; `None` when a thread panicked while it held it.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, T>> {
        self.value.lock().ok()
    }

    /// The value, in whatever state a panic may have left it.
    pub(super) fn lock_anyway(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the value up until somebody rings; may come back early. `None` as for [`Monitor::lock`].
    pub(super) fn wait<'a>(&'a self, guard: MutexGuard<'a, T>) -> Option<MutexGuard<'a, T>> {
        self.changed.wait(guard).ok()
    }

    /// The same, for `most` at the longest.
    pub(super) fn wait_for<'a>(
        &'a self,
        guard: MutexGuard<'a, T>,
        most: Duration,
    ) -> Option<MutexGuard<'a, T>> {
        self.changed.wait_timeout(guard, most).ok().map(|(guard, _)| guard)
    }

    /// Wakes all who wait.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }
}

/// The tag_lock of one tag.
#[derive(Debug, Default)]
pub(super) struct TagLock {
    shared_accesses: u32,
    closed: bool,
}

impl TagLock {
    /// Whether somebody works on the tag exclusive.
    #[must_use]
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether nobody is inside.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        !self.closed && self.shared_accesses == 0
    }

    /// Goes in as a access, if the tag_lock is open.
    pub(super) fn enter(&mut self) -> bool {
        if !self.closed {
            self.shared_accesses += 1;
        }
        !self.closed
    }

    /// A access leaves.
    pub(super) fn leave(&mut self) {
        self.shared_accesses = self.shared_accesses.saturating_sub(1);
    }

    /// Closes the tag_lock behind oneself, if nobody is inside.
    pub(super) fn close(&mut self) -> bool {
        let closes = self.is_empty();
        self.closed |= closes;
        closes
    }

    /// Opens it again.
    pub(super) fn open(&mut self) {
        self.closed = false;
    }
}
