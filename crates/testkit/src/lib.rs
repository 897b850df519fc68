//! Suites and stand-ins for poorwill's own tests. Never published.
//!
//! - [`clock`]: a clock that stands still until a test moves it.
//! - [`contract`]: the rules of [`poorwill_core::driver`], one test each, instantiated for a driver by
//!   [`driver_contract!`] in a few lines.
//! - [`scripted`]: a driver around another one, whose calls fail or wait as a script says.
//! - [`faults`]: load → sleep → wake → free with the n-th driver call failing, for every n.
//! - [`book`]: the snippets of the pages.
//! - [`child`]: tests that run again in a process of their own.
//! - [`canary`]: drivers that are broken on purpose, to prove that the suites notice.
//! - [`gated`]: work that is held back until a test lets it pass.
//! - [`mod@slice`]: a device of so many granules, cut out of a larger one.
//! - [`device`]: the device that the tests of a run are about, as the environment names it.
//! - [`effort`]: how hard the tests of a run try, as the environment names it.
//! - [`model`]: a pool so simple that it is right, to compare the real one with.
//! - [`stores`]: backups that are kept in other ways than in host memory of the driver.
//! - [`tenant`]: blocks of a pool whose bytes are known.
//! - [`watchdog`]: an end to what never ends.
//! - [`pattern`]: bytes that tell where they belong.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // It is all test code, where a panic is the verdict.

pub mod book;
pub mod canary;
pub mod capture;
pub mod child;
pub mod clock;
pub mod contract;
#[cfg(target_os = "linux")]
pub mod device;
pub mod effort;
pub mod faults;
mod forward;
pub mod gated;
pub mod model;
pub mod pattern;
pub mod scripted;
pub mod slice;
pub mod stores;
pub mod tenant;
pub mod watchdog;
