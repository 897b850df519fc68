//! The types of the driver contract.

use std::fmt;

use serde::Serialize;

/// A range of device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct DeviceRange {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl DeviceRange {
    /// `bytes` bytes at `addr`.
    #[must_use]
    pub const fn new(addr: u64, bytes: u64) -> Self {
        Self { addr, bytes }
    }

    /// First address after the range. Saturates, so that an invalid range compares as too long.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.addr.saturating_add(self.bytes)
    }

    /// Whether `other` lies wholly inside.
    #[must_use]
    pub const fn contains(&self, other: &Self) -> bool {
        other.addr >= self.addr && other.end() <= self.end() && other.addr.checked_add(other.bytes).is_some()
    }

    /// Whether the two share a byte.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.addr < other.end() && other.addr < self.end()
    }

    /// `bytes` bytes from `offset` on, if they lie inside.
    #[must_use]
    pub const fn slice(&self, offset: u64, bytes: u64) -> Option<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Some(Self { addr: self.addr + offset, bytes }),
            _ => None,
        }
    }
}

impl fmt::Display for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.addr, self.end())
    }
}

/// One part of a copy between a host buffer and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPart {
    /// The device's side, and the length.
    pub device: DeviceRange,
    /// Offset in the host buffer, in bytes.
    pub host_offset: u64,
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

handle!(
    /// Physical memory created by a driver. Means nothing to another driver.
    BackingId,
    "backing"
);
handle!(
    /// A queue of work on the device.
    StreamId,
    "stream"
);
handle!(
    /// A point in a stream.
    EventId,
    "event"
);

impl StreamId {
    /// The stream that exists without being created.
    pub const DEFAULT: Self = Self(0);
}

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name on the command line: `host`, `cuda:0`.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// The smallest unit that can be mapped, in bytes; a power of two.
    pub granule_bytes: u64,
    /// Physical memory of the device, in bytes; 0 where unknown.
    pub total_bytes: u64,
    /// Streams worth using for copies to the device.
    pub copy_streams: usize,
    /// Whether a kernel of the device copies from host memory at about link speed. Then copying on a stream of
    /// [`stream_create_kernel_copies`](super::Driver::stream_create_kernel_copies), too, pays.
    pub kernel_copies: bool,
    /// Streams worth using for saves and digests: the digest of one save may run beside the copy of another.
    pub save_streams: usize,
    /// Whether digests of device memory cost far less than copies, so that comparing before a copy pays.
    pub fast_digests: bool,
}

impl DeviceInfo {
    /// A device with one stream each for copies, saves and digests, without kernel copies, and with slow
    /// digests.
    #[must_use]
    pub fn new(id: impl Into<String>, name: impl Into<String>, granule_bytes: u64, total_bytes: u64) -> Self {
        Self {
            id: id.into(),
            name: name.into(),
            granule_bytes,
            total_bytes,
            copy_streams: 1,
            kernel_copies: false,
            save_streams: 1,
            fast_digests: false,
        }
    }

    /// Sets [`DeviceInfo::copy_streams`].
    #[must_use]
    pub fn copying_over(mut self, copy_streams: usize) -> Self {
        self.copy_streams = copy_streams;
        self
    }

    /// Sets [`DeviceInfo::save_streams`].
    #[must_use]
    pub fn saving_over(mut self, save_streams: usize) -> Self {
        self.save_streams = save_streams;
        self
    }

    /// Sets [`DeviceInfo::kernel_copies`].
    #[must_use]
    pub fn copying_by_kernel(mut self, kernel_copies: bool) -> Self {
        self.kernel_copies = kernel_copies;
        self
    }

    /// Sets [`DeviceInfo::fast_digests`].
    #[must_use]
    pub fn digesting_fast(mut self, fast_digests: bool) -> Self {
        self.fast_digests = fast_digests;
        self
    }
}

/// Host memory that a driver has for buffers, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostMemoryInfo {
    /// All of it, in use or kept for later.
    pub held_bytes: u64,
    /// The part in use by buffers.
    pub used_bytes: u64,
    /// The page-locked part of what is held. The device copies from and to it at full link speed.
    pub pinned_bytes: u64,
    /// Its configured limit, if any.
    pub limit_bytes: Option<u64>,
}

impl HostMemoryInfo {
    /// Nothing page-locked, and no limit.
    #[must_use]
    pub const fn new(held_bytes: u64, used_bytes: u64) -> Self {
        Self { held_bytes, used_bytes, pinned_bytes: 0, limit_bytes: None }
    }

    /// Sets [`HostMemoryInfo::pinned_bytes`].
    #[must_use]
    pub const fn pinning(mut self, pinned_bytes: u64) -> Self {
        self.pinned_bytes = pinned_bytes;
        self
    }

    /// Sets [`HostMemoryInfo::limit_bytes`].
    #[must_use]
    pub const fn limited_to(mut self, limit_bytes: Option<u64>) -> Self {
        self.limit_bytes = limit_bytes;
        self
    }
}

/// Memory of a device at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Physical memory of the device, in bytes.
    pub total_bytes: u64,
    /// The free part, in bytes. Other processes change it.
    pub free_bytes: u64,
    /// What this process holds, where known.
    pub process: Option<ProcessMemory>,
}

impl MemoryInfo {
    /// Without the figures of this process.
    #[must_use]
    pub const fn new(total_bytes: u64, free_bytes: u64) -> Self {
        Self { total_bytes, free_bytes, process: None }
    }

    /// Sets [`MemoryInfo::process`].
    #[must_use]
    pub const fn of_process(mut self, process: Option<ProcessMemory>) -> Self {
        self.process = process;
        self
    }
}

/// What one process holds of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// All of it, in bytes, by the driver's count.
    pub used_bytes: u64,
    /// The part that a bare context takes, in bytes; 0 where unknown.
    pub context_bytes: u64,
}

impl ProcessMemory {
    /// For the parameters, see the fields.
    #[must_use]
    pub const fn new(used_bytes: u64, context_bytes: u64) -> Self {
        Self { used_bytes, context_bytes }
    }
}
