//! Memory policy of the poorwill GPU memory runtime.
//!
//! This crate decides; it never touches a machine. It holds the [`Driver`] trait with its contract,
//! the [`Pool`] that hands out blocks of device memory, the [`budget`] that says how much there may be of it, the plans by which tags of a pool go to
//! sleep and wake, and the words ([`Tag`], [`Digest`], [`ByteSize`]) that every other crate uses.
//! Addresses are integers here, never pointers; there is no `unsafe`, no file and no system call.
//!
//! The machines live in `poorwill-driver`; the library people import is `poorwill`.
#![forbid(unsafe_code)]

pub mod backup;
pub mod budget;
pub mod bytes;
mod chain;
pub mod digest;
pub mod driver;
pub mod pool;
mod sync;
pub mod tag;

pub use budget::{Budget, Cap, Claim, ClaimError, Envelope};
pub use bytes::{ByteSize, ParseSizeError};
pub use chain::chain;
pub use digest::{DIGEST_VERSION, Digest};
pub use driver::{
    BackingId, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, EventId, HostBuffer,
    HostMemory, HostMemoryInfo, MemoryInfo, Op, Pending, ProcessMemory, StreamId,
};
pub use pool::{
    AllocRequest, Block, BlockId, BlockKind, BlockSnapshot, HeldTag, Hold, Level, LostRange, OnProgress,
    Pool, PoolConfig, PoolError, PoolStats, Preparation, PrepareEnd, PrepareProgress, PrepareReport, Release,
    SegmentSnapshot, SleepPhases, SleepReport, SleepRequest, Snapshot, TagStats, Verify, WakePhases,
    WakeProgress, WakeReport, WakeRequest,
};
pub use tag::{Changes, Dropped, InvalidTag, SleepAction, Tag, TagPolicy, TagState};
