//! What a driver call can fail with.

use std::fmt;

use super::types::{BackingId, DeviceRange, StreamId};
use crate::bytes::ByteSize;

/// A driver call that failed, and why. The call has changed nothing.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// let error = driver.create(1 << 30).unwrap_err();
/// assert!(error.is_out_of_memory());
/// println!("{error}"); // With both sizes.
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {kind}")]
#[non_exhaustive]
pub struct DriverError {
    /// Which call failed.
    pub op: Op,
    /// Why.
    pub kind: DriverErrorKind,
}

impl DriverError {
    /// An error of `op`.
    #[must_use]
    pub fn new(op: Op, kind: DriverErrorKind) -> Self {
        Self { op, kind }
    }

    /// An [`DriverErrorKind::InvalidArgument`] of `op`.
    #[must_use]
    pub fn invalid(op: Op, reason: impl Into<String>) -> Self {
        Self { op, kind: DriverErrorKind::InvalidArgument { reason: reason.into() } }
    }

    /// Whether the device (not the host) has too little free memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.kind, DriverErrorKind::OutOfMemory { .. })
    }
}

/// The calls of the trait, of drivers and of disks, by name.
///
/// ```
/// use poorwill::{Device, Op};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// assert_eq!(driver.create(1).unwrap_err().op, Op::Create);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // Each is the call of the same name.
#[non_exhaustive]
pub enum Op {
    Open,
    CheckProcess,
    Reserve,
    Unreserve,
    Create,
    Export,
    Import,
    Release,
    Map,
    SetAccess,
    Unmap,
    StreamCreate,
    StreamDestroy,
    CheckStream,
    StreamSynchronize,
    StreamWaitEvent,
    EventRecord,
    EventQuery,
    EventSynchronize,
    EventDestroy,
    Synchronize,
    CopyToDevice,
    CopyToHost,
    CopyWithin,
    Save,
    Zero,
    Digest,
    Encode,
    Decode,
    LaunchHost,
    Capturing,
    LoadModule,
    LaunchKernel,
    AdoptStream,
    MemoryInfo,
    HostAlloc,
    HostTrim,
    HostRegister,
    DiskOpen,
    DiskRead,
    DiskWrite,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Open => "open the device",
            Self::CheckProcess => "check the process",
            Self::Reserve => "reserve addresses",
            Self::Unreserve => "give addresses back",
            Self::Create => "create a backing",
            Self::Export => "give a backing to other processes",
            Self::Import => "take another process's backing",
            Self::Release => "release a backing",
            Self::Map => "map",
            Self::SetAccess => "set access",
            Self::Unmap => "unmap",
            Self::StreamCreate => "create a stream",
            Self::StreamDestroy => "destroy a stream",
            Self::CheckStream => "look up a stream",
            Self::StreamSynchronize => "wait for a stream",
            Self::StreamWaitEvent => "let a stream wait for an event",
            Self::EventRecord => "record an event",
            Self::EventQuery => "query an event",
            Self::EventSynchronize => "wait for an event",
            Self::EventDestroy => "destroy an event",
            Self::Synchronize => "synchronize the device",
            Self::CopyToDevice => "copy to the device",
            Self::CopyToHost => "copy to the host",
            Self::CopyWithin => "copy in device memory",
            Self::Save => "save to the host",
            Self::Zero => "write zeros",
            Self::Digest => "compute digests",
            Self::Encode => "encode granules",
            Self::Decode => "decode granules",
            Self::Capturing => "ask what is being captured",
            Self::LoadModule => "load a module",
            Self::LaunchKernel => "launch a kernel",
            Self::AdoptStream => "use a stream of the caller's",
            Self::LaunchHost => "run a function of the host",
            Self::MemoryInfo => "ask for free memory",
            Self::HostAlloc => "allocate host memory",
            Self::HostTrim => "give host memory back",
            Self::HostRegister => "page-lock host memory in place",
            Self::DiskOpen => "open a disk",
            Self::DiskRead => "read from disk",
            Self::DiskWrite => "write to disk",
        })
    }
}

/// Why a driver call failed.
///
/// ```
/// use poorwill::{Device, DriverErrorKind};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// let DriverErrorKind::OutOfMemory { free_bytes, .. } = driver.create(1 << 30).unwrap_err().kind else {
///     return Err("another error".into());
/// };
/// assert_eq!(free_bytes, 64 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverErrorKind {
    /// Wrong in any state of the device.
    #[error("{reason}")]
    InvalidArgument {
        /// Which argument, and why.
        reason: String,
    },
    /// The stream's work is being captured into a graph; see \[capture\].
    #[error("{stream} is being captured into a graph; try again when the capture has ended")]
    Capturing {
        /// The stream.
        stream: StreamId,
    },
    /// The device has too little free memory.
    #[error("the device has {} free of the {} requested", ByteSize(*free_bytes), ByteSize(*asked_bytes))]
    OutOfMemory {
        /// Bytes requested.
        asked_bytes: u64,
        /// Bytes the device had free then.
        free_bytes: u64,
    },
    /// No free range of addresses is long enough.
    #[error("no {} of addresses available: {reason}", ByteSize(*asked_bytes))]
    OutOfAddressSpace {
        /// Bytes requested.
        asked_bytes: u64,
        /// What the operating system or device reported.
        reason: String,
    },
    /// The host has too little memory.
    #[error("no {} of host memory available: {reason}", ByteSize(*asked_bytes))]
    OutOfHostMemory {
        /// Bytes requested.
        asked_bytes: u64,
        /// What the operating system reported.
        reason: String,
    },
    /// A disk has too little space, or its limit allows no more.
    #[error("no {} of disk space available: {reason}", ByteSize(*asked_bytes))]
    OutOfDisk {
        /// Bytes requested.
        asked_bytes: u64,
        /// The limit, or what the operating system reported.
        reason: String,
    },
    /// Part of the range is not mapped with access (for `unmap`: not exactly a run of mappings).
    #[error("{range} is not mapped throughout")]
    NotMapped {
        /// Range of the call.
        range: DeviceRange,
    },
    /// Part of the range is mapped already.
    #[error("something is mapped in {range} already")]
    AlreadyMapped {
        /// Range of the call.
        range: DeviceRange,
    },
    /// Work on the range is in flight. Wait for it first.
    #[error("work on {range} is still in flight; wait for its streams first")]
    Busy {
        /// Range of the call.
        range: DeviceRange,
    },
    /// A backing, stream or event that does not exist (any more).
    #[error("{handle} does not exist (any more)")]
    UnknownHandle {
        /// Kind and number of the handle.
        handle: String,
    },
    /// The caller is a fork of the process that opened the device.
    #[error(
        "the device was opened by process {opened_by}, and this is process {this}, a fork of it; open a device of its own here"
    )]
    WrongProcess {
        /// Process id of the opener.
        opened_by: u32,
        /// Process id of the caller.
        this: u32,
    },
    /// This machine or driver cannot do it.
    #[error("{reason}")]
    Unsupported {
        /// What is missing.
        reason: String,
    },
    /// A failure in the words of the device or operating system.
    #[error("{name} ({code}): {text}")]
    Device {
        /// The error's number.
        code: i64,
        /// Its name.
        name: String,
        /// Its text.
        text: String,
    },
}

impl DriverErrorKind {
    /// An unknown backing.
    #[must_use]
    pub fn unknown_backing(backing: BackingId) -> Self {
        Self::UnknownHandle { handle: backing.to_string() }
    }
}
