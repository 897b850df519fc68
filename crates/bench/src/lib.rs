//! Benchmarks of poorwill and their inputs, for the command and for tests.
//!
//! - [`churn`]: mapped against live memory while a model loads.
//! - [`sleep`]: sleep and wake beside the machine's limits.
//! - [`verify`]: a checkpoint after sleep and wake.
//! - [`offload`]: what weights in host memory cost.
//! - [`load`]: loading a checkpoint into host memory.
//! - [`synthetic`]: a generated checkpoint.
//!
//! Each benchmark has a plan, an observer and a report. Rust and JSON have the same fields: sizes in bytes,
//! times in seconds. Wrong bytes are in the report.
#![forbid(unsafe_code)]

#[cfg(unix)]
mod blocks;
pub mod churn;
#[cfg(unix)]
mod contents;
mod cores;
#[cfg(unix)]
mod cycle;
mod figures;
#[cfg(target_os = "linux")]
pub mod load;
#[cfg(target_os = "linux")]
pub mod offload;
#[cfg(unix)]
mod pattern;
#[cfg(unix)]
mod process;
#[cfg(unix)]
pub mod sleep;
#[cfg(unix)]
pub mod synthetic;
#[cfg(unix)]
pub mod verify;

#[cfg(unix)]
pub use contents::{Contents, ParseContentsError};
pub use figures::Spread;
