//! The calls that a machine can refuse.

use std::fmt;

use super::region::{Progress, Region, RegionOptions};

/// How slabs are mapped and released; by default by the operating system, without a GPU.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    fn map(&self, options: &RegionOptions) -> Result<Region, String> {
        Region::map(options)
    }

    /// Reserves contiguous addresses, split into regions of these sizes.
    fn map_row(&self, options: &RegionOptions, sizes: &[usize]) -> Result<Vec<Region>, String> {
        self.map(options).map(|region| region.split(sizes))
    }

    fn populate(&self, region: &Region, threads: usize, progress: &Progress) -> Result<(), String> {
        region.populate(threads, progress)
    }

    fn unmap(&self, region: Region) {
        region.unmap();
    }

    /// Returns the device address, if the machine has any.
    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        let _ = region;
        Ok(None)
    }

    /// Whether it succeeded. May wait for all work on the device.
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
    /// May have registered the pages, so they must stay mapped.
    HalfRegistered(String),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain;

impl Backend for Plain {}
