//! The adapters, with mock engines on real sockets.
#![allow(clippy::unwrap_used)]

mod calls;
mod canary;
mod faults;
mod script;
mod sglang;
mod vllm;
