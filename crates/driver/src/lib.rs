//! Drivers for the memory that Poorwill manages.
//!
//! [`host`] and [`cuda`] implement [`poorwill_core::Driver`]: virtual memory that behaves like a GPU's, and
//! NVIDIA's GPUs. [`disk`] holds backups in a file. [`nvml`] reads what GPUs use, [`system`] what the operating system reports. [`link`]
//! measures a device's bandwidth. Nearly all of the project's `unsafe` code is here; `docs/unsafe.md` has its
//! rules.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod copy_ranges;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod disk;
#[cfg(target_os = "linux")]
pub mod host;
#[cfg(target_os = "linux")]
pub mod host_memory;
#[cfg(target_os = "linux")]
mod ledger;
pub mod link;
#[cfg(target_os = "linux")]
pub mod nvml;
#[cfg(target_os = "linux")]
mod other_process;
#[cfg(target_os = "linux")]
mod parents_only;
#[cfg(target_os = "linux")]
mod peer_memory;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
pub mod system;

#[cfg(target_os = "linux")]
pub use cuda::{CudaConfig, CudaDevice};
#[cfg(target_os = "linux")]
pub use host::{HostConfig, HostDevice};
#[cfg(target_os = "linux")]
pub use host_memory::{BufferMade, BufferPin, HostMemoryConfig, HostMemoryDetails, HugePages, Pin};
