//! How much memory of the device is to stay free for what asks no broker, and when that was looked at.

use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that is created between two looks, as a part of what is to stay free.
const LOOKS: u64 = 4;

#[derive(Debug, Default)]
pub(in crate::pool) struct FreeMemory {
    min_bytes: AtomicU64,
    /// The pool's sum of all that was created, at the last look.
    looked_at_bytes: AtomicU64,
}

impl FreeMemory {
    pub(in crate::pool) fn set_min(&self, bytes: u64) {
        self.min_bytes.store(bytes, Ordering::Relaxed);
    }

    /// What is to stay free, if so much was created since the last look that another is due.
    pub(in crate::pool) fn due(&self, created_bytes: u64) -> Option<u64> {
        let min_bytes = self.min_bytes.load(Ordering::Relaxed);
        let before = self.looked_at_bytes.load(Ordering::Relaxed);
        let is_due = min_bytes > 0 && created_bytes.saturating_sub(before) >= (min_bytes / LOOKS).max(1);
        if is_due {
            self.looked_at_bytes.store(created_bytes, Ordering::Relaxed);
        }
        is_due.then_some(min_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_due_after_a_part_of_it() {
        let free = FreeMemory::default();
        assert_eq!(free.due(1 << 40), None, "nothing has to stay free");
        free.set_min(8);
        assert_eq!(
            [1, 2, 3, 4, 4, 100].map(|created| free.due(created)),
            [None, Some(8), None, Some(8), None, Some(8)]
        );
    }
}
