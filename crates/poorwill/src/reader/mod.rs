//! Reads ranges of checkpoint files with several threads.

use std::num::NonZeroUsize;
use std::thread;

pub(crate) use self::fill::{RangeRead, buffer_bytes, fits, index, read};
pub(crate) use self::plan::{FileRange, TensorPart, ranges};
pub(crate) use self::storage::{ALIGN_BYTES, Files, PageCache, Storage};
pub(crate) use self::threads::run;

mod error;
mod fill;
#[cfg(target_os = "linux")]
mod linux;
mod plan;
mod storage;
#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests;
mod threads;

pub(crate) const RANGE_BYTES_MAX: u64 = 4 << 20;

/// Bounds of the default: two per core. Readers mostly wait for storage, and remote storage answers many
/// reads as fast as one.
const READERS_MIN: usize = 4;
const READERS_MAX: usize = 16;

pub(crate) fn readers() -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (2 * cores).clamp(READERS_MIN, READERS_MAX)
}
