//! The types of the driver contract.

use std::fmt;

use serde::Serialize;

use crate::digest::Digest;

/// A range of device addresses.
///
/// ```
/// use poorwill::DeviceRange;
///
/// let range = DeviceRange::new(0x1000, 100);
/// assert_eq!(range.slice(16, 20), Some(DeviceRange::new(0x1010, 20)));
/// assert_eq!(range.slice(90, 20), None);
/// ```
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
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, CopyPart, DeviceRange, StreamId, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1000, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"ab")?;
/// let part = CopyPart { device: DeviceRange::new(block.range.addr, 2), host_offset: 1 };
/// let copy = arena.driver().copy_to_host(StreamId::DEFAULT, vec![0; 3].into(), &[part])?;
/// assert_eq!(*copy.wait()?, *b"\0ab");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPart {
    /// The device's side, and the length.
    pub device: DeviceRange,
    /// Offset in the host buffer, in bytes.
    pub host_offset: u64,
}

/// One part of a copy from device memory to device memory.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, DeviceRange, StreamId, Tag, driver::MovePart};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1000, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"ab")?;
/// let part = MovePart { to: DeviceRange::new(block.range.addr + 2, 2), from: block.range.addr };
/// arena.driver().copy_within(StreamId::DEFAULT, &[part])?.wait()?;
/// assert_eq!(arena.read_vec(block.id, 0, 4)?, b"abab");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovePart {
    /// What is written, and the length.
    pub to: DeviceRange,
    /// First address that is read.
    pub from: u64,
}

impl MovePart {
    /// What is read.
    #[must_use]
    pub const fn source(&self) -> DeviceRange {
        DeviceRange::new(self.from, self.to.bytes)
    }
}

/// A granule of the device, and the slot for its code in a host buffer.
///
/// ```
/// use poorwill::driver::CodePart;
///
/// let part = CodePart { granule: 0x7000_0000, host_offset: 4096, slot_bytes: 1 << 20 };
/// assert_eq!(part.host_offset + part.slot_bytes, 4096 + (1 << 20));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodePart {
    /// Address of the granule.
    pub granule: u64,
    /// Where the slot begins, in bytes; a multiple of 16.
    pub host_offset: u64,
    /// Bytes of the slot.
    pub slot_bytes: u64,
}

/// Device memory through which codes pass on their way to a decoding kernel, so that a copy engine carries them.
///
/// ```
/// use poorwill::driver::Scratch;
/// use poorwill::{DeviceRange, StreamId};
///
/// let scratch = Scratch { range: DeviceRange::new(0x7000_0000, 32 << 20), copies: StreamId::DEFAULT };
/// assert_eq!(scratch.range.bytes, 32 << 20);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch {
    /// Mapped memory. Until the decoding has ended, nothing but work of the decoding stream uses it.
    pub range: DeviceRange,
    /// The stream of the copies. Several decoding streams may share it, so that the engine never waits for a
    /// kernel.
    pub copies: StreamId,
}

/// What was stored of an encoded granule.
///
/// ```
/// use poorwill::{Digest, driver::Encoded};
///
/// let encoded = Encoded { bytes: 128, digest: Digest::of(&[0; 4096]) };
/// assert!(encoded.bytes < 4096);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes of the code.
    pub bytes: u64,
    /// Of the granule that the stored code gives.
    pub digest: Digest,
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
    ///
    /// ```
    /// use poorwill::Device;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
    /// let backing = driver.create(driver.info().granule_bytes)?;
    /// driver.release(backing)?;
    /// assert!(driver.release(backing).is_err());
    /// # Ok(())
    /// # }
    /// ```
    BackingId,
    "backing"
);
handle!(
    /// A queue of work on the device.
    ///
    /// ```
    /// use poorwill::{Device, StreamId};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
    /// let stream = driver.stream_create()?;
    /// assert_ne!(stream, StreamId::DEFAULT);
    /// driver.stream_destroy(stream)?;
    /// # Ok(())
    /// # }
    /// ```
    StreamId,
    "stream"
);
handle!(
    /// A point in a stream.
    ///
    /// ```
    /// use poorwill::{Device, StreamId};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
    /// let event = driver.event_record(StreamId::DEFAULT)?;
    /// driver.event_synchronize(event)?;
    /// assert!(driver.event_query(event)?);
    /// driver.event_destroy(event)?;
    /// # Ok(())
    /// # }
    /// ```
    EventId,
    "event"
);

