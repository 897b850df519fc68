//! GPU memory runtime for language-model engines: sleep, wake, and verified bytes.
//!
//! An [`Arena`] is memory of one device. Each block has a [`Tag`]. Sleeping tags release their physical
//! memory and keep their addresses. Waking restores the same bytes there, checked by digest.
//!
//! ```
//! use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let block = arena.alloc(&AllocRequest::new(10 << 20, Tag::weights()))?;
//! arena.write_all(block.id, 0, b"the weights")?;
//!
//! let sleep = arena.sleep(&SleepRequest::all(Level::One))?;
//! assert_eq!(sleep.released_bytes, 10 << 20);
//!
//! arena.wake(&WakeRequest::all())?;
//! assert_eq!(arena.read_vec(block.id, 0, 11)?, b"the weights");
//! # Ok(())
//! # }
//! ```
//!
//! - [`checkpoint`] reads safetensors files. [`model::Model`] loads them into an arena and compares them with
//!   it.
//! - [`offload`] keeps weights in host memory that a device reads.
//! - [`budget`] says how much of a device a process may use.
//! - [`ranks`] has the processes of one engine sleep and wake together, or not at all.
//! - [`hibernation`] takes processes off their GPUs as a whole, and puts them back.
//! - [`lend`] leaves the memory of a sleeping arena on its device until another process needs it.
//! - [`doctor`] examines this computer. [`gpus`] reports a GPU's free memory.
//!
//! Terms and promises: `docs/design.md`. Measurements: the crate `poorwill-bench`.
#![forbid(unsafe_code)]

mod arena;
pub mod budget;
#[cfg(unix)]
pub mod checkpoint;
#[cfg(target_os = "linux")]
mod deferred;
mod device;
#[cfg(unix)]
pub mod doctor;
#[cfg(target_os = "linux")]
pub mod gpus;
#[cfg(target_os = "linux")]
pub mod hibernation;
#[cfg(target_os = "linux")]
pub mod lend;
#[cfg(unix)]
pub mod model;
#[cfg(target_os = "linux")]
pub mod offload;
mod open;
mod owned;
#[cfg(target_os = "linux")]
mod private_folder;
#[cfg(target_os = "linux")]
pub mod ranks;
#[cfg(unix)]
mod reader;
mod unknown_budget;

pub use arena::{Arena, Config};
pub use device::{DeviceSpec, HOST_CAPACITY_BYTES_DEFAULT, ParseDeviceError};
pub use open::{
    Device, DeviceOptions, HostMemoryUse, Links, OpenError, Peers, shared_memory_per_block_bytes,
};
pub use owned::OwnedBlock;
/// Holds what processes lend.
#[cfg(target_os = "linux")]
pub use poorwill_broker as broker;
pub use poorwill_core::{
    AllocRequest, BackupView, Block, BlockId, Budget, ByteSize, CancellationToken, Cap, Changes, Claim,
    ClaimError, CopyPart, DIGEST_VERSION, Decision, DecisionError, DeviceInfo, DeviceRange, Digest, Driver,
    DriverError, DriverErrorKind, Dropped, Envelope, HeldTag, Hold, HostBuffer, HostMemory, HostMemoryInfo,
    InvalidTag, Level, LocalDecision, LostRange, MemoryInfo, Op, ParseSizeError, Pending, Pool, PoolConfig,
    PoolError, PoolStats, Preparation, PrepareEnd, PrepareProgress, PrepareReport, ProcessMemory, Release,
    SleepAction, SleepPhases, SleepReport, SleepRequest, Snapshot, Staged, StoredAs, StreamId, Tag,
    TagPolicy, TagState, Verdict, Verify, WakePhases, WakeProgress, WakeReport, WakeRequest, backup, chain,
    codec, decision, digest, driver, peer, pool, tag,
};
#[cfg(target_os = "linux")]
pub use poorwill_driver::system::proc;

/// A disk for backups that host memory cannot hold.
pub mod disk {
    #[cfg(target_os = "linux")]
    pub use poorwill_driver::disk::FileDisk;
    pub use poorwill_driver::disk::{DiskConfig, DiskIo};
}

/// The programs of the book, run as examples.
// A published package does not have these files. Only its documentation tests would miss them; those run in the
// workspace.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../../docs/start/rust.md")]
    struct StartRust;

    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
