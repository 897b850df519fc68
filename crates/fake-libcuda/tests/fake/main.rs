//! What the fake libcuda promises its callers: CUDA's behaviour, errors for mistakes, injected faults, and a count of
//! leaked objects.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod api;
mod captures;
mod checkpoints;
mod contexts;
mod faults;
mod kernels;
mod memory;
mod peers;
mod simulation;
mod streams;
mod strict;
