//! Weights that live in host memory: buffers of exactly the size that is asked for, and host memory as a device sees
//! it where it is.
//!
//! - A [`Buffer`] is host memory of the device's own arena: exact to the byte, page-locked if that is wanted and the
//!   machine does it, from the GPU's NUMA node, with huge pages where they pay, within the host budget of the device
//!   and what the control groups and the machine leave. What it is refused for is said with what was asked, what is
//!   held and what is allowed.
//! - A [`View`] is host memory as the device sees it: the same bytes, so that what either side writes the other reads.
//!   There is a view of a buffer, and of memory of somebody else's, which is page-locked in place where nobody has
//!   done so. Nothing is ever copied to make one: where it cannot be had, that is an error.
//! - What a view may have shown the device, and what is page-locked and was lent to others, is given back only when the
//!   device's work has ended, as `cudaFreeHost` has it: dropping the last of a buffer and its views waits for that, and
//!   disturbs no capture. Where that cannot be waited for it is kept.
//! - A [`Prefetcher`] brings layers of such memory to the device ahead of their computing.
//! - A [`HostCheckpoint`] is a checkpoint in such buffers, read there past the page cache by several readers.
//! - [`Switches`] are the environment's: they turn page-locking and views off, and no caller turns them on again.

mod buffer;
mod deferred;
mod load;
mod prefetch;
mod stream;
mod switches;
mod view;

pub use self::buffer::Buffer;
pub(crate) use self::deferred::DeferredFree;
pub use self::load::{
    FileReport, HostCheckpoint, HostTensor, LoadError, LoadOptions, LoadProgress, LoadReport, ReadMethod,
    TensorBytes, TensorLocation, read_directly,
};
pub use self::prefetch::{Prefetcher, ReadyLayer, Slots};
pub use self::stream::Stream;
pub use self::switches::{DISABLE_PIN, DISABLE_UVA, InvalidSwitch, Switches};
pub use self::view::View;
pub use poorwill_driver::BufferPin;
