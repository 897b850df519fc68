//! What to run, what is done next, and why a run failed.

use std::num::{NonZeroU32, NonZeroU64};

use poorwill::{ByteSize, DriverError, PoolError};

use super::choice::SLOTS_MIN;

/// What to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Size of all layers together; each is as many whole granules as fit into its part.
    pub bytes: NonZeroU64,
    /// How many layers.
    pub layers: NonZeroU32,
}

impl Plan {
    /// `bytes` in 32 layers.
    #[must_use]
    pub fn new(bytes: NonZeroU64) -> Self {
        Self { bytes, layers: NonZeroU32::MIN.saturating_add(31) }
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Making host memory, and writing to it.
    Memory,
    /// Measuring single layers, for the choice of slots and repeats.
    Choice,
    /// Copying all layers.
    Copies,
    /// The same by a kernel.
    KernelCopies,
    /// Passes with the layers on the device.
    Resident,
    /// Passes that read the layers in place.
    InPlace,
    /// Copies beside computing, neither of which waits for the other.
    SideBySide,
    /// Passes with prefetching.
    Prefetch,
}

/// Why a run failed. What was computed of wrong bytes is no failure: the report says it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layers are smaller than what the device maps.
    #[error(
        "cannot measure {} in {layers} layers: {} each is less than a granule of the device, {}; ask for {} or more{}",
        ByteSize(*asked_bytes),
        ByteSize(asked_bytes / u64::from(*layers)),
        ByteSize(*granule_bytes),
        ByteSize(granule_bytes.saturating_mul(u64::from(*layers))),
        fewer(asked_bytes / granule_bytes)
    )]
    LayerTooSmall {
        /// Size of all of them.
        asked_bytes: u64,
        /// How many.
        layers: u32,
        /// Least size of each.
        granule_bytes: u64,
    },
    /// The device has too little memory for two slots, or its budget is too small.
    #[error(
        "cannot measure layers of {}: {SLOTS_MIN} slots for them take {}, the device has {} free, and the budget \
         allows {}; ask for less, or for more layers{}",
        ByteSize(*layer_bytes),
        ByteSize(layer_bytes.saturating_mul(SLOTS_MIN as u64)),
        ByteSize(*free_bytes),
        ByteSize(*limit_bytes),
        if limit_bytes < free_bytes { ", or raise the budget" } else { ", or use a larger device" }
    )]
    Slots {
        /// Size of a layer.
        layer_bytes: u64,
        /// What the device has free.
        free_bytes: u64,
        /// What the arena may map.
        limit_bytes: u64,
    },
    /// The layers take more host memory than there may be, or is.
    #[error(
        "cannot measure {}: all of it is to be in host memory, and {}; ask for less{}",
        ByteSize(*asked_bytes),
        if *is_limit {
            format!("the limit for that is {}", ByteSize(*most_bytes))
        } else {
            format!("the computer has {} available", ByteSize(*most_bytes))
        },
        if *is_limit { ", or raise the limit (--host-budget)" } else { "" }
    )]
    HostMemory {
        /// Size of the layers.
        asked_bytes: u64,
        /// How much there can be at most.
        most_bytes: u64,
        /// Whether somebody said so, rather than the computer.
        is_limit: bool,
    },
    /// The memory of a layer was refused.
    #[error("cannot make layer {layer} of {layers}, of {}; ask for less", ByteSize(*layer_bytes))]
    Layer {
        /// Which, from 1.
        layer: u32,
        /// Of how many.
        layers: u32,
        /// Its size.
        layer_bytes: u64,
        /// What the driver said.
        source: DriverError,
    },
    /// A call of the driver failed.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// A call of the pool, or of a pass, failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// How many layers there can be, if any can.
fn fewer(layers: u64) -> String {
    match layers {
        0 => String::new(),
        1 => ", or for 1 layer".to_owned(),
        most => format!(", or for {most} layers at most"),
    }
}
