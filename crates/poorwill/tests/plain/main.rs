//! Tests that do not depend on the device of this run.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

#[cfg(target_os = "linux")]
mod budget;
mod checkpoint;
mod errors;
#[cfg(target_os = "linux")]
mod hibernate;
#[cfg(target_os = "linux")]
mod ranks;
