//! What the CUDA driver promises: run over the fake library, and on GPUs.
//!
//! The tests take [turns](turn), since they compare figures of the whole device.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod capture;
mod contract;
mod device;
mod hibernation;
mod host_memory;
mod kernels;
mod links;
mod peer_memory;
mod peers;
mod views;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// No other test of this program runs until it is dropped.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
