//! A broker with its clients, in this process and in others that are killed.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic_in_result_fn)] // All of it is test code, where a panic is a failed test.

mod actor;
mod asks;
mod bounds;
mod kills;
mod lending;
mod peer;
mod start;
mod support;
