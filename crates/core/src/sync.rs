//! Locks for model-checked code: the standard library's here, their doubles in `checks/interleavings`.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use std::sync::TryLockError;

pub(crate) fn is_poisoned<T>(mutex: &Mutex<T>) -> bool {
    mutex.is_poisoned()
}

/// Locks a free mutex, poisoned or not.
pub(crate) fn try_lock_anyway<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
