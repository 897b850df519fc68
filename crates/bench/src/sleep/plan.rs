//! What to run, what is done next, and why a run failed.

use std::num::{NonZeroU32, NonZeroU64};

use poorwill::{ByteSize, DriverError, InvalidTag, PoolConfig, PoolError};
use serde::Serialize;

use super::fraction::Fraction;

/// What to run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// How much to load: whole layers of 496 MiB until this is reached, or one layer that is smaller throughout.
    pub bytes: NonZeroU64,
    /// How many times to sleep and wake with nothing changed.
    pub cycles: NonZeroU32,
    /// Which part of the granules that lie wholly inside tensors is written before the last sleep with a copy.
    pub changed: Fraction,
    /// [`PoolConfig::chunk_granules`] of the arena: making host memory is measured with pieces of the same size.
    pub chunk_granules: u64,
}

impl Plan {
    /// Three cycles with `bytes` bytes in an arena with the default chunks; a hundredth changes.
    #[must_use]
    pub fn new(bytes: NonZeroU64) -> Self {
        let cycles = NonZeroU32::MIN.saturating_add(2);
        let chunk_granules = PoolConfig::default().chunk_granules;
        Self { bytes, cycles, changed: Fraction::HUNDREDTH, chunk_granules }
    }
}

/// What a sleep meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// No backup, and no host memory to put one in.
    First,
    /// Backups that were made in the background, of a load that has not slept before.
    Prepared,
    /// Backups of an earlier sleep, all of them still true.
    Clean,
    /// Backups of an earlier sleep, some of which are not true any more.
    Changed,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Measuring limits.
    Limits,
    /// Loading.
    Load,
    /// Preparing a sleep in the background.
    Prepare,
    /// A sleep with the bytes, and the wake.
    Cycle {
        /// What the sleep meets.
        kind: Kind,
        /// Which of its kind, from 1.
        number: u32,
    },
    /// Cycles without a copy.
    Drop,
}

/// Why a run failed. What differs after a wake is no failure: the report says it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device has too little memory for the load, or its budget is too small.
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
        /// What the device has free.
        free_bytes: u64,
        /// What the arena may map.
        limit_bytes: u64,
    },
    /// The device may hold too little host memory for the backups, and for the bytes that are compared.
    #[error(
        "cannot load {}: its backups and what travels beside them take {} of host memory, and the limit for that is \
         {}; load less, or raise the limit",
        ByteSize(*asked_bytes),
        ByteSize(*needed_bytes),
        ByteSize(*limit_bytes)
    )]
    HostMemory {
        /// Size of the load.
        asked_bytes: u64,
        /// Least host memory that it takes.
        needed_bytes: u64,
        /// What the device may hold of it.
        limit_bytes: u64,
    },
    /// The load would have more tensors than can be kept track of here.
    #[error(
        "cannot load {}: that takes {tensors} tensors, and {tensors_max} is the most; load less",
        ByteSize(*asked_bytes)
    )]
    TooManyTensors {
        /// Size of the load.
        asked_bytes: u64,
        /// How many tensors it takes.
        tensors: u64,
        /// How many there may be.
        tensors_max: u64,
    },
    /// A call of the driver failed that no pool had made.
    #[error("cannot measure the limits of the device")]
    Limits(#[source] DriverError),
    /// The device would not say what it has free, or not give host memory back.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// A call of the pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The tag of the cycles without a copy has no good name.
    #[error(transparent)]
    Tag(#[from] InvalidTag),
}
