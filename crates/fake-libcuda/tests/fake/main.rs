//! What the fake libcuda promises to a caller who loads it: CUDA's behaviour where its callers rely on it,
//! errors where they err, faults on demand, and a count of what they leave behind.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod api;
mod captures;
mod contexts;
mod faults;
mod kernels;
mod memory;
mod peers;
mod plays;
mod streams;
mod strict;
