//! Test suites, fixtures and broken drivers for Poorwill's own tests. Never published.
//!
//! - [`clock`]: a clock that only a test moves.
//! - [`contract`]: the rules of [`poorwill_core::driver`], for [`driver_contract!`].
//! - [`mod@hibernation`]: the rules of [`poorwill_core::hibernation`], for [`hibernation_contract!`].
//! - [`scripted`]: drivers whose calls fail or wait as a script decides.
//! - [`faults`]: scenarios in which the n-th driver call fails, for every n.
//! - [`book`]: the snippets of the project's pages.
//! - [`certificates`]: certificates for tests of TLS.
//! - [`child`]: tests that run in their own process.
//! - [`browser`]: Chromium, for tests of pages.
//! - [`broken`]: drivers with one defect each; the suites must notice.
//! - [`latch`]: work that waits for a test.
//! - [`mod@slice`]: a few granules of a larger device.
//! - [`device`]: the device of a test run.
//! - [`engine`]: processes that can be taken off the host device.
//! - [`command`]: a program as its users run it.
//! - [`effort`]: how thorough a test run is.
//! - [`etcd`]: real servers of etcd, and [`proxy`] in front of them.
//! - [`model`]: a reference model of the pool.
//! - [`backups`], [`disk`]: other backup storage; a disk that fails.
//! - [`storing`]: whether a suite's backups are raw or codes.
//! - [`tenant`]: blocks with known bytes.
//! - [`watchdog`]: a time limit for tests.
//! - [`pattern`]: bytes that depend on their position.
//! - [`processes`]: processes that hibernate, in memory alone.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // All of it is test code, where a panic is a failed test.

pub mod backups;
pub mod book;
pub mod broken;
pub mod broker;
#[cfg(target_os = "linux")]
pub mod browser;
pub mod capture;
pub mod certificates;
pub mod child;
pub mod clock;
pub mod command;
pub mod contract;
#[cfg(target_os = "linux")]
pub mod device;
pub mod disk;
pub mod effort;
#[cfg(target_os = "linux")]
pub mod engine;
#[cfg(target_os = "linux")]
pub mod etcd;
pub mod faults;
mod forward;
pub mod granules;
#[cfg(target_os = "linux")]
pub mod hibernation;
pub mod latch;
pub mod model;
pub mod pattern;
pub mod peer;
pub mod processes;
pub mod proxy;
pub mod scripted;
pub mod slice;
pub mod storing;
pub mod tenant;
pub mod watchdog;
