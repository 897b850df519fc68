//! Values that each process has for itself, forks included.
//!
//! In a forked child, a lock may be held by a thread that does not exist there. So a child never uses its
//! parent's value: it takes the next one of an array.

use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nested forks that each use their value, until one shares that of an ancestor.
pub(crate) const FORKS: usize = 64;

const NUMBER_BITS: u32 = 32;

#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    values: [T; FORKS],
    /// Upper bits: the id of the owning process. Lower bits: the index of its value.
    current: AtomicU64,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new(values: [T; FORKS]) -> Self {
        Self { values, current: AtomicU64::new(0) }
    }

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

fn number(current: u64) -> u64 {
    current & ((1 << NUMBER_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

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
