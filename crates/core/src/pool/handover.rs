//! A lock that can be handed over: who holds it for long lets those who wait have it in between.
//!
//! The standard lock is not fair: who gives it up and takes it again at once mostly has it before those who were woken.
//! Here each who has to wait draws a ticket, and [`HandoverLock::yield_to_waiters`] comes back when all who had drawn
//! one before have had the lock. Beside that it is taken as it comes: where nobody yields, there is no queue.
//!
//! Promise: two who yield to each other both come on, since each waits for earlier tickets only.
//! `checks/interleavings` compiles this file over other locks and tries their interleavings.

use std::collections::BTreeSet;

use super::tag_lock::Monitor;
use crate::sync::{Mutex, MutexGuard, PoisonError, is_poisoned, try_lock_anyway};

/// A value behind such a lock.
#[derive(Debug)]
pub(super) struct HandoverLock<T> {
    value: Mutex<T>,
    /// Taken by who holds the value, or by itself; never the other way round.
    waiters: Monitor<Waiters>,
}

/// Who waits for the value.
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
    /// A lock around `value`.
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), waiters: Monitor::new(Waiters::default()) }
    }

    /// The value; `None` when a thread panicked while it held it.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.lock_anyway();
        if self.is_poisoned() { None } else { Some(guard) }
    }

    /// The value, in whatever state a panic may have left it.
    pub(super) fn lock_anyway(&self) -> MutexGuard<'_, T> {
        try_lock_anyway(&self.value).unwrap_or_else(|| {
            let ticket = self.waiters.lock_anyway().draw();
            self.lock_with(ticket)
        })
    }

    /// Whether a thread panicked while it held the value.
    pub(super) fn is_poisoned(&self) -> bool {
        is_poisoned(&self.value)
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiters.lock_anyway().tickets.len()
    }

    /// Gives the value up, and has it again when all have had it who wait now; in whatever state a panic may have left
    /// it meanwhile. Where nobody waits it is not given up.
    pub(super) fn yield_to_waiters<'a>(&'a self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
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
