//! The reader of checkpoints: plans in which ranges files are read, and has several threads read them.
//!
//! Where the bytes go is a sink's matter: [`offload::HostCheckpoint`](crate::offload::HostCheckpoint) has them read into
//! their places in host memory, a [`Model`](crate::model::Model) copies them to its blocks on a device, or compares
//! them with what is there.
//!
//! - `plan` cuts the files into ranges.
//! - `storage` has the files: read past the page cache (`O_DIRECT`) where their file system does that, else through it.
//! - `fill` reads a range: whole, whatever a single read gives, and where a device wants reads to begin and end.
//! - `team` gives ranges to threads. The first error stops all of them, and so does whoever wants them read.

use std::num::NonZeroUsize;
use std::thread;

pub(crate) use self::fill::{RangeRead, ReadError, buffer_bytes, fits, index, read};
pub(crate) use self::plan::{FileRange, TensorPart, ranges};
pub(crate) use self::storage::{ALIGN_BYTES, Files, PageCache, Storage};
pub(crate) use self::threads::run;

mod fill;
#[cfg(target_os = "linux")]
mod linux;
mod plan;
mod storage;
#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests;
mod threads;

/// The most that a reader reads at once.
pub(crate) const RANGE_BYTES_MAX: u64 = 4 << 20;

/// Most and fewest readers unless their number is given; in between, two for each core. They wait for storage nearly
/// all the time, and storage far away answers many questions as fast as one.
const READERS_MIN: usize = 4;
const READERS_MAX: usize = 16;

/// How many read where nobody says how many.
pub(crate) fn readers() -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (2 * cores).clamp(READERS_MIN, READERS_MAX)
}
