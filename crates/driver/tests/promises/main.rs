//! What every device promises, in the same words: run on the host device, on the CUDA driver over the fake library, and on
//! GPUs.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod contract;
mod digests;
mod few_descriptors;
