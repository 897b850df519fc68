//! The machines under poorwill.
//!
//! Two modules are implementations of [`poorwill_core::Driver`]: [`host`], virtual memory that behaves like a
//! GPU's, and [`cuda`], NVIDIA's GPUs; [`nvml`] asks what GPUs use, and [`system`] what the operating system tells. [`link`]
//! measures what the link to a device moves.
//! Nearly all of the project's `unsafe` lives in this crate; its rules are collected in `docs/unsafe.md`.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
pub mod cuda;
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
mod places;
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
