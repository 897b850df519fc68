//! The calls that a machine can refuse.

use std::fmt;

use super::region::{Came, Region, Wish};

/// How slabs come and go. The defaults are the operating system's, without a GPU.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// Addresses.
    fn map(&self, wish: &Wish) -> Result<Region, String> {
        Region::map(wish)
    }

    /// Addresses in a row, cut into regions of these sizes.
    fn map_row(&self, wish: &Wish, sizes: &[usize]) -> Result<Vec<Region>, String> {
        self.map(wish).map(|region| region.split(sizes))
    }

    /// Memory behind them, by so many threads.
    fn populate(&self, region: &Region, threads: usize, came: &Came) -> Result<(), String> {
        region.populate(threads, came)
    }

    /// Both are given back.
    fn unmap(&self, region: Region) {
        region.unmap();
    }

    /// Page-locks it for the device, which sees it at the address that is given; `None` where there is no such thing.
    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        let _ = region;
        Ok(None)
    }

    /// Ends that; whether it is at an end. May wait for all work on the device.
    fn unlock(&self, region: &Region) -> bool {
        let _ = region;
        true
    }
}

/// Why memory is not page-locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// This machine never does it.
    Unsupported(String),
    /// This time.
    Failed(String),
    /// This time, and it may be locked all the same: the pages must stay where they are.
    Stuck(String),
}

/// Memory of the operating system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain;

impl Backend for Plain {}
