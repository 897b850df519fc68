//! A lock that a long holder can hand to waiting threads in between.
//!
//! The standard lock is not fair: a thread that unlocks and locks again mostly wins against woken threads.
//! Here each waiting thread draws a ticket. [`HandoverLock::yield_to_waiters`] returns after all earlier
//! tickets have had the lock. Without a yield there is no queue.
//!
//! Promise: two threads that yield to each other both proceed, since each waits for earlier tickets only.
//! `checks/interleavings` compiles this file with other locks and tries their interleavings.

use std::collections::BTreeSet;

use super::tag_lock::Monitor;
use crate::sync::{Mutex, MutexGuard, PoisonError, is_poisoned, try_lock_anyway};

#[derive(Debug)]
pub(in crate::pool) struct HandoverLock<T> {
    value: Mutex<T>,
    /// Locked alone or while holding the value; the value is never locked under it.
    waiters: Monitor<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    next: u64,
    tickets: BTreeSet<u64>,
}

impl Waiters {
    fn draw(&mut self) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.tickets.insert(ticket);
        ticket
    }
}

impl<T> HandoverLock<T> {
    pub(in crate::pool) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), waiters: Monitor::new(Waiters::default()) }
    }

    /// `None` after a panic of a thread that held it.
    pub(in crate::pool) fn lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.lock_anyway();
        if self.is_poisoned() { None } else { Some(guard) }
    }

    pub(in crate::pool) fn lock_anyway(&self) -> MutexGuard<'_, T> {
        try_lock_anyway(&self.value).unwrap_or_else(|| {
            let ticket = self.waiters.lock_anyway().draw();
            self.lock_with(ticket)
        })
    }

    pub(in crate::pool) fn is_poisoned(&self) -> bool {
        is_poisoned(&self.value)
    }

    pub(in crate::pool) fn waiting(&self) -> usize {
        self.waiters.lock_anyway().tickets.len()
    }

    /// Keeps the lock if no thread waits. The value may be poisoned meanwhile.
    pub(in crate::pool) fn yield_to_waiters<'a>(&'a self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        let mut waiters = self.waiters.lock_anyway();
        if waiters.tickets.is_empty() {
            return guard;
        }
        let ticket = waiters.draw();
        drop(guard);
        while waiters.tickets.first().is_some_and(|first| *first < ticket) {
            match self.waiters.wait(waiters) {
                Some(woken) => waiters = woken,
                None => return self.lock_with(ticket),
            }
        }
        drop(waiters);
        self.lock_with(ticket)
    }

    fn lock_with(&self, ticket: u64) -> MutexGuard<'_, T> {
        let guard = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.lock_anyway().tickets.remove(&ticket);
        self.waiters.notify();
        guard
    }
}
