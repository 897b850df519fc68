//! The library's promises on every device: the host device, the CUDA driver over the fake library, and GPUs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod headroom;
mod lend;
mod loading;
mod model;
mod offload;
mod owned;
mod prefetch;
