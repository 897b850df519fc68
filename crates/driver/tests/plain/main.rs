//! What comes out the same whatever the device of this run: over the host device, over a fake library in a process of its
//! own, and without any.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod copy_ptx;
mod digest_ptx;
mod fork;
mod host_contract;
mod host_device;
mod plays;
mod ptx;
