//! Tests with the same outcome on every device of a run: over the host device, a fake library in a separate
//! process, or neither.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod codec_ptx;
mod copy_ptx;
mod digest_ptx;
mod fork;
mod host_contract;
mod host_device;
mod host_hibernation;
mod host_process;
mod host_shared;
mod plays;
mod ptx;
