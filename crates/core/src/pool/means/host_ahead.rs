//! Host memory made ahead of the sleep that needs it.
//!
//! Kept parts of a cache that fills up take more with each sleep, and to page-lock memory takes longer than the copy. So a
//! wake has as much made as the sleep before it newly took for what is kept. It lies unused in the driver's host
//! memory, which gives it up to any request that lacks it.

use crate::pool::shared::Shared;

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
