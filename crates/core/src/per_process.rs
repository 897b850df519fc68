//! Values that each process has for itself, forks included.
//!
//! In a forked child, a lock may be held by a thread that does not exist there. So a child never uses its
//! parent's value: it takes the next one of an array.

use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Nested forks that each use their value, until one shares that of an ancestor.
pub(crate) const FORKS: usize = 64;

const NUMBER_BITS: u32 = 32;

/// A value for each process.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    values: [T; FORKS],
    /// Upper bits: the id of the owning process. Lower bits: the index of its value.
    current: AtomicU64,
}

impl<T> PerProcess<T> {
    /// One value for each fork.
    pub(crate) const fn new(values: [T; FORKS]) -> Self {
        Self { values, current: AtomicU64::new(0) }
    }

    /// That of this process.
    pub(crate) fn here(&self) -> &T {
        self.of(process::id())
    }

    fn of(&self, process: u32) -> &T {
        let mine = u64::from(process);
        let mut current = self.current.load(Ordering::Acquire);
        while current >> NUMBER_BITS != mine {
            let next = (mine << NUMBER_BITS) | ((number(current) + 1) % FORKS as u64);
            match self.current.compare_exchange(current, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = next,
                Err(other) => current = other,
            }
        }
        // The index is below the length.
        &self.values[usize::try_from(number(current)).unwrap_or(0)]
    }
}

/// A value that its users in a process share. The first makes it, and it goes with the last.
#[doc(hidden)]
#[derive(Debug)]
pub struct SharedInProcess<T>(PerProcess<Mutex<Made<T>>>);

#[derive(Debug)]
struct Made<T> {
    process: u32,
    value: Weak<T>,
}

impl<T> SharedInProcess<T> {
    /// Without users.
    #[must_use]
    pub const fn new() -> Self {
        Self(PerProcess::new([const { Mutex::new(Made { process: 0, value: Weak::new() }) }; FORKS]))
    }

    /// Where another user has it, nothing is made.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let mut made = self.0.here().lock().unwrap_or_else(PoisonError::into_inner);
        let process = process::id();
        if let Some(value) = made.value.upgrade().filter(|_| made.process == process) {
            return Ok(value);
        }
        let value = Arc::new(make()?);
        *made = Made { process, value: Arc::downgrade(&value) };
        Ok(value)
    }
}

impl<T> Default for SharedInProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

fn number(current: u64) -> u64 {
    current & ((1 << NUMBER_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_value_goes_with_its_last_user() {
        static SHARED: SharedInProcess<u32> = SharedInProcess::new();
        assert_eq!(SHARED.get_or_make(|| Err::<u32, u32>(5)), Err(5));
        let first = SHARED.get_or_make(|| Ok::<u32, u32>(1)).unwrap();
        let second = SHARED.get_or_make(|| Ok::<u32, u32>(2)).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop((first, second));
        assert_eq!(SHARED.get_or_make(|| Ok::<u32, u32>(3)).as_deref(), Ok(&3));
    }

    #[test]
    fn a_fork_has_its_own_value_while_the_parents_is_locked() {
        let values: PerProcess<Mutex<Vec<u32>>> = PerProcess::new([const { Mutex::new(Vec::new()) }; FORKS]);
        let parents = values.of(10).lock().unwrap();
        // In the child that lock is never released.
        values.of(11).lock().unwrap().push(11);
        values.of(12).lock().unwrap().push(12);
        assert_eq!(*values.of(12).lock().unwrap(), [12]);
        assert!(parents.is_empty());
    }
}
