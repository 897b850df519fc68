//! The calls that a machine can refuse.

use std::fmt;

use super::region::{Progress, Region, RegionOptions};

/// How slabs are mapped and released. The defaults use the operating system, without a GPU.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// Reserves addresses.
    fn map(&self, options: &RegionOptions) -> Result<Region, String> {
        Region::map(options)
    }

    /// Reserves contiguous addresses, split into regions of these sizes.
    fn map_row(&self, options: &RegionOptions, sizes: &[usize]) -> Result<Vec<Region>, String> {
        self.map(options).map(|region| region.split(sizes))
    }

    /// Brings in the region's memory, with this many threads.
    fn populate(&self, region: &Region, threads: usize, progress: &Progress) -> Result<(), String> {
        region.populate(threads, progress)
    }

    fn unmap(&self, region: Region) {
        region.unmap();
    }

    /// Page-locks the region; its device address, if the machine has any.
    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        let _ = region;
        Ok(None)
    }

    /// Ends the page-locking; whether that succeeded. May wait for all work on the device.
    fn unlock(&self, region: &Region) -> bool {
        let _ = region;
        true
    }
}

/// Why memory is not page-locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// This machine never page-locks.
    Unsupported(String),
    /// It failed this time.
    Failed(String),
    /// It failed this time, but may have registered the pages, so they must stay mapped.
    HalfRegistered(String),
}

/// Memory of the operating system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain;

impl Backend for Plain {}
