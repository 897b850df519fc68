//! The adapters, with mock engines on real sockets.
#![allow(clippy::unwrap_used)]

mod faults;
mod script;
mod sglang;
mod vllm;
