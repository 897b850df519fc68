//! The nouns of the driver contract.

use std::fmt;

use serde::Serialize;

/// A range of device addresses, in bytes. Addresses are integers, never pointers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct DeviceRange {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl DeviceRange {
    /// The range of `bytes` bytes at `addr`.
    #[must_use]
    pub const fn new(addr: u64, bytes: u64) -> Self {
        Self { addr, bytes }
    }

    /// First address behind the range (saturating, so a hostile range compares as too long).
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

    /// The part of `bytes` bytes that begins `offset` bytes in, if it lies inside.
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

/// One stretch of a copy between a host buffer and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPart {
    /// Where on the device, and how many bytes.
    pub device: DeviceRange,
    /// Where in the host buffer, in bytes.
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

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// How the command line names it: `host`, `cuda:0`.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Smallest unit that can be mapped, a power of two, in bytes.
    pub granule_bytes: u64,
    /// Physical memory of the device, in bytes; 0 where it does not tell.
    pub total_bytes: u64,
    /// Number of streams over which copies to the device are worth spreading.
    pub copy_streams: usize,
    /// Whether a kernel of the device copies from host memory at about the speed of the link, so that it pays to copy
    /// on a stream of [`stream_create_kernel_copies`](super::Driver::stream_create_kernel_copies), too.
    pub kernel_copies: bool,
    /// Number of streams over which saves and digests are: the digest of what one has stored may run beside the copy
    /// of another.
    pub save_streams: usize,
    /// Whether digests of the device's memory cost far less than copying it, so that it pays to compare before
    /// a copy.
    pub fast_digests: bool,
}

impl DeviceInfo {
    /// A device that does its copies, saves and digests on one stream each, copies by engines only, and digests slowly.
    ///
    /// `id` is what the command line calls it, `name` is for people; `granule_bytes` is a power of two, `total_bytes` is 0
    /// where the device does not tell.
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

    /// The same, with copies to the device spread over this many streams.
    #[must_use]
    pub fn copying_over(mut self, copy_streams: usize) -> Self {
        self.copy_streams = copy_streams;
        self
    }

    /// The same, with saves and digests spread over this many streams.
    #[must_use]
    pub fn saving_over(mut self, save_streams: usize) -> Self {
        self.save_streams = save_streams;
        self
    }

    /// The same, where a kernel copies from host memory at about the speed of the link, or does not.
    #[must_use]
    pub fn copying_by_kernel(mut self, kernel_copies: bool) -> Self {
        self.kernel_copies = kernel_copies;
        self
    }

    /// The same, where digests cost far less than copies, or do not.
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
    /// All that it holds, in use or kept for later.
    pub held_bytes: u64,
    /// Of which in use by buffers.
    pub used_bytes: u64,
    /// Of what it holds, page-locked: the device copies from and to it at the full speed of the link.
    pub pinned_bytes: u64,
    /// Most that it may hold by what it was told, if anything.
    pub limit_bytes: Option<u64>,
}

impl HostMemoryInfo {
    /// `held_bytes`, of which `used_bytes` are in use by buffers; nothing is page-locked, and there is no limit.
    #[must_use]
    pub const fn new(held_bytes: u64, used_bytes: u64) -> Self {
        Self { held_bytes, used_bytes, pinned_bytes: 0, limit_bytes: None }
    }

    /// The same, with this much of it page-locked.
    #[must_use]
    pub const fn pinning(mut self, pinned_bytes: u64) -> Self {
        self.pinned_bytes = pinned_bytes;
        self
    }

    /// The same, with a limit on what is held, if there is one.
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
    /// Of which free, in bytes. Other processes move this figure.
    pub free_bytes: u64,
    /// What this process holds, where the machine can tell.
    pub process: Option<ProcessMemory>,
}

impl MemoryInfo {
    /// A device of `total_bytes`, of which `free_bytes` are free; what this process holds is not known.
    #[must_use]
    pub const fn new(total_bytes: u64, free_bytes: u64) -> Self {
        Self { total_bytes, free_bytes, process: None }
    }

    /// The same, with what this process holds, where that is known.
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
    /// All of it, in bytes, as the driver counts.
    pub used_bytes: u64,
    /// The part that being on the device at all costs (a bare context), in bytes; 0 where that is not known.
    pub context_bytes: u64,
}

impl ProcessMemory {
    /// A process that holds `used_bytes`, of which a bare context takes `context_bytes`; 0 where that is not known.
    #[must_use]
    pub const fn new(used_bytes: u64, context_bytes: u64) -> Self {
        Self { used_bytes, context_bytes }
    }
}
