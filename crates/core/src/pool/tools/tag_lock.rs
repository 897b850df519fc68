//! The lock of a tag: shared or exclusive access, without holding a mutex for long.
//!
//! A sleep or wake has exclusive access to its tags for as long as copies take, with the pool's state
//! unlocked. Shorter work that a sleep must not interrupt (mapping memory, queuing a copy) has shared access.
//! The lock closes when the last shared access has ended.
//!
//! [`Monitor`] is the mutex and condition variable around it. Every change that a thread may wait for
//! notifies. `checks/interleavings` compiles this file with other locks and tries their interleavings.

use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(in crate::pool) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(in crate::pool) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// `None` after a panic of a thread that held it.
    pub(in crate::pool) fn lock(&self) -> Option<MutexGuard<'_, T>> {
        self.value.lock().ok()
    }

    /// Ignores poisoning.
    pub(in crate::pool) fn lock_anyway(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unlocks the value until a notification; may return early. `None` as for [`Monitor::lock`].
    pub(in crate::pool) fn wait<'a>(&'a self, guard: MutexGuard<'a, T>) -> Option<MutexGuard<'a, T>> {
        self.changed.wait(guard).ok()
    }

    pub(in crate::pool) fn wait_for<'a>(
        &'a self,
        guard: MutexGuard<'a, T>,
        most: Duration,
    ) -> Option<MutexGuard<'a, T>> {
        self.changed.wait_timeout(guard, most).ok().map(|(guard, _)| guard)
    }

    pub(in crate::pool) fn notify(&self) {
        self.changed.notify_all();
    }
}

#[derive(Debug, Default)]
pub(in crate::pool) struct TagLock {
    shared_accesses: u32,
    closed: bool,
}

impl TagLock {
    #[must_use]
    pub(in crate::pool) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether no call has access.
    #[must_use]
    pub(in crate::pool) fn is_empty(&self) -> bool {
        !self.closed && self.shared_accesses == 0
    }

    /// Begins shared access, unless the lock is closed.
    pub(in crate::pool) fn enter(&mut self) -> bool {
        if !self.closed {
            self.shared_accesses += 1;
        }
        !self.closed
    }

    pub(in crate::pool) fn leave(&mut self) {
        self.shared_accesses = self.shared_accesses.saturating_sub(1);
    }

    /// Begins exclusive access, if no call has access.
    pub(in crate::pool) fn close(&mut self) -> bool {
        let closes = self.is_empty();
        self.closed |= closes;
        closes
    }

    /// Ends exclusive access.
    pub(in crate::pool) fn open(&mut self) {
        self.closed = false;
    }
}
