//! Test suites, fixtures and broken drivers for Poorwill's own tests. Never published.
//!
//! - [`clock`]: a clock that stands still until a test moves it.
//! - [`contract`]: the rules of [`poorwill_core::driver`], one test each, instantiated for a driver by
//!   [`driver_contract!`].
//! - [`scripted`]: a driver around another one, whose calls fail or wait as a script decides.
//! - [`faults`]: load → sleep → wake → free with the n-th driver call failing, for every n.
//! - [`book`]: the snippets of the project's pages.
//! - [`child`]: tests that run again in their own process.
//! - [`broken`]: drivers with one defect each, to prove that the suites notice.
//! - [`latch`]: work that is held back until a test releases it.
//! - [`mod@slice`]: a device of a few granules, cut from a larger one.
//! - [`device`]: the device of a test run, from the environment.
//! - [`effort`]: how thorough a test run is, from the environment.
//! - [`model`]: a reference model of the pool.
//! - [`backups`]: backup storage other than the driver's host memory.
//! - [`tenant`]: blocks of a pool with known bytes.
//! - [`watchdog`]: a time limit for tests that hang.
//! - [`pattern`]: bytes that depend on their position.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // All of it is test code, where a panic is a failed test.

pub mod backups;
pub mod book;
pub mod broken;
pub mod capture;
pub mod child;
pub mod clock;
pub mod contract;
#[cfg(target_os = "linux")]
pub mod device;
pub mod effort;
pub mod faults;
mod forward;
pub mod latch;
pub mod model;
pub mod pattern;
pub mod scripted;
pub mod slice;
pub mod tenant;
pub mod watchdog;
