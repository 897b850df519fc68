//! How much memory of the device is to stay free for what asks no broker, and when that was looked at.

use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that is created between two looks, as a part of what is to stay free.
const LOOKS: u64 = 4;

/// How often so much is created without a look after one in vain.
const RESTS: u64 = 4;

#[derive(Debug, Default)]
pub(in crate::pool) struct FreeMemory {
    min_bytes: AtomicU64,
    /// The pool's sum of all that was created, at the last look.
    looked_at_bytes: AtomicU64,
}

impl FreeMemory {
    pub(in crate::pool) fn set_min(&self, bytes: u64) {
        self.min_bytes.store(bytes, Ordering::Relaxed);
        self.looked_at_bytes.store(0, Ordering::Relaxed);
    }

    pub(in crate::pool) fn min_bytes(&self) -> u64 {
        self.min_bytes.load(Ordering::Relaxed)
    }

    /// Whether so much was created since the last look that another is due.
    pub(in crate::pool) fn is_due(&self, created_bytes: u64) -> bool {
        let before = self.looked_at_bytes.load(Ordering::Relaxed);
        let is_due = created_bytes.saturating_sub(before) >= (self.min_bytes() / LOOKS).max(1);
        if is_due {
            self.looked_at_bytes.store(created_bytes, Ordering::Relaxed);
        }
        is_due
    }

    /// After a look in vain: the next one is due much later.
    pub(in crate::pool) fn rest(&self, created_bytes: u64) {
        let until_bytes = created_bytes.saturating_add(self.min_bytes().saturating_mul(RESTS));
        self.looked_at_bytes.store(until_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_due_after_a_part_of_it() {
        let free = FreeMemory::default();
        free.set_min(8);
        assert_eq!(
            [1, 2, 3, 4, 4, 100].map(|created| free.is_due(created)),
            [false, true, false, true, false, true]
        );
        free.rest(100);
        assert_eq!([102, 133, 134].map(|created| free.is_due(created)), [false, false, true]);
    }
}
