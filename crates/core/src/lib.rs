//! Memory policy of the Poorwill GPU memory runtime.
//!
//! It holds the [`Driver`] contract, the [`Pool`] with sleep and wake, the [`budget`] of a device, and [`hibernation`].
//! Addresses are integers, never pointers; there is no `unsafe`, no file and no system call.
//! `poorwill-driver` has the drivers; users import `poorwill`.
#![forbid(unsafe_code)]

pub mod backup;
pub mod budget;
pub mod bytes;
mod chain;
pub mod codec;
pub mod decision;
pub mod digest;
pub mod driver;
pub mod hibernation;
pub mod lend;
pub mod peer;
#[doc(hidden)]
pub mod per_process;
pub mod pool;
#[doc(hidden)]
pub mod shared_threads;
mod sync;
pub mod tag;

pub use budget::{Budget, Cap, Claim, ClaimError, Envelope};
pub use bytes::{ByteSize, ParseSizeError};
pub use chain::chain;
pub use decision::{Decision, DecisionError, LocalDecision, Verdict};
pub use digest::{DIGEST_VERSION, Digest};
pub use driver::{
    BackingId, CodePart, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, Encoded,
    EventId, HostBuffer, HostMemory, HostMemoryInfo, MemoryInfo, Op, Pending, ProcessMemory, Scratch,
    StreamId,
};
pub use pool::{
    AllocRequest, BackupView, Block, BlockId, BlockKind, BlockSnapshot, CancellationToken, HeldTag, Hold,
    Level, LostRange, OnProgress, Pool, PoolConfig, PoolError, PoolStats, Preparation, PrepareEnd,
    PrepareProgress, PrepareReport, Release, SegmentSnapshot, SleepPhases, SleepReport, SleepRequest,
    Snapshot, Staged, TagStats, Verify, WakePhases, WakeProgress, WakeReport, WakeRequest,
};
pub use tag::{Changes, Dropped, InvalidTag, SleepAction, StoredAs, Tag, TagPolicy, TagState};
