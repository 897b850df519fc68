//! What measuring promises on every device: figures that add up, bytes that are compared, and nothing left behind.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod churn;
mod sleep;
