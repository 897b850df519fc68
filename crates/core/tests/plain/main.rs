//! Tests without a device.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod budget;
mod hibernation;
