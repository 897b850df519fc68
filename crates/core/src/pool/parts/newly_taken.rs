//! What the last sleep newly took of host memory for what it keeps of dropped tags. The next one may take as much.

use std::sync::{Mutex, PoisonError};

/// Most of it, in bytes.
const AHEAD_BYTES_MAX: u64 = 512 << 20;

/// Sizes of these buffers, in bytes.
#[derive(Debug, Default)]
pub(in crate::pool) struct NewlyTaken(Mutex<Vec<u64>>);

impl NewlyTaken {
    pub(in crate::pool) fn note(&self, sizes: impl Iterator<Item = u64>) {
        let mut total = 0u64;
        let fits = |bytes: &u64| {
            total = total.saturating_add(*bytes);
            total <= AHEAD_BYTES_MAX
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = sizes.take_while(fits).collect();
    }

    pub(in crate::pool) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
