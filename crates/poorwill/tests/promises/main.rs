//! What the library promises on every device: run on the host device, on the CUDA driver over the fake library, and on
//! GPUs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod headroom;
mod loading;
mod model;
mod offload;
mod owned;
mod prefetch;
