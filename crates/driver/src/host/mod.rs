//! The host device: virtual memory that behaves like a GPU's.
//!
//! It is the default for embedding and for tests. Physical memory is one sparse memfd, counted against a
//! capacity. A backing is a range of the file, and a release punches a hole. Reservations are inaccessible
//! addresses and mappings are real ones, so access to unmapped pages faults. Streams are threads.
//!
//! It keeps every rule of [`poorwill_core::driver`] and detects more than a GPU. It counts work in flight per
//! mapping, so an early unmap fails with `Busy`. [`HostDevice::resident_bytes`] is the operating system's count
//! of its memory.
//!
//! Reads and digests use the file (`pread`), so pages never written cost nothing. Writes use the mapping, because
//! writers to one file would wait for each other. Zeroing punches holes.

mod device;
mod state;
mod stream;
mod vm;

pub use device::{GRANULE_BYTES, HostConfig, HostDevice};
