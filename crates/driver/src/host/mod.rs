//! The host device: virtual memory that behaves like a GPU's.
//!
//! It is the default for embedding and for tests. Physical memory is one sparse memfd of all such devices, each
//! counted against its capacity. A backing is a range of the file, and a release punches a hole. Mappings are real ones, so
//! access to unmapped pages faults. Streams with work have threads.
//!
//! It keeps every rule of [`poorwill_core::driver`] and detects more than a GPU. It counts work in flight per
//! mapping: an early unmap fails with `Busy`.
//!
//! Memory of `create_shared` is a file of its own, which other processes can have. Devices that are opened in one folder
//! ([`HostConfig::shared_in`]) are one device: its capacity is that of all their processes together.
//!
//! [`HostProcess`] is a process that can be taken off its devices by a [`HostCheckpointer`] in another process.
//!
//! Reads and digests use the file (`pread`), so pages never written cost nothing. Writes use the mapping,
//! because writers to one file would wait for each other.

mod device;
mod file;
mod hibernation;
mod peer;
mod shared;
mod state;
mod stream;
mod vm;

pub use device::{GRANULE_BYTES, HostConfig, HostDevice};
pub use hibernation::{
    DeviceCall, DeviceLost, HostCheckpointer, HostProcess, HostProcessMemory, StepFailure,
};
pub use peer::HostPeer;
