//! The adapters, with mock engines on real sockets.

mod calls;
mod canary;
mod faults;
pub(crate) mod script;
pub(crate) mod sglang;
mod vllm;