impl StreamId {
    /// The stream that exists without being created.
    pub const DEFAULT: Self = Self(0);
}

/// Properties of a device.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// assert_eq!((driver.info().id.as_str(), driver.info().total_bytes), ("host", 64 << 20));
/// # Ok(())
/// # }
/// ```
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
    /// Other devices whose links to host memory can carry its copies, too, on streams of
    /// [`stream_create_over_link`](super::Driver::stream_create_over_link).
    pub links: usize,
    /// Streams worth using for saves and digests: the digest of one save may run beside the copy of another.
    pub save_streams: usize,
    /// Whether digests of device memory cost far less than copies, so that comparing before a copy pays.
    pub fast_digests: bool,
    /// Whether the device encodes and decodes granules faster than its link carries them.
    pub fast_codec: bool,
    /// What all processes of the computer call its memory: a GPU's UUID as in `GPU-…`, or a folder as in `host:…`. `None`:
    /// other processes cannot have it.
    pub memory_name: Option<String>,
    /// Whether its memory is the computer's, so that backups in host memory take what a sleep releases.
    pub shares_host_memory: bool,
}

impl DeviceInfo {
    /// A device with memory of its own, one stream each for copies, saves and digests, without kernel copies, and
    /// with slow digests.
    #[must_use]
    pub fn new(id: impl Into<String>, name: impl Into<String>, granule_bytes: u64, total_bytes: u64) -> Self {
        Self {
            id: id.into(),
            name: name.into(),
            granule_bytes,
            total_bytes,
            copy_streams: 1,
            kernel_copies: false,
            links: 0,
            save_streams: 1,
            fast_digests: false,
            fast_codec: false,
            memory_name: None,
            shares_host_memory: false,
        }
    }

    /// Sets [`DeviceInfo::shares_host_memory`].
    #[must_use]
    pub fn sharing_host_memory(mut self, shares_host_memory: bool) -> Self {
        self.shares_host_memory = shares_host_memory;
        self
    }

    /// Sets [`DeviceInfo::memory_name`].
    #[must_use]
    pub fn sharing_memory_as(mut self, memory_name: Option<String>) -> Self {
        self.memory_name = memory_name;
        self
    }

    /// Sets [`DeviceInfo::copy_streams`].
    #[must_use]
    pub fn copying_over(mut self, copy_streams: usize) -> Self {
        self.copy_streams = copy_streams;
        self
    }

    /// Sets [`DeviceInfo::links`].
    #[must_use]
    pub fn linking_over(mut self, links: usize) -> Self {
        self.links = links;
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

    /// Sets [`DeviceInfo::fast_codec`].
    #[must_use]
    pub fn encoding_fast(mut self, fast_codec: bool) -> Self {
        self.fast_codec = fast_codec;
        self
    }
}

/// Host memory that a driver has for buffers, in bytes.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// let buffer = driver.host_alloc(1 << 20)?;
/// assert_eq!(driver.host_memory().used_bytes, buffer.len() as u64);
/// # Ok(())
/// # }
/// ```
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
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// driver.create(4 << 20)?;
/// assert_eq!(driver.memory_info()?.free_bytes, 60 << 20);
/// # Ok(())
/// # }
/// ```
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
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// match driver.memory_info()?.process {
///     Some(process) => println!("{} bytes used by this process", process.used_bytes),
///     None => println!("not known"),
/// }
/// # Ok(())
/// # }
/// ```
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
