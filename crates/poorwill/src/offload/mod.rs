//! Weights in host memory: buffers of exact size, and host memory that a device reads in place.
//!
//! - A [`Buffer`] is host memory of exact size from the device's arena, page-locked on request. It lies on
//!   the GPU's NUMA node, with huge pages where useful. The device's host budget, control groups and the
//!   machine limit it.
//! - A [`View`] is host memory as the device sees it, without a copy.
//! - Memory that a view or a lent address exposed is released after the device's work, as by `cudaFreeHost`.
//!   The last drop waits for that work, but not for captures. If waiting fails, the memory is kept.
//! - A [`Prefetcher`] copies layers to the device ahead of their computation.
//! - A [`HostCheckpoint`] is a checkpoint in buffers.
//! - [`Switches`] from the environment disable page-locking and views; no caller can override them.

mod buffer;
mod load;
mod prefetch;
mod stream;
mod switches;
mod view;

pub use self::buffer::Buffer;
pub use self::load::{
    FileReport, HostCheckpoint, HostTensor, LoadError, LoadOptions, LoadProgress, LoadReport, ReadMethod,
    TensorBytes, TensorLocation, read_directly,
};
pub use self::prefetch::{Prefetcher, ReadyLayer, Slots};
pub use self::stream::Stream;
pub use self::switches::{DISABLE_PIN, DISABLE_UVA, InvalidSwitch, Switches};
pub use self::view::View;
pub use poorwill_driver::BufferPin;
