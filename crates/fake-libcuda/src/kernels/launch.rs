//! A launch as its caller asked for it, and as it was prepared.

use poorwill_core::DeviceRange;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

pub(crate) struct Prepared {
    /// The launch fails unless this memory is mapped with access.
    pub(crate) ranges: Vec<DeviceRange>,
    pub(crate) work: Box<dyn FnOnce() + Send>,
}
