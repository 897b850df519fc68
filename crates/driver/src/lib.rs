//! The machines under poorwill.
//!
//! Each module is one implementation of [`poorwill_core::Driver`]: today [`host`], virtual memory that
//! behaves like a GPU's. Nearly all of the project's `unsafe` lives in this crate; its rules are collected
//! in `docs/unsafe.md`.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
pub mod cuda;
#[cfg(target_os = "linux")]
pub mod host;
#[cfg(target_os = "linux")]
pub mod nvml;
#[cfg(target_os = "linux")]
mod process;

#[cfg(target_os = "linux")]
pub use host::{HostConfig, HostDevice};
