//! The host device: virtual memory that behaves like a GPU's.
//!
//! It is the default for embedding and for tests. Physical memory is one sparse memfd, counted against a
//! capacity. A backing is a range of the file, and a release punches a hole. Reservations are inaccessible
//! addresses and mappings are real ones, so access to unmapped device memory faults, in whole pages. Streams are
//! threads.
//!
//! It keeps every rule of the contract in [`poorwill_core::driver`] and detects more than a GPU. Work in flight
//! is counted per mapping, so an early unmap fails with `Busy`. [`HostDevice::resident_bytes`] is the operating
//! system's own count of the device's memory.
//!
//! Reads and digests use the file (`pread`), so pages never written cost nothing. Writes use the mapping, because
//! writers to one file would wait for each other. Zeroing punches holes.

mod device;
mod state;
mod stream;
mod vm;

pub use device::{GRANULE_BYTES, HostConfig, HostDevice};
