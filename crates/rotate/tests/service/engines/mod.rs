//! The adapters, with mock engines on real sockets.

mod calls;
mod canary;
mod faults;
mod script;
mod sglang;
mod vllm;
