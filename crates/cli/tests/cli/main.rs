//! The `poorwill` command as its users run it: what it prints where, its exit codes, and what it refuses.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod book;
mod budget;
mod churn;
mod demo;
mod doctor;
#[cfg(target_os = "linux")]
mod fleet;
#[cfg(target_os = "linux")]
mod gpu;
#[cfg(target_os = "linux")]
mod hibernate;
#[cfg(target_os = "linux")]
mod hibernate_gpu;
#[cfg(target_os = "linux")]
mod kubernetes;
#[cfg(target_os = "linux")]
mod load;
#[cfg(target_os = "linux")]
mod mock_engine;
#[cfg(target_os = "linux")]
mod offload;
mod reference;
mod refusals;
mod replay;
mod report;
#[cfg(target_os = "linux")]
mod rotate;
mod shells;
mod sleep;
mod streams;
mod support;
mod usage;
mod verify;
