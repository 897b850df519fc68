//! Host memory for buffers: exactly sized, made by several threads, page-locked where a GPU copies from it.
//!
//! A first sleep spends its time on allocation, not copying: pages are faulted in, zeroed and registered. So
//! an arena is given all buffers at once, and packs what it lacks into slabs of exactly that total. Several
//! threads fault the slabs in, with huge pages where these are faster, and register them. Each buffer can be
//! awaited separately; the first are ready long before the last.
//!
//! Dropped buffers stay registered for reuse, since unregistering waits for all work on the GPU. Unused slabs
//! are released:
//!
//! - by `Driver::host_trim`,
//! - when memory is short,
//! - with the device,
//! - above 1 GiB: when slabs of other sizes are made, or when a caller dropped buffers for good.
//!
//! Allocation stays within a budget: the caller's limit, what the control groups leave (the system kills
//! beyond that), and what the machine has. `extents` and `table` decide; `grow`, `region` and `backend` act.

mod arena;
mod backend;
mod budget;
mod extents;
mod group;
mod grow;
mod probe;
mod region;
mod table;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub(crate) use arena::{ArenaBuffer, HostArena, MemoryKind, Options};
pub(crate) use backend::{Backend, Plain, Refusal};
pub use group::BufferMade;
pub use probe::HugePages;
pub(crate) use region::{Region, RegionOptions};

/// Unused slabs to keep when more are made, in bytes.
pub(crate) const SURPLUS_BYTES: u64 = 1 << 30;

/// Options of a device's host memory for buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostMemoryConfig {
    /// Limit in bytes; `None`: what the control groups and the machine leave.
    pub limit_bytes: Option<u64>,
    /// Whether it is page-locked.
    pub pin: Pin,
}

impl HostMemoryConfig {
    /// Sets the limit.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// Sets page-locking.
    #[must_use]
    pub fn pinning(mut self, pin: Pin) -> Self {
        self.pin = pin;
        self
    }
}

/// Whether host memory is page-locked for a GPU. The host device ignores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pin {
    /// If the GPU has its own memory and the driver allows it; otherwise
    /// [`HostMemoryDetails::pageable_because`] says why not.
    #[default]
    Auto,
    /// Never: copies go through a small page-locked buffer of each stream.
    Never,
}

/// Whether one buffer is page-locked.
///
/// ```
/// use poorwill_driver::BufferPin; // In the library: poorwill::offload::BufferPin.
///
/// assert_eq!(BufferPin::default(), BufferPin::Auto);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BufferPin {
    /// Like the device's host memory; pageable if locking fails now.
    #[default]
    Auto,
    /// No.
    Never,
    /// Yes, or the request fails.
    Always,
}

/// How a device's host memory is made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HostMemoryDetails {
    /// Slabs that exist now.
    pub slabs: usize,
    /// Most threads that make slabs concurrently.
    pub threads: usize,
    /// The result for huge pages; `None` before they were first needed.
    pub huge_pages: Option<HugePages>,
    /// The preferred NUMA node, if the machine has several and the GPU is near one.
    pub numa_node: Option<u32>,
    /// Why it is not page-locked, if so.
    pub pageable_because: Option<String>,
}
