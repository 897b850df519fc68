//! Host memory made ahead of the sleep that needs it.
//!
//! Kept parts of a cache that fills up take more with each sleep, and to page-lock memory takes longer than the copy. So a
//! wake has as much made as the sleep before it newly took for what is stored raw. It lies unused in the driver's host
//! memory, which gives it up to any request that lacks it.

use std::sync::{Mutex, PoisonError};

use crate::pool::shared::Shared;

/// Most of it, in bytes.
const AHEAD_BYTES_MAX: u64 = 512 << 20;

/// Sizes of the raw buffers that the last sleep newly took, in bytes.
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

    fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shared {
    /// After a wake.
    pub(in crate::pool) fn make_host_memory_ahead(&self) {
        let sizes = self.newly_taken().take();
        // Where backups are not kept, a wake gives host memory back.
        if self.shape().keep_backups && !self.driver().info().shares_host_memory && !sizes.is_empty() {
            self.backups().make_ahead(&sizes);
        }
    }
}
