//! Host memory to free after the device's work completes.

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) type Kept = Box<dyn Any + Send + Sync>;

/// Keeps what it could not wait for, such as after a fatal device error; leaks it on drop. What waits returns
/// whether the device has done its work.
#[derive(Default)]
pub(crate) struct DeferredFree(Mutex<Vec<Kept>>);

impl fmt::Debug for DeferredFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredFree").field("kept", &self.lock().len()).finish()
    }
}

impl DeferredFree {
    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees after the device's present work: now, or in a later call if waiting fails.
    pub(crate) fn free(&self, wait: impl FnOnce() -> bool, kept: Kept) {
        // Outside the lock, so that other threads see an empty list and do not wait.
        let mut held = mem::take(&mut *self.lock());
        held.push(kept);
        self.free_all(wait, held);
    }

    pub(crate) fn free_deferred(&self, wait: impl FnOnce() -> bool) {
        let held = mem::take(&mut *self.lock());
        if !held.is_empty() {
            self.free_all(wait, held);
        }
    }

    /// Takes what was held before the wait: later memory may be used by later work.
    fn free_all(&self, wait: impl FnOnce() -> bool, held: Vec<Kept>) {
        if !wait() {
            self.lock().extend(held);
        }
    }
}

impl Drop for DeferredFree {
    fn drop(&mut self) {
        // The device may still use it, and no caller can wait. In a forked child the list may be
        // inconsistent.
        mem::forget(mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}
