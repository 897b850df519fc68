//! The plan, stages and errors of a run.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use poorwill::{ByteSize, DriverError, InvalidTag, PoolConfig, PoolError};
use serde::Serialize;

use super::fraction::Fraction;
use crate::contents::Contents;

/// What to run.
#[derive(Debug, Clone, PartialEq)]
pub struct SleepPlan {
    /// Whole layers of 496 MiB, or one smaller layer.
    pub bytes: NonZeroU64,
    /// Clean cycles.
    pub cycles: NonZeroU32,
    /// Fraction of the granules inside tensors that changes.
    pub changed: Fraction,
    /// What the load is filled with.
    pub contents: Contents,
    /// [`PoolConfig::chunk_granules`] of the arena.
    pub chunk_granules: u64,
    /// The folder of the arena's disk, if it has one.
    pub disk: Option<PathBuf>,
}

impl SleepPlan {
    /// Three cycles of noise with default chunks; a hundredth changes.
    #[must_use]
    pub fn new(bytes: NonZeroU64) -> Self {
        let cycles = NonZeroU32::MIN.saturating_add(2);
        let chunk_granules = PoolConfig::default().chunk_granules;
        let (changed, contents, disk) = (Fraction::HUNDREDTH, Contents::Noise, None);
        Self { bytes, cycles, changed, contents, chunk_granules, disk }
    }
}

/// State of the backups before a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CycleKind {
    /// No backups or cached host memory.
    First,
    /// Backups made in the background.
    Prepared,
    /// All backups are current.
    Clean,
    /// Some backups are stale.
    Changed,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SleepStage {
    /// Measuring the limits.
    Limits,
    /// Loading.
    Load,
    /// Preparing a sleep in the background.
    Prepare,
    /// A sleep with copies, and the wake.
    Cycle {
        /// Kind of the cycle.
        kind: CycleKind,
        /// Number within its kind, from 1.
        number: u32,
    },
    /// Wakes from disk.
    OnDisk,
    /// Cycles that drop everything.
    Drop,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// The device or its budget is too small.
    #[error(
        "cannot load {}: the device has {} free, and the budget allows {}; load less, {}",
        ByteSize(*asked_bytes),
        ByteSize(*free_bytes),
        ByteSize(*limit_bytes),
        if asked_bytes <= free_bytes { "or raise the budget" } else { "or use a larger device" }
    )]
    TooLarge {
        /// Size of the load.
        asked_bytes: u64,
        /// Free memory of the device.
        free_bytes: u64,
        /// Limit of the arena.
        limit_bytes: u64,
    },
    /// Too little host memory for backups and comparison.
    #[error(
        "cannot load {}: its backups and the copy buffer take {} of host memory, and the limit for that is \
         {}; load less, or raise the limit",
        ByteSize(*asked_bytes),
        ByteSize(*needed_bytes),
        ByteSize(*limit_bytes)
    )]
    HostMemory {
        /// Size of the load.
        asked_bytes: u64,
        /// Host memory needed at least.
        needed_bytes: u64,
        /// Limit of host memory.
        limit_bytes: u64,
    },
    /// More tensors than supported.
    #[error(
        "cannot load {}: that takes {tensors} tensors, and {tensors_max} is the most; load less",
        ByteSize(*asked_bytes)
    )]
    TooManyTensors {
        /// Size of the load.
        asked_bytes: u64,
        /// Tensors of the load.
        tensors: u64,
        /// Most tensors supported.
        tensors_max: u64,
    },
    /// The disk's file could not be read beside.
    #[error("cannot read the file of the disk in {}", folder.display())]
    PlainRead {
        /// Its folder.
        folder: PathBuf,
        /// What the system reports.
        source: std::io::Error,
    },
    /// Measuring the limits failed.
    #[error("cannot measure the limits of the device")]
    Limits(#[source] DriverError),
    /// A driver call failed.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// A call of the pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Invalid tag of the drop cycles.
    #[error(transparent)]
    Tag(#[from] InvalidTag),
}
