//! Adapters, held against servers on real sockets that stand for engines.
#![allow(clippy::unwrap_used)]

mod faults;
mod script;
mod sglang;
mod vllm;
