//! What is read at a time of the buffers on disk, by driver: the host memory that a wake needs for any of them.
//!
//! Storages of one driver share its host memory, so they share what stays free for reads.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::Driver;
use crate::per_process::{FORKS, PerProcess};

/// How many, by driver and size.
type SizesOnDisk = BTreeMap<(usize, u64), usize>;

static SIZES: PerProcess<Mutex<SizesOnDisk>> =
    PerProcess::new([const { Mutex::new(BTreeMap::new()) }; FORKS]);

/// Counts what is read at a time of one buffer, for as long as that lives.
#[derive(Debug)]
pub(super) struct SizeOnDisk {
    /// Keeps its address from another driver.
    driver: Arc<dyn Driver>,
    bytes: u64,
}

impl SizeOnDisk {
    pub(super) fn new(driver: Arc<dyn Driver>, bytes: u64) -> Self {
        *lock().entry((number(&driver), bytes)).or_default() += 1;
        Self { driver, bytes }
    }
}

impl Drop for SizeOnDisk {
    fn drop(&mut self) {
        // A forked child has not counted its parent's.
        if let Entry::Occupied(mut count) = lock().entry((number(&self.driver), self.bytes)) {
            match *count.get() {
                0 | 1 => drop(count.remove()),
                more => *count.get_mut() = more - 1,
            }
        }
    }
}

/// The largest now, if there is any.
pub(super) fn largest_bytes(driver: &Arc<dyn Driver>) -> Option<u64> {
    let number = number(driver);
    lock().range((number, 0)..=(number, u64::MAX)).next_back().map(|((_, bytes), _)| *bytes)
}

fn number(driver: &Arc<dyn Driver>) -> usize {
    Arc::as_ptr(driver).addr()
}

fn lock() -> MutexGuard<'static, SizesOnDisk> {
    SIZES.here().lock().unwrap_or_else(PoisonError::into_inner)
}
