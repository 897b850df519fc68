//! The locks that interleavings are model-checked with: the standard library's here, their doubles in
//! `checks/interleavings`.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

/// Whether a thread panicked while it held the lock.
pub(crate) fn is_poisoned<T>(mutex: &Mutex<T>) -> bool {
    mutex.is_poisoned()
}
