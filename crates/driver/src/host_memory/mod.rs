//! Host memory for buffers: exactly sized, made by several threads, page-locked where a GPU copies from it.
//!
//! Making host memory is what a first sleep takes its time for, not copying: pages are zeroed, one fault each, and
//! registered. So an arena is told of all buffers at once, packs what it does not have into slabs whose sizes
//! add up to exactly that, and has several threads fault them in, with huge pages where these are quicker, and
//! register them. Each buffer can be waited for by itself; the first ones are there long before the last.
//!
//! What is dropped stays, registered, for whoever asks next: a drop costs a lock and no call of the driver, since
//! giving page-locked memory back waits for all work on the GPU. Slabs that nobody uses go when they are asked for
//! (`Driver::host_trim`), when memory is lacking, with the device, and, where more than 1 GiB lies unused,
//! when slabs of other sizes are made, or when whoever dropped them says that they were for that alone.
//!
//! Nothing is made beyond a budget: what the caller allows, what the control groups leave (beyond that a system kills
//! instead of refusing), and what the machine has.
//!
//! | file | its part |
//! |---|---|
//! | `extents` | which bytes of slabs are free, and how sizes are packed into new slabs; pure |
//! | `books` | slabs and who uses them; pure |
//! | `budget` | what may be held, and the words of a refusal |
//! | `region` | one mapped piece of memory |
//! | `backend` | the calls that a machine can refuse, so that tests can |
//! | `probe` | whether huge pages are quicker here |
//! | `group` | buffers that are asked for together, page-locked or not |
//! | `grow` | making slabs, on several threads |
//! | `arena` | the face |

mod arena;
mod backend;
mod books;
mod budget;
mod extents;
mod group;
mod grow;
mod probe;
mod region;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub(crate) use arena::{HostArena, Options, Piece, Place};
pub(crate) use backend::{Backend, Plain, Refusal};
pub use group::BufferMade;
pub use probe::HugePages;
pub(crate) use region::{Region, Wish};

/// How much may lie unused, in slabs without users, when more is made.
pub(crate) const SURPLUS_BYTES: u64 = 1 << 30;

/// What a device may do about host memory for buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostMemoryConfig {
    /// Most that it may hold, in bytes; without one, what the control groups and the machine leave.
    pub limit_bytes: Option<u64>,
    /// Whether it is page-locked.
    pub pin: Pin,
}

impl HostMemoryConfig {
    /// The same, holding at most `limit_bytes`; `None`: what the control groups and the machine leave.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// The same, page-locked or not.
    #[must_use]
    pub fn pinning(mut self, pin: Pin) -> Self {
        self.pin = pin;
        self
    }
}

/// Whether host memory is page-locked for a GPU. The host device has no use for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pin {
    /// Where the GPU has memory of its own, and the driver does it. Otherwise it is pageable, which
    /// [`HostMemoryDetails::pageable_because`] explains.
    #[default]
    Auto,
    /// Never: copies go through a small page-locked buffer for each stream.
    Never,
}

/// Whether one buffer is page-locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BufferPin {
    /// As the device's host memory is; pageable where it cannot be locked just now.
    #[default]
    Auto,
    /// No.
    Never,
    /// Yes, or the buffer is refused.
    Always,
}

/// How a device's host memory is made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HostMemoryDetails {
    /// Pieces that it is made in and given back by.
    pub slabs: usize,
    /// Threads that make slabs at the same time, at most.
    pub threads: usize,
    /// What is known of huge pages; nothing before they were first needed.
    pub huge_pages: Option<HugePages>,
    /// The NUMA node that it is taken from first, where the machine has several and the GPU is near to one.
    pub numa_node: Option<u32>,
    /// Why it is not page-locked, if it is not.
    pub pageable_because: Option<String>,
}
