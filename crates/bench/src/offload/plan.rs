//! The plan, stages and errors of a run.

use std::num::{NonZeroU32, NonZeroU64};

use poorwill::{ByteSize, DriverError, PoolError};

use super::choice::SLOTS_MIN;

/// What to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffloadPlan {
    /// Size of all layers, each of whole granules.
    pub bytes: NonZeroU64,
    /// Number of layers.
    pub layers: NonZeroU32,
}

impl OffloadPlan {
    /// `bytes` in 32 layers.
    #[must_use]
    pub fn new(bytes: NonZeroU64) -> Self {
        Self { bytes, layers: NonZeroU32::MIN.saturating_add(31) }
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OffloadStage {
    /// Allocating and writing host memory.
    Memory,
    /// Timing single layers, to choose slots and repeats.
    Choice,
    /// Copying all layers.
    Copies,
    /// Copying all layers with a kernel.
    KernelCopies,
    /// Passes with resident layers.
    Resident,
    /// Passes that read the layers in place.
    InPlace,
    /// Copies beside computing, without dependencies.
    SideBySide,
    /// Passes with prefetching.
    Prefetch,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A layer is smaller than a granule.
    #[error(
        "cannot measure {} in {layers} layers: {} each is less than a granule of the device, {}; ask for {} or more{}",
        ByteSize(*asked_bytes),
        ByteSize(asked_bytes / u64::from(*layers)),
        ByteSize(*granule_bytes),
        ByteSize(granule_bytes.saturating_mul(u64::from(*layers))),
        fewer(asked_bytes / granule_bytes)
    )]
    LayerTooSmall {
        /// Size of all layers.
        asked_bytes: u64,
        /// Number of layers.
        layers: u32,
        /// Size of a granule.
        granule_bytes: u64,
    },
    /// No memory for two slots.
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
        /// Free memory of the device.
        free_bytes: u64,
        /// Limit of the arena.
        limit_bytes: u64,
    },
    /// Host memory does not suffice.
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
        /// The limit, or available memory.
        most_bytes: u64,
        /// Whether it is a configured limit.
        is_limit: bool,
    },
    /// A layer could not be allocated.
    #[error("cannot make layer {layer} of {layers}, of {}; ask for less", ByteSize(*layer_bytes))]
    Layer {
        /// Number of the layer, from 1.
        layer: u32,
        /// Number of layers.
        layers: u32,
        /// Size of the layer.
        layer_bytes: u64,
        /// The cause.
        source: DriverError,
    },
    /// A call of the driver failed.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// The pool or a pass failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

fn fewer(layers: u64) -> String {
    match layers {
        0 => String::new(),
        1 => ", or for 1 layer".to_owned(),
        most => format!(", or for {most} layers at most"),
    }
}
