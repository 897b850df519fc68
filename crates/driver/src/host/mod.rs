//! The host device: virtual memory that behaves like a GPU's.
//!
//! It is the embedded default and the test bench. Physical memory is one sparse memfd, counted against a
//! capacity; a backing is a range of it, and releasing punches the hole. Reservations are inaccessible
//! addresses, mappings are real ones, so touching device memory that is not mapped faults exactly as far as
//! the pages go. Streams are threads.
//!
//! It keeps every rule of the contract in [`poorwill_core::driver`] and can tell more than a GPU: work in
//! flight is counted per mapping, so an early unmap is refused with `Busy`; and
//! [`HostDevice::resident_bytes`] is the operating system's own count of the memory behind the device.
//!
//! How bytes move: reads and digests go through the file (`pread`), so a page that was never written costs
//! nothing; writes go through the mapping, because writers to one file would wait for each other there;
//! zeros are holes.

mod device;
mod state;
mod stream;
mod vm;

pub use device::{GRANULE_BYTES, HostConfig, HostDevice};
